"""Whole runs whose disk fills up, fails or becomes read-only on the way: how they end, and that they can go on.

Rank 0 stands still at a point of a save or a load while the disk changes. Three cases; with MESHBOOK_TORTURE=1 each
point with each kind.
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

from components.checkpoint.listing import check_contents, list_checkpoints
from components.config.schema.checkpoint import CheckpointConfig
from components.resilience.faults import POINTS, VARIABLE
from tests.distributed.disks import Disk, small_disk
from tests.distributed.forked_runs import Attempt, Command, alive, stopped, until
from tests.distributed.test_checkpoint_kills import ENDS_WITHIN, TORTURE, last_bits, saving_run

ALL = [(kind, point) for kind in ("full", "read-only", "eio") for point in POINTS]
SOME = [("full", "after_folder"), ("full", "after_manifest"), ("read-only", "before_manifest")]
SURVIVED = [("eio", "while_pruning"), ("full", "while_pruning")]
"""What is removed makes room; what cannot be removed is left for the next save."""
SAID = {"full": "No space left on device", "read-only": "Read-only file system", "eio": "Input/output error"}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = saving_run(tmp_path_factory.mktemp("quiet"), "run")
    attempt = command.start()
    assert attempt.wait(120) == 0, attempt.said()
    return last_bits(command.run_dir)


def begun(command: Command) -> Command:
    """A run that was killed once it had saved its first step."""
    attempt = command.start({VARIABLE: "kill:after_rename:rank0"})
    assert attempt.wait(60) == 1, attempt.said()
    return command


@contextmanager
def prepared(kind: str, folder: Path) -> Iterator[tuple[Command, Disk | None]]:
    """A run that has begun. full: all of it on a disk of its own; read-only: its checkpoints are."""
    if kind == "full":
        with small_disk(folder / "disk", "16m") as disk:
            yield begun(saving_run(folder, "disk/run")), disk
    elif kind == "read-only":
        command = begun(saving_run(folder, "run"))
        checkpoints = command.run_dir / "checkpoints"
        checkpoints.rename(folder / "before")
        with small_disk(checkpoints, "16m") as disk:
            shutil.copytree(folder / "before", checkpoints, dirs_exist_ok=True)
            yield command, disk
    else:
        yield begun(saving_run(folder, "run")), None


def spoiled(command: Command, disk: Disk | None, kind: str, point: str) -> Attempt:
    """Start it again, and spoil the disk at `point`."""
    if disk is None:
        return command.start({VARIABLE: f"{kind}:{point}:rank0"})
    attempt = command.start({VARIABLE: f"stop:{point}:rank0"})
    until(lambda: stopped(attempt.ranks().get("rank0", 0)) or attempt.poll() is not None, 60, attempt.said)
    assert attempt.poll() is None, attempt.said()
    ranks = attempt.ranks()
    if kind == "full":
        disk.fill()
    else:
        until(lambda: disk.remount("ro"), 60)
    os.kill(ranks["rank0"], signal.SIGCONT)
    return attempt


@pytest.mark.parametrize(("kind", "point"), ALL if TORTURE else SOME, ids=str)
def test_a_run_on_a_spoiled_disk(kind: str, point: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    with prepared(kind, tmp_path) as (command, disk):
        if kind == "full" and point != "while_pruning":
            command.arguments.append("checkpoint.keep=20")  # else each save would make room for the next
        attempt = spoiled(command, disk, kind, point)
        ranks = list(attempt.ranks().values())
        began = time.monotonic()
        status = attempt.wait(ENDS_WITHIN + (60 if disk is None else 0))  # the armed one has yet to start
        seconds = time.monotonic() - began
        until(lambda: not any(map(alive, ranks)), 30)
        entries = list_checkpoints(command.run_dir, CheckpointConfig())
        assert [problem for entry in entries for problem in check_contents(entry)] == []
        assert entries, "the last good checkpoint is gone"
        if (kind, point) in SURVIVED:
            assert status == 0, attempt.said()
        else:
            assert status == 1, attempt.said()
            assert_told(command.run_dir, attempt.said(), kind)
        if disk is not None:
            disk.remount("rw")
            disk.empty()
        again = command.start()
        assert again.wait(120) == 0, again.said()
        assert status == 0 or f"resumed from {entries[-1].path}" in again.said()
        other = [name for name, value in last_bits(command.run_dir).items() if value != quiet.get(name)]
        assert other == []
    print(f"\n{kind} at {point}: ended with {status} after {seconds:.1f} s")


def assert_told(run_dir: Path, said: str, kind: str) -> None:
    """A line names the file and the bytes; result.json says the same, or it is said that it could not be written."""
    told = [line for line in said.splitlines() if "rank " in line and SAID[kind] in line and str(run_dir) in line]
    assert any("bytes" in line or "could not be read" in line for line in told), said
    assert not re.search(r"Error in sys.excepthook|During handling", said), said
    result = run_dir / "result.json"
    if result.exists():
        ended = json.loads(result.read_text())
        assert ended["status"] == "failed"
        assert SAID[kind] in ended["error"]
    else:
        assert re.search(r"result.json could not be written: No space left on device \([\d,]+ bytes are free\)", said)


def test_a_disk_that_is_full_before_it_starts(tmp_path: Path) -> None:
    """Told in a sentence that names the directory and the bytes; nothing is broken by it."""
    with small_disk(tmp_path / "disk", "16m") as disk:
        command = begun(saving_run(tmp_path, "disk/run"))
        disk.fill()
        attempt = command.start()
        assert attempt.wait(60) == 2
        said = attempt.said().strip()
        assert re.fullmatch(
            rf"run.dir={command.run_dir}: cannot be written: No space left on device \(0 bytes are free\); .*", said
        )
        disk.empty()
        again = command.start()
        assert again.wait(120) == 0, again.said()


def test_a_slow_disk_slows_the_run_and_no_more(quiet: dict[str, Any], tmp_path: Path) -> None:
    command = saving_run(tmp_path, "run")
    attempt = command.start({VARIABLE: "slow=1:after_shards:rank1:2,slow=1:before_rename:rank0:3"})
    assert attempt.wait(120) == 0, attempt.said()
    assert last_bits(command.run_dir) == quiet
