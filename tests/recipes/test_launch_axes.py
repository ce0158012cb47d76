"""A rank that dies or hangs in the middle of a step ends the run under pipeline and expert parallelism, too.

The recipe is a copy of recipes/finetune.py with a fault injected into the forward of one rank.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.recipes.launching import TWO, Bench
from tests.suites import TORTURE

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "finetune.py"
BEFORE = "        optimizer = training.build_optimizer("
PLANTED = """
        import time
        from pathlib import Path

        def fault_point(*_: object) -> None:
            if run.rank == {rank} and model.module.training and run.state.step == 2:
                (Path(__file__).parent / "fault_time_{rank}").write_text(str(time.time()))
                {action}

        for layer in models.decoder_layers(model.module):
            layer.register_forward_pre_hook(fault_point)

"""
KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
HANG = "time.sleep(600)"
SHORT = (
    *("training.max_steps=1000", "training.global_batch_size=4", "training.micro_batch_size=2", "training.seq_len=128"),
    *("data.max_samples=64", "data.max_eval_samples=2", "generation.samples=0", "cluster.device=cpu"),
)
TIMEOUT = 10
"""Collective timeout in seconds; longer than the start-up times of two ranks differ on a busy machine."""
AXES = {"pp2": ("tiny", "parallelism=pp2_1f1b"), "ep2": ("tiny_moe", "parallelism=fsdp2_ep2")}


def run_with_fault(bench: Bench, axis: str, rank: int, action: str, *arguments: str) -> tuple[str, float]:
    """Run to the end; return stderr, and the seconds from the fault to the end."""
    text = RECIPE.read_text()
    assert BEFORE in text
    bench.recipe.write_text(text.replace(BEFORE, PLANTED.format(rank=rank, action=action) + BEFORE))
    model, mesh = AXES[axis]
    done = bench.start(mesh, TWO, *SHORT, *arguments, model=model).wait()
    assert done.status == 1, done.errors
    (when,) = bench.notes("fault_time")
    seconds = time.time() - float(when)
    assert bench.result()["status"] == "failed"
    bench.assert_no_process_left()
    return done.errors, seconds


@pytest.mark.parametrize(("axis", "rank"), [("pp2", 1), *([("ep2", 0)] if TORTURE else [])])
def test_killed_rank_ends_the_run_and_is_named_last(axis: str, rank: int, bench: Bench) -> None:
    errors, seconds = run_with_fault(bench, axis, rank, KILL)
    message, log_line = errors.rstrip("\n").splitlines()[-2:]
    assert message == f"rank {rank} was ended by SIGKILL (out of memory, or killed by a person)"
    assert log_line.startswith("logs: ")
    assert seconds < 15


@pytest.mark.skipif(not TORTURE, reason="waits for a timeout: make torture")
@pytest.mark.parametrize(("axis", "rank"), [("ep2", 1), ("pp2", 0)])
def test_hanging_rank_ends_the_run_when_the_collective_times_out(axis: str, rank: int, bench: Bench) -> None:
    errors, seconds = run_with_fault(bench, axis, rank, HANG, f"cluster.collective_timeout_minutes={TIMEOUT / 60}")
    message = errors.rstrip("\n").splitlines()[-2]
    assert message.startswith(f"rank {1 - rank} ")  # the rank that waited; it may have been terminated while exiting
    assert f"Timed out waiting {TIMEOUT * 1000}ms" in message
    assert seconds < TIMEOUT + 15
