"""scripts/gpu.py: what it refuses, and its checks on tiny models on a CPU."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts._gpu import several
from scripts._gpu.verdict import Verdict, at_least, at_most
from tests.suites import PARITY, in_parity

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu.py"


def run(*arguments: str, folder: Path, gpus: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments, "--out", str(folder / "verdict")]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no GPU is visible"), (("--ranks=8",), "--ranks=8: no GPU is visible"),
        (("--ranks=8", "--only=loss", "--device=cpu"), "choose some of curves"),
        (("--only=loss,los", "--device=cpu"), "--only=los: no such check; choose some of"),
    ],
)  # fmt: skip
def test_wrong_calls_end_with_one_message(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    ended = run(*arguments, folder=tmp_path)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert not (tmp_path / "verdict").exists()


def test_the_large_model_of_several_gpus_needs_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    overrides = [*several._large(8), "parallelism=fsdp2", "cluster.procs_per_node=8", "cluster.oversubscribe=true"]
    command = [sys.executable, str(SCRIPT.parents[1] / "recipes" / "pretrain.py"), *overrides]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}
    ended = subprocess.run(
        [*command, "cluster.device=cpu", "cluster.dry_run=true"],
        check=False, capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_runs_of_a_check_are_in_its_process_group(tmp_path: Path) -> None:
    """scripts/gpu.py kills the group of a check that takes too long."""
    code = (
        "import sys, time; from pathlib import Path; from scripts._gpu.several import start_recipe\n"
        "run = start_recipe('pretrain', Path(sys.argv[1]) / 'run', 'cpu', 1, ['model=llama_2m'])\n"
        "print(run.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=SCRIPT.parents[1], process_group=0) as check:
        assert check.stdout
        try:
            assert os.getpgid(int(check.stdout.readline())) == check.pid
        finally:
            os.killpg(check.pid, signal.SIGKILL)


@in_parity
def test_checks_run_on_a_cpu_and_write_a_verdict(tmp_path: Path) -> None:
    ended = run("--device=cpu", "--small", "--only=packed,syncs,loss", folder=tmp_path)
    verdict = json.loads((tmp_path / "verdict" / "verdict.json").read_text())
    found = {name: [each for each in verdict["lines"] if each["check"] == name] for name in ("packed", "syncs", "loss")}
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [each["verdict"] for each in found["packed"]] == ["PASS"] * 4
    assert [each["verdict"] for each in found["syncs"]] == ["SKIP"]
    errors = [each for each in found["loss"] if "gradient" in each["what"]]
    assert [each["verdict"] for each in errors] == ["PASS"] * 4
    table = (tmp_path / "verdict" / "verdict.md").read_text().splitlines()
    assert len([line for line in table if line.startswith("| ")]) == 1 + len(verdict["lines"])


@pytest.mark.skipif(not PARITY, reason="starts nine runs of recipes: make parity")
def test_checks_of_several_ranks_run_on_a_cpu(tmp_path: Path) -> None:
    """Predictions and bounds of bandwidth are for GPUs; curves, the export and the verdict on a hang hold anywhere."""
    ended = run("--ranks=2", "--device=cpu", "--small", folder=tmp_path)
    verdict = json.loads((tmp_path / "verdict" / "verdict.json").read_text())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {each["check"] for each in verdict["lines"]} == {
        "curves", "collectives", "throughput", "stopped_rank", "export"
    }  # fmt: skip
    assert {each["verdict"] for each in verdict["lines"]} == {"PASS"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the checks pass on a GPU")
def test_a_check_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    """torch's CPU build raises in each of them."""
    ended = run("--small", "--only=loss,attention", folder=tmp_path, gpus="0")
    lines = json.loads((tmp_path / "verdict" / "verdict.json").read_text())["lines"]
    assert [(each["check"], each["verdict"]) for each in lines] == [("loss", "FAIL"), ("attention", "FAIL")]
    assert all("CUDA" in each["measured"] for each in lines), lines
    assert ended.returncode == 1


def test_verdicts_of_a_figure() -> None:
    assert at_most("error", 0.5, 1.0).verdict is Verdict.PASS
    assert at_most("error", 2.0, 1.0).verdict is Verdict.FAIL
    assert at_most("error", math.nan, 1.0).verdict is Verdict.FAIL
    assert at_most("time", 2.0, 1.0, speed=True).verdict is Verdict.SLOW
    assert at_least("rate", 0.5, 1.0).verdict is Verdict.SLOW
    assert at_least("rate", math.nan, 1.0).verdict is Verdict.SLOW
