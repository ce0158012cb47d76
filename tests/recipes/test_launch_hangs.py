"""A run without progress is ended, the missing rank is named, and the stack of every rank is kept.

The recipe is a copy of recipes/finetune.py with a fault injected on one rank.
"""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from components.protocol.errors import EXIT_HUNG
from tests.recipes.launching import TWO, Bench, Done
from tests.suites import TORTURE, in_torture

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "finetune.py"
MODEL, OPTIMIZER = "        # Model: built on meta", "        optimizer = training.build_optimizer("
LOOP = "        run.begin(model"
SAVE = "                run.save(step)\n"
PLANTED = """
        import time
        from pathlib import Path

        moments = []

        def fault_point(moment: str) -> None:
            moments.append(moment)
            if run.rank == {rank} and moment == "{moment}" and moments.count(moment) == {after}:
                {action}

        def stop_rank() -> None:
            (Path(__file__).parent / "fault_time_{rank}").write_text(str(time.time()))
            import os, signal
            os.kill(os.getpid(), signal.SIGSTOP)

        fault_point("start")

"""
HOOKS = """
        for layer in models.decoder_layers(model.module):
            layer.register_forward_pre_hook(lambda *_: fault_point("step" if model.module.training else "evaluation"))

"""
STOP = "import threading; threading.Timer({delay:.3f}, stop_rank).start()"
NOTE = '(Path(__file__).parent / "fault_time_{rank}").write_text(str(time.time()))'
SPIN = NOTE + "\n                while True: pass"
HOLD_THE_GIL = NOTE + "; import ctypes; ctypes.PyDLL(None).pause()"
SHORT = (
    *("training.max_steps=100000", "training.global_batch_size=4", "training.micro_batch_size=2"),
    *("training.seq_len=128", "data.max_samples=64", "data.max_eval_samples=8", "generation.samples=0"),
    *("training.eval_every=4", "checkpoint.every=3", "cluster.device=cpu"),
)
TIMEOUT = 6
"""Seconds; more than the tiny model needs for a step on a busy machine."""
BOUND = 2 * TIMEOUT + 5
AFTER = {"start": 1, "step": 9, "evaluation": 7, "save": 2}
"""The call of `fault_point` at which the fault is injected, by moment."""


@dataclass(frozen=True)
class Hung:
    """How a run with a hanging rank ended."""

    done: Done
    seconds: float
    """From the fault to the end of the last process."""
    message: str
    """The error message: the second last line of stderr; the last line has the log folder."""
    logs: Path


def inject_fault(bench: Bench, rank: int, moment: str, action: str) -> None:
    """Copy the recipe with the fault injected."""
    planted = PLANTED.format(rank=rank, moment=moment, after=AFTER[moment], action=action.format(rank=rank))
    saving = SAVE, f'                fault_point("save")\n{SAVE}'
    bench.copy("finetune.py", (MODEL, planted + MODEL), (OPTIMIZER, HOOKS + OPTIMIZER), saving)


def hang(bench: Bench, rank: int, moment: str, action: str, *arguments: str) -> Hung:
    """Run until the watchdog ends the run; no process may be left."""
    inject_fault(bench, rank, moment, action)
    done = bench.start(*SHORT, f"training.step_timeout_seconds={TIMEOUT}", *arguments).wait()
    ended = time.time()
    assert done.status == EXIT_HUNG, done.errors
    message, log_line = done.errors.rstrip("\n").splitlines()[-2:]
    assert log_line.startswith("logs: ")
    assert bench.result() == {"status": "hung", "error": message}
    bench.assert_no_process_left()
    return Hung(done, ended - float(bench.notes("fault_time")[0]), message, Path(log_line.removeprefix("logs: ")))


def assert_reported_missing(hung: Hung, rank: int, moment: str) -> None:
    """The run ends in time, the message has the missing rank and the key to change, and both stacks are logged."""
    assert hung.seconds < BOUND
    assert hung.message.startswith("no progress for ")
    assert f"rank {rank} on host " in hung.message
    assert f"rank {1 - rank} " not in hung.message
    assert " is missing" in hung.message
    assert f"training.step_timeout_seconds={TIMEOUT}" in hung.message
    assert ("before the loop" in hung.message) == (moment == "start")
    other = (hung.logs / f"rank_{1 - rank}.log").read_text()
    assert re.search(r'File ".*tried.py", line \d+ in main', other)
    # The missing rank was continued for a moment to dump its stack. Rank 0 logs to the terminal.
    dump = hung.done.errors if rank == 0 else (hung.logs / f"rank_{rank}.log").read_text()
    assert re.search(r'File ".*tried.py", line \d+ in main', dump), dump


@pytest.mark.parametrize(("rank", "moment"), [(0, "save"), *([(1, "step")] if TORTURE else [])])
def test_stopped_rank_ends_the_run_and_is_named(rank: int, moment: str, bench: Bench) -> None:
    """Rank 0 hosts the store that the ranks communicate through; without it the others must detect the hang."""
    assert_reported_missing(hang(bench, rank, moment, STOP.format(delay=0.0), TWO), rank, moment)


@in_torture
def test_rank_in_an_endless_loop_is_named_with_its_source_line(bench: Bench) -> None:
    """The rank still sends heartbeats; it is found because it has started fewer collectives than the others."""
    hung = hang(bench, 0, "evaluation", SPIN, TWO)
    assert hung.seconds < BOUND
    assert re.search(r"rank 0 on host \S+ has not joined a collective that others wait in: it is", hung.message)
    assert re.search(r"at evaluate, fault_point \(tried.py:\d+\)", hung.message)
    assert "rank 1" not in hung.message
    # The flight recorder is written too: rank 1 has started a collective that rank 0, in its loop, has not.
    entries = [
        json.loads((hung.logs / f"flight_recorder_rank_{rank}.json").read_text())["gloo"]["entries"] for rank in (0, 1)
    ]
    assert 0 < len(entries[0]) < len(entries[1])


@pytest.mark.skipif(not TORTURE, reason="takes half a minute: make torture")
def test_rank_that_holds_the_gil_is_reported_missing(bench: Bench) -> None:
    """None of its threads can run, so it sends no heartbeats; its stack is dumped nevertheless."""
    hung = hang(bench, 1, "step", HOLD_THE_GIL, TWO)
    assert_reported_missing(hung, 1, "step")
    assert "in fault_point" in (hung.logs / "rank_1.log").read_text()


@pytest.mark.skipif(not TORTURE, reason="tested with two processes above: make torture")
def test_single_process_in_an_endless_loop_is_ended(bench: Bench) -> None:
    hung = hang(bench, 0, "step", SPIN, "parallelism=single")
    assert hung.seconds < BOUND
    assert re.search(r"in step \d+: it is at train_step, fault_point \(tried.py:\d+\)", hung.message)


@pytest.mark.skipif(not TORTURE, reason="takes half a minute: make torture")
def test_hanging_evaluation_is_ended(bench: Bench) -> None:
    """recipes/evaluate.py runs the watchdog too."""
    before, late = "        measured = training.evaluate(", "        if run.rank == 1: import time; time.sleep(1e6)\n"
    bench.copy("evaluate.py", (before, late + before))
    small = ("data.max_samples=64", "data.max_eval_samples=8", "generation.samples=0", "cluster.device=cpu")
    done = bench.start(TWO, *small, f"evaluation.step_timeout_seconds={TIMEOUT}").wait()
    assert done.status == EXIT_HUNG, done.errors
    message = done.errors.splitlines()[-2]
    assert message.startswith("no progress for ")
    assert "rank 1" in message
    assert "rank 0" not in message
    assert f"evaluation.step_timeout_seconds={TIMEOUT} is the limit" in message
    assert json.loads(next((bench.folder / "outputs").rglob("result.json")).read_text())["status"] == "hung"
    bench.assert_no_process_left()


@in_torture
def test_slow_run_that_makes_progress_is_not_ended(bench: Bench) -> None:
    """The start, a step, an evaluation and a save each take longer than the timeout, but make progress throughout."""
    inject_fault(bench, 1, "step", "pass")
    slow = """moments.append(moment)
            if moment in ("step", "evaluation") and run.state.step >= 2: time.sleep(0.6)"""
    text = bench.recipe.read_text().replace("moments.append(moment)", slow)
    writes = "for _ in range(10): time.sleep(0.5); (Path(__file__).parent / 'bulk').write_bytes(bytes(2**21))"
    text = text.replace('fault_point("save")\n', f"{writes} if run.rank == 1 else None\n")
    assert text.count(LOOP) == 1
    bench.recipe.write_text(text.replace(LOOP, f"        if run.rank == 1: time.sleep(6)\n{LOOP}"))
    bench.complete(
        *(TWO, *SHORT, "training.step_timeout_seconds=3", "training.max_steps=3", "training.global_batch_size=16"),
        *("data.max_eval_samples=16", "checkpoint.every=0", "checkpoint.export=false"),
    )
    assert bench.result()["status"] == "ok"


@pytest.mark.skipif(not TORTURE, reason="twenty stops take ten minutes: make torture")
@pytest.mark.parametrize("draw", range(20))
def test_rank_stopped_at_a_random_moment_is_named(draw: int, bench: Bench) -> None:
    rng = random.Random(draw)
    rank, moment = draw % 2, ("step", "evaluation", "save", "start")[draw // 2 % 4]
    delay = rng.uniform(0.0, 0.3)
    hung = hang(bench, rank, moment, STOP.format(delay=delay), TWO)
    print(f"draw {draw}: rank {rank} stopped {delay:.2f} s after {moment}: end in {hung.seconds:.1f} s: {hung.message}")
    assert hung.seconds < BOUND
    assert f"rank {rank} on host " in hung.message
    assert " is missing" in hung.message
    assert f"rank {1 - rank} " not in hung.message
