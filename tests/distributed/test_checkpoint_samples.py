"""Runs that are killed repeatedly and resume with different world sizes read every sample exactly once."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from components.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from components.config.schema.run import CheckpointConfig
from components.data.batches import BatchPlan, TrainBatches
from components.data.examples import Example
from tests.harness import start_ranks
from tests.suites import TORTURE

pytestmark = pytest.mark.timeout(3600)
SAMPLES, BATCH, KILLS = (1_000_000, 2_000, 50) if TORTURE else (20_000, 400, 4)
STEPS = SAMPLES // BATCH
SAVE_EVERY = 4
WORLDS = (1, 2, 4, 5, 8) if TORTURE else (1, 2, 4)


class Numbered(Sequence[Example]):
    """Samples whose first token is their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> Any:
        return Example([index, 1], [-100, 1])


def run_attempt(rank: int, run_dir: Path, number: int, world: int, kill: tuple[int, int, float] | None) -> int:
    """Resume from the last checkpoint and log the samples read in each step; return the first step.

    Args:
        kill: the rank to kill (-1: all), the number of steps after the start, and the number of seconds into the step.
    """
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = BatchPlan(global_batch_size=BATCH, micro_batch_size=BATCH // world // 2, dp_rank=rank, dp_size=world)
    batches = TrainBatches(Numbered(), plan, seed=3)
    step = 0
    found = find_checkpoint(run_dir, "auto")
    if found is not None:
        saved = load_checkpoint(found, model, optimizer)
        step = saved["step"]
        batches.load_state_dict(saved["data"])
    first = step
    with (run_dir / f"read-{number:03}-{rank}").open("w") as log:
        log.write(f"{first}\n")
        while step < STEPS:
            if kill is not None and kill[0] in (rank, -1) and step == first + kill[1]:
                threading.Thread(target=die_after, args=(kill[2],), daemon=True).start()
            rows = [row for batch in next(batches) for row in batch.input_ids[:, 0].tolist()]
            log.write(" ".join(map(str, [step, *rows])) + "\n")
            log.flush()
            step += 1
            torch.distributed.barrier()  # synchronizes the ranks as the reductions of a real step do
            if step % SAVE_EVERY == 0 or step == STEPS:
                extra = {"step": step, "data": batches.state_dict()}
                save_checkpoint(run_dir, step, model, optimizer, extra, CheckpointConfig(keep=2))
    return first


def die_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def samples_read(run_dir: Path, number: int, world: int) -> tuple[int, dict[int, list[int]]]:
    """Return the first step of an attempt, and the samples of each step that all ranks logged."""
    first, steps = 0, []
    for rank in range(world):
        complete_lines = (run_dir / f"read-{number:03}-{rank}").read_text().rpartition("\n")[0]
        head, *lines = complete_lines.splitlines() or ["0"]
        first = int(head)
        numbers = [[int(field) for field in line.split()] for line in lines]
        steps.append({step: rows for step, *rows in numbers})
    common = set.intersection(*(set(each) for each in steps))
    return first, {step: [row for rank_steps in steps for row in rank_steps[step]] for step in common}


def test_kills_and_world_size_changes_repeat_and_skip_no_samples(tmp_path: Path) -> None:
    rng = random.Random(0)
    attempts: list[tuple[int, dict[int, list[int]]]] = []
    killed = 0
    while not attempts or max(attempts[-1][1], default=0) < STEPS - 1:
        world = rng.choice(WORLDS)
        victim = rng.choice([-1, rng.randrange(world)])
        after = rng.randrange(2 * SAVE_EVERY + 1)  # equally often before and after a save on average
        kill = (victim, after, rng.uniform(0, 0.1)) if killed < KILLS else None
        outcomes = start_ranks(world, run_attempt, tmp_path, len(attempts), world, kill, timeout=300)
        if kill is None:
            assert all(outcome.ok for outcome in outcomes), [str(outcome) for outcome in outcomes]
        killed += any(outcome.signal == "SIGKILL" for outcome in outcomes)
        attempts.append(samples_read(tmp_path, len(attempts), world))
    assert killed == KILLS
    samples_of_step: dict[int, list[int]] = {}
    for number, (first, steps) in enumerate(attempts):
        assert sorted(steps) == list(range(first, first + len(steps)))
        assert first <= (max(samples_of_step) + 1 if samples_of_step else 0), f"attempt {number} skipped steps"
        for step, rows in steps.items():
            assert samples_of_step.get(step, rows) == rows, f"attempt {number} read other samples for step {step}"
            samples_of_step[step] = rows
    assert sorted(row for rows in samples_of_step.values() for row in rows) == list(range(SAMPLES))
