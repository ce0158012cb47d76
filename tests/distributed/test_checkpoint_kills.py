"""Complete runs are killed repeatedly, at random moments and at every fault point of a save, and restarted.

The target is one rank, all ranks, the launcher or torchrun's agent. Each time the same command must resume from the
newest checkpoint, with at most one step lost, and the final state must equal that of an uninterrupted run bit for bit.
Every second run saves in the background, every fourth runs under torchrun. 5 kills and 8 inside the save itself; 500
of each with MESHBOOK_TORTURE=1.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from components.checkpoint import save_checkpoint
from components.checkpoint.manifest import check_contents, list_checkpoints
from components.config.schema.run import CheckpointConfig
from components.watch.faults import POINTS, VARIABLE
from tests.distributed.forked_runs import Attempt, Command, alive, steps_logged, stopped, until
from tests.distributed.test_checkpoint_crash import assert_resumes_from, set_all, start
from tests.harness import start_ranks
from tests.suites import TORTURE

KILLS = int(os.environ.get("MESHBOOK_KILLS", "500" if TORTURE else "5"))
STEPS = 12 if TORTURE else 8
TARGETS = ("rank0", "rank1", "all", "launcher")
""""launcher" is TorchElastic's agent in runs that it started."""
ENDS_WITHIN = 30.0

SMALL = (
    "model=tiny", "data=jsonl", "cluster=local_2proc", "cluster.device=cpu", "training.global_batch_size=4",
    "training.micro_batch_size=2", "training.seq_len=32", "training.eval_every=0", "generation.samples=0",
    "checkpoint.export=false", "logging.wandb.mode=disabled", "logging.plot=false", "logging.examples=0",
)  # fmt: skip


def small_run(folder: Path, run_dir: str, *arguments: str, elastic: bool = False) -> Command:
    """Command for a run of two ranks on a few generated samples."""
    data = folder / "data.jsonl"
    if not data.exists():
        rows = [{"prompt": f"{number} + 1", "response": str(number + 1)} for number in range(64)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Command(folder, folder / run_dir, [*SMALL, f"data.path={data}", *arguments], elastic)


def saving_run(folder: Path, run_dir: str, elastic: bool = False) -> Command:
    """Command for a run that saves every step and keeps one checkpoint, so that each save also prunes."""
    every_step = ("checkpoint.every=1", "checkpoint.keep=1", f"training.max_steps={STEPS}")
    return small_run(folder, run_dir, *every_step, elastic=elastic)


def final_state(run_dir: Path) -> dict[str, Any]:
    """Return the contents of the last checkpoint: parameters, optimizer, RNG states, counters, data cursor."""
    folder = run_dir / "checkpoints" / f"step_{STEPS}"
    state: dict[str, Any] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":  # tensor by tensor: the order within the header is not deterministic
            with safe_open(file, framework="np") as tensors:
                state |= {f"{file.name} {name}": tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118
        elif file.suffix == ".json" and file.name != "manifest.json":
            state[file.name] = json.loads(file.read_text())
            state[file.name].pop("config", None)  # contains the run directory
    return state


@dataclass
class Kill:
    """A planned kill: at a fault point, or at a random moment (None)."""

    target: str
    point: str | None = None


@dataclass
class KillSequence:
    """Consecutive runs that are killed until `pending` is empty."""

    folder: Path
    pending: list[Kill]
    rng: random.Random
    duration: float = 0.0
    reference: dict[str, Any] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    """Number of steps lost by a kill -> number of kills."""
    slowest_exit: float = 0.0
    runs: int = 0

    def run_reference(self) -> None:
        """Record the final state and the duration of an uninterrupted run."""
        command = saving_run(self.folder, "quiet")
        attempt = command.start()
        assert attempt.wait(120) == 0, attempt.output()
        self.duration = time.monotonic() - attempt.began
        self.reference = final_state(command.run_dir)

    def run_once(self, elastic: bool) -> None:
        """Drive one run from its first start to its end, killing and restarting it."""
        command = saving_run(self.folder, f"run_{self.runs}", elastic)
        in_background = self.runs % 2
        command.arguments += ["checkpoint.async_save=true"] * in_background
        self.runs += 1
        newest: Path | None = None
        history = []
        while True:
            kill = self.pending[-1] if self.pending else None
            is_counted = kill is not None and (kill.point != "at_load" or newest is not None)
            if kill is not None and not is_counted:
                kill = Kill("all", "after_rename")  # no checkpoint to load yet: make one first
            armed = kill is not None and kill.point is not None
            attempt = command.start({VARIABLE: f"stop:{kill.point}:rank0:1"} if kill and armed else None)
            killed = kill is not None and self._kill_at(attempt, kill)
            if not killed:
                assert attempt.wait(120) == 0, f"did not resume without help:\n{attempt.output()}"
            resumed = re.findall(r"resumed from (\S+)", attempt.output())
            assert resumed == [str(newest)] if resumed or (newest and not killed) else True, (
                f"{newest}:\n{attempt.output()}"
            )
            if not killed:
                if newest is None:  # an uninterrupted run: update the duration
                    self.duration = time.monotonic() - attempt.began
                break
            history.append(str(kill))
            if kill and is_counted:
                self.done[f"{kill.target} {kill.point or ''}".strip()] += 1
                self.pending.pop()
            newest = self._check_checkpoints(command.run_dir, 1 + in_background)
            history.append(f"newest is {newest and newest.name}")
        assert json.loads((command.run_dir / "result.json").read_text())["status"] == "ok"
        final = final_state(command.run_dir)
        differing = sorted(name for name in {*final, *self.reference} if final.get(name) != self.reference.get(name))
        assert differing == [], f"differs from the uninterrupted run, after {history}"
        print(f"run {self.runs}: {sum(self.done.values())} kills, steps lost -> times {dict(self.lost)}", flush=True)
        shutil.rmtree(command.run_dir)

    def _kill_at(self, attempt: Attempt, kill: Kill) -> bool:
        """Kill the target; return False if the run ended before."""
        moment = time.monotonic() + self.rng.uniform(0, self.duration)

        def due() -> bool:
            if attempt.poll() is not None:
                return True
            return time.monotonic() >= moment if kill.point is None else stopped(attempt.ranks().get("rank0", 0))

        until(due, 120, attempt.output)
        if attempt.poll() is not None:
            return False
        ranks = attempt.kill(kill.target)
        for rank in ranks if kill.point else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGCONT)
        began = time.monotonic()
        status = attempt.wait(ENDS_WITHIN)
        assert status in (0, 1, -signal.SIGKILL), f"status {status}\n{attempt.output()}"  # 0: it had already ended
        until(lambda: not any(map(alive, ranks)), ENDS_WITHIN, lambda: f"orphans of {ranks}")
        self.slowest_exit = max(self.slowest_exit, time.monotonic() - began)
        return True

    def _check_checkpoints(self, run_dir: Path, max_lost: int) -> Path | None:
        """Assert that all published checkpoints are complete and at most `max_lost` steps are lost; return the newest.

        With background saves two steps may be lost: the next step runs while the save is written.
        """
        entries = list_checkpoints(run_dir, CheckpointConfig())
        assert [problem for entry in entries for problem in check_contents(entry)] == []
        newest = entries[-1] if entries else None
        saved = newest.manifest.step if newest and newest.manifest else 0
        lost = steps_logged(run_dir) - saved
        assert lost <= max_lost, f"{lost} steps lost: {steps_logged(run_dir)} done, {saved} saved"
        self.lost[max(lost, 0)] += 1
        return newest.path if newest else None


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Temporary folder that is removed after the test, because it holds hundreds of runs."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.timeout(3600)
def test_killed_runs_resume_without_help_and_end_bitwise_identical(folder: Path) -> None:
    rng = random.Random(5)
    at_points = [Kill(target, point) for point in POINTS for target in TARGETS]
    if not TORTURE:  # every second point once, with alternating targets
        at_points = at_points[:: 2 * len(TARGETS) + 1]
    at_random = [Kill(rng.choice(TARGETS)) for _ in range(KILLS - len(at_points))]
    sequence = KillSequence(folder, rng.sample(at_points + at_random, KILLS), rng)
    sequence.run_reference()
    began = time.monotonic()
    while sequence.pending:
        sequence.run_once(elastic=sequence.runs % 4 == 3)
    print(f"\n{KILLS} kills over {sequence.runs} runs in {time.monotonic() - began:.0f} s, all resumed without help")
    print(f"targets {dict(sequence.done)}\nsteps lost -> times {dict(sequence.lost)}")
    print(f"slowest exit after a kill {sequence.slowest_exit:.1f} s")
    assert sum(sequence.done.values()) == KILLS


@pytest.mark.timeout(3600)
def test_kill_during_a_save_keeps_the_previous_checkpoint(folder: Path) -> None:
    """One or both of two ranks are killed at a random moment of a save."""
    count, rng = 500 if TORTURE else 8, random.Random(6)

    def body(rank: int, run_dir: Path, delays: tuple[float, float]) -> float:
        run = start(1.0)
        save_checkpoint(run_dir, 1, *run, {"step": 1}, CheckpointConfig(keep=1))
        set_all(run, 2.0)
        torch.distributed.barrier()
        began = time.monotonic()
        kill_after(delays[rank])
        save_checkpoint(run_dir, 2, *run, {"step": 2}, CheckpointConfig(keep=1))
        return time.monotonic() - began

    never = float("inf")
    duration = max(start_ranks(2, body, folder / "quiet", (never, never))[0].result for _ in range(2))
    newest: Counter[str] = Counter()
    for number in range(count):
        moment, run_dir = rng.uniform(0, duration), folder / str(number)
        delays = rng.choice([(moment, never), (never, moment), (moment, moment)])
        outcomes = start_ranks(2, body, run_dir, delays, timeout=ENDS_WITHIN)
        assert not any(outcome.stack for outcome in outcomes), f"a rank hangs: {outcomes}"
        for entry in list_checkpoints(run_dir, CheckpointConfig()):
            assert check_contents(entry) == []
        newest[assert_resumes_from(run_dir, {1, 2}).name] += 1
        shutil.rmtree(run_dir)
    print(f"\n{count} kills inside a save of {duration:.3f} s; newest afterwards {dict(newest)}")
    assert newest["step_1"]


def kill_after(seconds: float) -> None:
    """Fork a process that kills this one after `seconds`."""
    if seconds == float("inf"):
        return
    victim = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(victim, signal.SIGKILL)
        os._exit(0)
