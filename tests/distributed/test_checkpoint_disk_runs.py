"""Complete runs whose disk fills up, fails or becomes read-only: how they end, and that they can be resumed.

Rank 0 is stopped at a point of a save or load while the disk changes. One case by default; with MESHBOOK_TORTURE=1
every kind of fault at every point.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from components.checkpoint.manifest import check_contents, list_checkpoints
from components.config.schema.run import CheckpointConfig
from components.watch.faults import POINTS, VARIABLE
from tests.distributed.disks import Disk, small_disk
from tests.distributed.forked_runs import Attempt, Command, alive, stopped, until
from tests.distributed.test_checkpoint_kills import ENDS_WITHIN, final_state, saving_run
from tests.suites import TORTURE

ALL_CASES = [(kind, point) for kind in ("full", "read-only", "eio") for point in POINTS]
DEFAULT_CASES = [("full", "after_manifest")]
HARMLESS = [("eio", "while_pruning"), ("full", "while_pruning")]
"""The run survives these: pruning frees space, and what cannot be removed is left for the next save."""
ERRORS = {"full": "No space left on device", "read-only": "Read-only file system", "eio": "Input/output error"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = saving_run(tmp_path_factory.mktemp("quiet"), "run")
    attempt = command.start()
    assert attempt.wait(120) == 0, attempt.output()
    return final_state(command.run_dir)


def killed_after_first_save(command: Command) -> Command:
    """Run the command until its first checkpoint is published, then kill it."""
    attempt = command.start({VARIABLE: "kill:after_rename:rank0"})
    assert attempt.wait(60) == 1, attempt.output()
    return command


@contextmanager
def prepared_run(kind: str, folder: Path) -> Iterator[tuple[Command, Disk | None]]:
    """Prepare a run with one checkpoint; its directory (full) or its checkpoints (read-only) are on a separate disk."""
    if kind == "full":
        with small_disk(folder / "disk", "16m") as disk:
            yield killed_after_first_save(saving_run(folder, "disk/run")), disk
    elif kind == "read-only":
        command = killed_after_first_save(saving_run(folder, "run"))
        checkpoints = command.run_dir / "checkpoints"
        checkpoints.rename(folder / "before")
        with small_disk(checkpoints, "16m") as disk:
            shutil.copytree(folder / "before", checkpoints, dirs_exist_ok=True)
            yield command, disk
    else:
        yield killed_after_first_save(saving_run(folder, "run")), None


def start_with_disk_fault(command: Command, disk: Disk | None, kind: str, point: str) -> Attempt:
    """Restart the run and cause the disk fault at `point`."""
    if disk is None:
        return command.start({VARIABLE: f"{kind}:{point}:rank0"})
    attempt = command.start({VARIABLE: f"stop:{point}:rank0"})
    until(lambda: stopped(attempt.ranks().get("rank0", 0)) or attempt.poll() is not None, 60, attempt.output)
    assert attempt.poll() is None, attempt.output()
    ranks = attempt.ranks()
    if kind == "full":
        disk.fill()
    else:
        until(lambda: disk.remount("ro"), 60)
    os.kill(ranks["rank0"], signal.SIGCONT)
    return attempt


@pytest.mark.parametrize(("kind", "point"), ALL_CASES if TORTURE else DEFAULT_CASES, ids=str)
def test_run_with_a_disk_fault_fails_cleanly_and_resumes(
    kind: str, point: str, reference: dict[str, Any], tmp_path: Path
) -> None:
    with prepared_run(kind, tmp_path) as (command, disk):
        if kind == "full" and point != "while_pruning":
            command.arguments.append("checkpoint.keep=20")  # otherwise each save would free space for the next
        attempt = start_with_disk_fault(command, disk, kind, point)
        ranks = list(attempt.ranks().values())
        began = time.monotonic()
        status = attempt.wait(ENDS_WITHIN + (60 if disk is None else 0))  # an injected fault: not started yet
        seconds = time.monotonic() - began
        until(lambda: not any(map(alive, ranks)), 30)
        entries = list_checkpoints(command.run_dir, CheckpointConfig())
        assert [problem for entry in entries for problem in check_contents(entry)] == []
        assert entries, "the last complete checkpoint is gone"
        if (kind, point) in HARMLESS:
            assert status == 0, attempt.output()
        else:
            assert status == 1, attempt.output()
            assert_error_is_reported(command.run_dir, attempt.output(), kind)
        if disk is not None:
            disk.remount("rw")
            disk.empty()
        again = command.start()
        assert again.wait(120) == 0, again.output()
        assert status == 0 or f"resumed from {entries[-1].path}" in again.output()
        differing = [name for name, value in final_state(command.run_dir).items() if value != reference.get(name)]
        assert differing == []
    print(f"\n{kind} at {point}: ended with {status} after {seconds:.1f} s")


def assert_error_is_reported(run_dir: Path, output: str, kind: str) -> None:
    """Assert that a line names the file and its size, and that result.json has the error or is reported unwritable."""
    lines = [line for line in output.splitlines() if "rank " in line and ERRORS[kind] in line and str(run_dir) in line]
    assert any("bytes" in line or "could not be read" in line for line in lines), output
    assert not re.search(r"Error in sys.excepthook|During handling", output), output
    result_file = run_dir / "result.json"
    if result_file.exists():
        result = json.loads(result_file.read_text())
        assert result["status"] == "failed"
        assert ERRORS[kind] in result["error"]
    else:
        assert re.search(r"result.json could not be written: No space left on device \([\d,]+ bytes are free\)", output)


def test_start_on_a_full_disk_is_rejected_and_leaves_the_run_resumable(tmp_path: Path) -> None:
    """The error is one sentence with the directory and the free bytes, and the checkpoints remain usable."""
    with small_disk(tmp_path / "disk", "16m") as disk:
        command = killed_after_first_save(saving_run(tmp_path, "disk/run"))
        disk.fill()
        attempt = command.start()
        assert attempt.wait(60) == 2
        output = attempt.output().strip()
        assert re.fullmatch(
            rf"run.dir={command.run_dir}: cannot be written: No space left on device \(0 bytes are free\); .*", output
        )
        disk.empty()
        again = command.start()
        assert again.wait(120) == 0, again.output()
        assert "did not release it" not in again.output(), "waited for the heartbeats of a start that was rejected"


def test_slow_disk_does_not_change_the_result(reference: dict[str, Any], tmp_path: Path) -> None:
    command = saving_run(tmp_path, "run")
    attempt = command.start({VARIABLE: "slow=1:after_shards:rank1:2,slow=1:before_rename:rank0:3"})
    assert attempt.wait(120) == 0, attempt.output()
    assert final_state(command.run_dir) == reference
