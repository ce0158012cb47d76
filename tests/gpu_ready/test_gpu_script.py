"""scripts/gpu.py: what it refuses, and its checks on tiny models on a CPU."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from components.models.documents import Documents
from scripts._gpu import gradients, several
from scripts._gpu.checks import MORE_SECONDS, NEEDS_GPU, SECONDS
from scripts._gpu.verdict import Line, Verdict, at_least, at_most, attempt, control, read_lines
from tests.harness import run_ranks
from tests.suites import PARITY, select

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


def results(folder: Path) -> list[tuple[str, Line]]:
    return read_lines(folder / "verdict" / "results.jsonl")


CHOSEN = select([*SECONDS, *MORE_SECONDS], ["kernels", "sampling", "attention", "loss"], PARITY)
CONTROLLED = {"kernels": 37, "gradients": 35, "steps": 1, "recipe": 1, "sampling": 9, "grpo": 1}
"""Checks with controls, planted faults that must be far from the bounds, and how many each has at least."""


@pytest.mark.slow
def test_checks_run_on_a_cpu_and_every_planted_fault_is_far_from_its_bound(tmp_path: Path) -> None:
    """All checks take under five minutes on two cores. A control within 100 times its bound is a failed line."""
    ended = run("--device=cpu", "--small", f"--only={','.join(CHOSEN)}", folder=tmp_path)
    lines = results(tmp_path)
    assert ended.returncode == 0, ended.stdout + (tmp_path / "verdict" / "log.txt").read_text()[-5000:]
    assert {check for check, _ in lines} == {*CHOSEN}
    without_gpu = {check for check, line in lines if line.verdict is Verdict.SKIP}
    # torch 2.11 does not shard 4-bit weights.
    assert NEEDS_GPU & {*CHOSEN} <= without_gpu <= NEEDS_GPU | {"gradients"}
    controls = Counter(check for check, line in lines if "control: " in line.what)
    assert all(controls[check] >= least for check, least in CONTROLLED.items() if check in CHOSEN)
    assert controls.total() >= 60 or not PARITY
    table = (tmp_path / "verdict" / "verdict.md").read_text().splitlines()
    assert len([line for line in table if line.startswith("| ")]) == 1 + len(lines)


def sees_the_future(documents: Documents, seq: int, window: int | None) -> torch.Tensor:
    return torch.ones(len(documents.bounds), 1, seq, seq, dtype=torch.bool)


def ignores_documents(documents: Documents, seq: int, window: int | None) -> torch.Tensor:
    return sees_the_future(documents, seq, window).tril()


def sees_only_itself(documents: Documents, seq: int, window: int | None) -> torch.Tensor:
    return torch.eye(seq, dtype=torch.bool).expand(len(documents.bounds), 1, seq, seq)


MASKS = [
    (sees_the_future, "float32"), (ignores_documents, "mixed"), (sees_only_itself, "float32"),
    *([(sees_the_future, "mixed"), (ignores_documents, "float32"), (sees_only_itself, "mixed")] if PARITY else []),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "dtype"), MASKS)
def test_a_wrong_mask_fails_the_gradients(mask: Callable[..., torch.Tensor], dtype: str) -> None:
    """The loss may pass: of random weights on random tokens it is about ln(vocabulary) whatever attention computes."""

    def on_rank(rank: int) -> list[str]:
        Documents._mask = mask  # type: ignore[method-assign]
        case = next(each for each in gradients.CASES if each.label == f"Llama, {dtype}")
        return [line.what for line in gradients.compared(case, "cpu") if line.verdict is Verdict.FAIL]

    failures = run_ranks(1, on_rank)[0]
    assert any("worst gradient" in each for each in failures), failures
    assert mask is sees_only_itself or any("must be zeros" in each for each in failures), failures


def test_a_check_that_hangs_is_killed_with_its_stacks(tmp_path: Path) -> None:
    """The time of all checks ends while the first one imports torch; the second is not started."""
    ended = run("--device=cpu", "--small", "--only=kernels,loss", "--seconds=7", folder=tmp_path)
    lines = results(tmp_path)
    assert ended.returncode == 1
    assert [(check, line.what) for check, line in lines][-2:] == [("kernels", "ended early"), ("loss", "not started")]
    assert "killed after 7 s" in lines[-2][1].measured
    assert "most recent call first" in (tmp_path / "verdict" / "log.txt").read_text()


@pytest.mark.skipif(not PARITY, reason="starts nine runs of recipes: make parity")
def test_checks_of_several_ranks_run_on_a_cpu(tmp_path: Path) -> None:
    """Predictions and bounds of bandwidth are for GPUs; curves, the export and the verdict on a hang hold anywhere."""
    ended = run("--ranks=2", "--device=cpu", "--small", folder=tmp_path)
    lines = results(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {check for check, _ in lines} == {"curves", "collectives", "throughput", "stopped_rank", "export"}
    assert {line.verdict for _, line in lines} == {"PASS"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the checks pass on a GPU")
def test_a_check_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    """torch raises in each of them, without a GPU; the log has both tracebacks."""
    ended = run("--small", "--only=loss,attention", folder=tmp_path, gpus="0")
    assert [(check, line.verdict) for check, line in results(tmp_path)] == [("loss", "FAIL"), ("attention", "FAIL")]
    log = (tmp_path / "verdict" / "log.txt").read_text()
    assert log.count("Traceback") >= 2
    assert "CUDA" in log
    assert ended.returncode == 1


def test_an_error_is_a_line_and_the_next_part_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Iterator[Line]:
        yield Line("first", "1")
        raise ValueError("no such kernel")

    lines = [*attempt("part", broken()), *attempt("next", iter([Line("second", "2")]))]
    assert [line.what for line in lines] == ["first", "part", "second"]
    assert lines[1].verdict is Verdict.FAIL
    assert lines[1].measured == "ValueError: no such kernel"
    assert "Traceback" in capsys.readouterr().err


def test_verdicts_of_a_figure() -> None:
    assert at_most("error", 0.5, 1.0).verdict is Verdict.PASS
    assert at_most("error", 2.0, 1.0).verdict is Verdict.FAIL
    assert at_most("error", math.nan, 1.0).verdict is Verdict.FAIL
    assert at_most("time", 2.0, 1.0, speed=True).verdict is Verdict.SLOW
    assert at_least("rate", 0.5, 1.0).verdict is Verdict.SLOW
    assert at_least("rate", math.nan, 1.0).verdict is Verdict.SLOW
    assert control("fault", 99.0, 1.0).verdict is Verdict.FAIL
    assert control("fault", 100.0, 1.0).verdict is Verdict.PASS
    assert control("fault", math.nan, 1.0).verdict is Verdict.FAIL
