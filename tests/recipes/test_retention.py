"""Retention in a run that saves by steps and by time and keeps the best checkpoint, before and after a resume."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from components.checkpoint.manifest import Manifest
from scripts import checkpoints
from tests.recipes.test_finetune import TINY, curve, run

POLICY = ("checkpoint.every=4", "checkpoint.keep=1", "checkpoint.keep_every=8", "checkpoint.keep_best=true",
          "checkpoint.every_minutes=0.000000001", "training.eval_every=4")  # fmt: skip
CHEAP = ("checkpoint.export=false", "generation.samples=0",
         "optimizer.lr=0.3", "optimizer.schedule=constant", "logging.plot=false", "training.seq_len=128")  # fmt: skip
"""The learning rate is so high that the first evaluation after the start does not have the worst loss."""


def published(run_dir: Path) -> dict[str, Manifest]:
    return {path.name: Manifest.read(path) for path in (run_dir / "checkpoints").iterdir()}


@pytest.mark.skipif(os.environ.get("MESHBOOK_TORTURE") != "1", reason="three full runs: make torture")
def test_run_keeps_the_checkpoints_of_its_retention_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    command = (*TINY, *POLICY, *CHEAP, f"run.dir={run_dir}")
    output = run(
        "finetune.py", *command, "training.max_steps=7", "checkpoint.last=false", "parallelism=single", cwd=tmp_path
    )
    # Saving by time is due at every step, but takes effect one step later.
    assert re.findall(r"saved .*/(step_\S+)", output) == ["step_2", "step_4", "step_6"]
    first = published(run_dir)
    assert {name: manifest.ephemeral for name, manifest in first.items()} == {"step_4": False, "step_6": True}
    assert first["step_6"].eval_loss is None

    output = run(
        "finetune.py", *command, "training.max_steps=13", "parallelism=fsdp2", "cluster=local_2proc", cwd=tmp_path
    )
    assert re.findall(r"saved .*/(step_\S+)", output) == ["step_8", "step_10", "step_12", "step_13"]
    last = published(run_dir)
    losses = {name: manifest.eval_loss for name, manifest in last.items()}
    evaluated = curve(run_dir, "eval_loss")  # at the start, 4, 7 (the end), 6 (resumed), 8, 12, 13 (the end)
    by_step = dict(zip((4, 8, 12, 13), (evaluated[1], *evaluated[-3:]), strict=True))
    best = min(by_step, key=lambda step: by_step[step])
    assert losses == {f"step_{step}": by_step[step] for step in {best, 8, 13}}

    assert checkpoints.main(["list", str(run_dir)]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "best" in rows[f"step_{best}"]
    assert "every 8" in rows["step_8"]
    assert "newest" in rows["step_13"]
    assert checkpoints.main(["verify", str(run_dir)]) == 0
