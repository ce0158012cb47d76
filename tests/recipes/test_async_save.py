"""recipes/finetune.py with checkpoint.async_save: the checkpoints of synchronous saves, logged once published."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from components.checkpoint.manifest import Manifest
from tests.distributed.test_checkpoint_async import contents
from tests.recipes.test_finetune import ROOT, TINY, curve, result, run, start
from tests.suites import in_torture

STEPS = (4, 8, 12, 16)
SETTINGS = (*TINY, "parallelism=fsdp2", "cluster=local_2proc", "checkpoint.every=4", "checkpoint.keep=9",
            "training.max_steps=16", "checkpoint.export=false", "generation.samples=0",
            "logging.plot=false")  # fmt: skip


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a run with synchronous saves."""
    folder = tmp_path_factory.mktemp("waiting")
    output = run("finetune.py", *SETTINGS, f"run.dir={folder}/run", cwd=folder)
    assert "in the background" not in output
    assert re.findall(r"saved .*/(step_\d+)", output) == [f"step_{step}" for step in STEPS]
    return folder / "run"


def assert_same_checkpoints(run_dir: Path, other: Path) -> None:
    for step in STEPS:
        path, expected = (each / "checkpoints" / f"step_{step}" for each in (run_dir, other))
        assert contents(path) == contents(expected)
        assert Manifest.read(path).eval_loss == Manifest.read(expected).eval_loss
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {f"step_{step}" for step in STEPS}


def test_async_saves_write_the_same_checkpoints(synchronous: Path, tmp_path: Path) -> None:
    output = run("finetune.py", *SETTINGS, "checkpoint.async_save=true", f"run.dir={tmp_path}/run", cwd=tmp_path)
    assert re.findall(r"saving step (\d+) in the background", output) == ["4", "8", "12"]  # the last one is not
    assert re.findall(r"saved .*/step_(\d+)", output) == ["4", "8", "12", "16"]
    assert_same_checkpoints(tmp_path / "run", synchronous)
    assert curve(tmp_path / "run") == curve(synchronous)
    assert result(tmp_path / "run")["status"] == "ok"


@in_torture
def test_preempted_run_completes_the_saves_it_has_started(synchronous: Path, tmp_path: Path) -> None:
    command = (*SETTINGS, "checkpoint.async_save=true", f"run.dir={tmp_path}/run")
    process = start(ROOT / "recipes" / "finetune.py", *command, cwd=tmp_path)
    assert process.stdout is not None
    output = ""
    while "saving step 4" not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    process.send_signal(signal.SIGUSR2)
    output += process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    stopped = result(tmp_path / "run")
    assert stopped["status"] == "preempted"
    assert 4 < stopped["steps"] < 16
    saved = re.findall(r"saved .*/(step_\d+)", output)
    assert saved[0] == "step_4"
    assert saved[-1] == f"step_{stopped['steps']}"

    output = run("finetune.py", *command, cwd=tmp_path)
    assert f"resumed from {tmp_path}/run/checkpoints/{saved[-1]}" in output
    assert curve(tmp_path / "run") == curve(synchronous)
    if stopped["steps"] not in STEPS:
        (tmp_path / "run" / "checkpoints" / saved[-1]).rename(tmp_path / "between")
    assert_same_checkpoints(tmp_path / "run", synchronous)
