"""Whole runs are killed again and again, at random moments and at every named point of a save, and started again.

The target is one rank, all ranks, the launcher or torchrun's agent. Each time the same command must go on by itself,
from the newest checkpoint there was, with no more than one step lost; what comes out in the end must be, bit for bit,
what a run that nobody disturbed leaves. Every second run saves in the background, every fourth is torchrun's. 50 kills;
with MESHBOOK_TORTURE=1 500, and 500 more inside the save itself.
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
from components.checkpoint.listing import check_contents, list_checkpoints
from components.config.schema.checkpoint import CheckpointConfig
from components.resilience.faults import POINTS, VARIABLE
from tests.distributed.forked_runs import Attempt, Command, alive, steps_logged, stopped, until
from tests.distributed.test_checkpoint_crash import assert_whole, set_all, start
from tests.harness import start_ranks

TORTURE = bool(os.environ.get("MESHBOOK_TORTURE"))
KILLS = int(os.environ.get("MESHBOOK_KILLS", "500" if TORTURE else "12"))
STEPS = 12 if TORTURE else 8
TARGETS = ("rank0", "rank1", "all", "launcher")
"""The launcher: TorchElastic's agent where that started the ranks."""
ENDS_WITHIN = 30.0

SMALL = (
    "model=tiny", "data=jsonl", "cluster=local_2proc", "cluster.device=cpu", "training.global_batch_size=4",
    "training.micro_batch_size=2", "training.seq_len=32", "training.eval_every=0", "generation.samples=0",
    "checkpoint.export=false", "logging.wandb.mode=disabled", "logging.plot=false", "logging.examples=0",
)  # fmt: skip


def small_run(folder: Path, run_dir: str, *arguments: str, elastic: bool = False) -> Command:
    """A command for a run of two ranks on a few made-up samples."""
    data = folder / "data.jsonl"
    if not data.exists():
        rows = [{"prompt": f"{number} + 1", "response": str(number + 1)} for number in range(64)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Command(folder, folder / run_dir, [*SMALL, f"data.path={data}", *arguments], elastic)


def saving_run(folder: Path, run_dir: str, elastic: bool = False) -> Command:
    """One that saves every step and keeps one, so that each save also removes."""
    every_step = ("checkpoint.every=1", "checkpoint.keep=1", f"training.max_steps={STEPS}")
    return small_run(folder, run_dir, *every_step, elastic=elastic)


def last_bits(run_dir: Path) -> dict[str, Any]:
    """What the last checkpoint holds: parameters, optimizer, random states, counters, data cursor."""
    folder = run_dir / "checkpoints" / f"step_{STEPS}"
    held: dict[str, Any] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":  # tensor by tensor: the order of a header is chance
            with safe_open(file, framework="np") as tensors:
                held |= {f"{file.name} {name}": tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118
        elif file.suffix == ".json" and file.name != "manifest.json":
            held[file.name] = json.loads(file.read_text())
            held[file.name].pop("config", None)  # it tells the run directory
    return held


@dataclass
class Kill:
    """One that is to happen: at a named point, or (None) at a random moment."""

    target: str
    point: str | None = None


@dataclass
class Torment:
    """Runs under kills, one after the other, until `todo` is empty."""

    folder: Path
    todo: list[Kill]
    dice: random.Random
    longest: float = 0.0
    quiet: dict[str, Any] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    """Steps that were done and had to be done again -> how often."""
    slowest_end: float = 0.0
    runs: int = 0

    def undisturbed(self) -> None:
        """What a quiet run leaves, and how long it takes."""
        command = saving_run(self.folder, "quiet")
        attempt = command.start()
        assert attempt.wait(120) == 0, attempt.said()
        self.longest = time.monotonic() - attempt.began
        self.quiet = last_bits(command.run_dir)

    def run_once(self, elastic: bool) -> None:
        """One run from its first start to its end, killed and started again on the way."""
        command = saving_run(self.folder, f"run_{self.runs}", elastic)
        behind = self.runs % 2
        command.arguments += ["checkpoint.async_save=true"] * behind
        self.runs += 1
        newest: Path | None = None
        story = []
        while True:
            kill = self.todo[-1] if self.todo else None
            counts = kill is not None and (kill.point != "at_load" or newest is not None)
            if kill is not None and not counts:
                kill = Kill("all", "after_rename")  # there is nothing to load yet
            armed = kill is not None and kill.point is not None
            attempt = command.start({VARIABLE: f"stop:{kill.point}:rank0:1"} if kill and armed else None)
            struck = kill is not None and self._strike(attempt, kill)
            if not struck:
                assert attempt.wait(120) == 0, f"needs a hand:\n{attempt.said()}"
            told = re.findall(r"resumed from (\S+)", attempt.said())
            assert told == [str(newest)] if told or (newest and not struck) else True, f"{newest}:\n{attempt.said()}"
            if not struck:
                if newest is None:  # a quiet run, which tells how long one takes by now
                    self.longest = time.monotonic() - attempt.began
                break
            story.append(str(kill))
            if kill and counts:
                self.done[f"{kill.target} {kill.point or ''}".strip()] += 1
                self.todo.pop()
            newest = self._look(command.run_dir, 1 + behind)
            story.append(f"leaves {newest and newest.name}")
        assert json.loads((command.run_dir / "result.json").read_text())["status"] == "ok"
        ended = last_bits(command.run_dir)
        other = sorted(name for name in {*ended, *self.quiet} if ended.get(name) != self.quiet.get(name))
        assert other == [], f"not the bits of the quiet run, after {story}"
        print(f"run {self.runs}: {sum(self.done.values())} kills, steps lost -> times {dict(self.lost)}", flush=True)
        shutil.rmtree(command.run_dir)

    def _strike(self, attempt: Attempt, kill: Kill) -> bool:
        """Kill whom it should hit; False where the run came to its end before."""
        moment = time.monotonic() + self.dice.uniform(0, self.longest)

        def due() -> bool:
            if attempt.poll() is not None:
                return True
            return time.monotonic() >= moment if kill.point is None else stopped(attempt.ranks().get("rank0", 0))

        until(due, 120, attempt.said)
        if attempt.poll() is not None:
            return False
        ranks = attempt.kill(kill.target)
        for rank in ranks if kill.point else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGCONT)
        began = time.monotonic()
        status = attempt.wait(ENDS_WITHIN)
        assert status in (0, 1, -signal.SIGKILL), f"status {status}\n{attempt.said()}"  # 0: it was over already
        until(lambda: not any(map(alive, ranks)), ENDS_WITHIN, lambda: f"orphans of {ranks}")
        self.slowest_end = max(self.slowest_end, time.monotonic() - began)
        return True

    def _look(self, run_dir: Path, at_most: int) -> Path | None:
        """What the kill left: every published checkpoint is whole, and at most one step is lost.

        Or two, where a save is written while the next step is done.
        """
        entries = list_checkpoints(run_dir, CheckpointConfig())
        assert [problem for entry in entries for problem in check_contents(entry)] == []
        newest = entries[-1] if entries else None
        saved = newest.manifest.step if newest and newest.manifest else 0
        lost = steps_logged(run_dir) - saved
        assert lost <= at_most, f"{lost} steps lost: {steps_logged(run_dir)} done, {saved} saved"
        self.lost[max(lost, 0)] += 1
        return newest.path if newest else None


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that does not stay: hundreds of runs were in it."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.timeout(3600)
def test_killed_runs_go_on_by_themselves_and_come_out_the_same(folder: Path) -> None:
    dice = random.Random(5)
    at_points = [Kill(target, point) for point in POINTS for target in TARGETS]
    if not TORTURE:  # each point once, each target at some of them
        at_points = at_points[:: len(TARGETS) + 1]
    anywhen = [Kill(dice.choice(TARGETS)) for _ in range(KILLS - len(at_points))]
    torment = Torment(folder, dice.sample(at_points + anywhen, KILLS), dice)
    torment.undisturbed()
    began = time.monotonic()
    while torment.todo:
        torment.run_once(elastic=torment.runs % 4 == 3)
    print(f"\n{KILLS} kills over {torment.runs} runs in {time.monotonic() - began:.0f} s, all gone on by themselves")
    print(f"targets {dict(torment.done)}\nsteps lost -> times {dict(torment.lost)}")
    print(f"slowest end after a kill {torment.slowest_end:.1f} s")
    assert sum(torment.done.values()) == KILLS


@pytest.mark.timeout(3600)
def test_a_kill_inside_the_save_loses_nothing(folder: Path) -> None:
    """Two ranks save; one or both are killed at a random moment of it. The checkpoint before is never lost."""
    times, dice = 500 if TORTURE else 38, random.Random(6)

    def body(rank: int, run_dir: Path, delays: tuple[float, float]) -> float:
        run = start(1.0)
        save_checkpoint(run_dir, 1, *run, {"step": 1}, CheckpointConfig(keep=1))
        set_all(run, 2.0)
        torch.distributed.barrier()
        began = time.monotonic()
        kill_in(delays[rank])
        save_checkpoint(run_dir, 2, *run, {"step": 2}, CheckpointConfig(keep=1))
        return time.monotonic() - began

    never = float("inf")
    longest = max(start_ranks(2, body, folder / "quiet", (never, never))[0].result for _ in range(2))
    found: Counter[str] = Counter()
    for number in range(times):
        moment, run_dir = dice.uniform(0, longest), folder / str(number)
        delays = dice.choice([(moment, never), (never, moment), (moment, moment)])
        outcomes = start_ranks(2, body, run_dir, delays, timeout=ENDS_WITHIN)
        assert not any(outcome.stack for outcome in outcomes), f"a rank hangs: {outcomes}"
        for entry in list_checkpoints(run_dir, CheckpointConfig()):
            assert check_contents(entry) == []
        found[assert_whole(run_dir, {1, 2}).name] += 1
        shutil.rmtree(run_dir)
    print(f"\n{times} kills inside a save of {longest:.3f} s; newest afterwards {dict(found)}")
    assert found["step_1"]


def kill_in(seconds: float) -> None:
    """Have this process killed, by another one, in some time."""
    if seconds == float("inf"):
        return
    victim = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(victim, signal.SIGKILL)
        os._exit(0)
