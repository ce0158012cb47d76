"""scripts/benchmark/compare.py end to end at the smallest size: the recipe and a plain loop train the same curve."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.test_finetune import ROOT


@pytest.mark.skipif(
    "MESHBOOK_ALL_PARITY" not in os.environ, reason="takes 21 s of CPU time; MESHBOOK_ALL_PARITY=1 runs it"
)
def test_meshbook_and_plain_loop_arms_train_one_curve(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/benchmark/compare.py", "full_packed", "--arms", "meshbook,loop"]
    sizes = ["--size", "tiny", "--device", "cpu", "--rounds", "1", "--steps", "3", "--warmup", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, *sizes, "--out", tmp_path], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = list(csv.DictReader((tmp_path / "compare.csv").open()))
    assert [row["verdict"] for row in rows] == ["ok", "ok"]
    assert {row["arm"] for row in rows} == {"meshbook", "loop"}
    assert len({row["losses"] for row in rows}) == 2  # each arm reports its own losses
