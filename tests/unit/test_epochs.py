"""The number of steps that training.epochs gives, against stepping through the batches one by one."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest

from components.config.rules import decay_problems, profile_end_problems
from components.config.schema import TrainingConfig
from components.config.schema.optimizer import AdamWConfig, Schedule
from components.config.schema.run import ProfileConfig
from components.data.batches import BatchPlan, TrainBatches
from components.protocol.errors import ConfigError

RAMP = ((2, 1), (5, 3))
PLANS = [BatchPlan(global_batch_size=size, micro_batch_size=1, ramp=ramp) for size in (4, 7) for ramp in ((), RAMP)]


def batches(plan: BatchPlan, rows: int = 30) -> TrainBatches:
    return TrainBatches(list(range(rows)), plan, seed=3)  # type: ignore[arg-type]


def counted(plan: BatchPlan, rows: int, step: int = 0) -> int:
    """Return the step after which `rows` more rows than before `step` were used."""
    while rows > 0:
        rows -= plan.size_of(step)
        step += 1
    return step


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("epochs", ["0.01", "0.1", "0.5", "1", "1.7", "3"])
def test_steps_use_every_row_as_often_as_asked(plan: BatchPlan, epochs: str) -> None:
    wanted = math.ceil(Fraction(epochs) * 30)
    assert batches(plan).steps_for(float(epochs)) == counted(plan, wanted)
    for size in range(1, 80):
        assert plan.steps_for(size) == counted(plan, size)


def test_fractions_are_exact() -> None:
    assert math.ceil(1.1 * 50) == 56
    assert batches(BatchPlan(global_batch_size=1, micro_batch_size=1), 50).steps_for(1.1) == 55


@pytest.mark.parametrize("before", PLANS)
@pytest.mark.parametrize("after", PLANS)
@pytest.mark.parametrize("step", [0, 1, 4, 9])
def test_resumed_run_uses_the_remaining_rows_with_another_batch_size(
    before: BatchPlan, after: BatchPlan, step: int
) -> None:
    state: dict[str, Any] = {**batches(before).state_dict(), "sample": before.samples_before(step), "step": step}
    resumed = batches(after)
    resumed.load_state_dict(state)
    steps = resumed.steps_for(3)
    assert steps == counted(after, 90 - state["sample"], step)
    if before == after:
        assert steps == batches(before).steps_for(3)


def test_run_that_has_used_its_rows_has_no_more_steps() -> None:
    resumed = batches(PLANS[1])
    resumed.load_state_dict({**resumed.state_dict(), "sample": 200, "step": 50})
    assert resumed.steps_for(3) == 50


def test_ramp_and_profile_must_fit_into_the_steps() -> None:
    training = TrainingConfig(epochs=1.5, batch_size_ramp=[{"until_step": 9, "global_batch_size": 4}])
    assert training.max_steps is None
    assert training.ramp_end_problems(10) == []
    (problem,) = training.ramp_end_problems(9)
    assert "the last until_step must be less than the 9 steps of training.epochs=1.5; change either" in problem
    profile = ProfileConfig(enabled=True, start=8, steps=3)
    assert profile_end_problems(profile, training, 10) == []
    (problem,) = profile_end_problems(profile, training, 9)
    assert "ends with step 10, after the 9 steps of training.epochs=1.5; change" in problem
    assert profile_end_problems(dataclasses.replace(profile, enabled=False), training, 9) == []


def test_final_decay_must_begin_after_the_warmup() -> None:
    training = TrainingConfig(epochs=1.5, max_steps=None)
    wsd = AdamWConfig(schedule=Schedule.wsd, warmup_steps=5, decay_steps=10)
    assert decay_problems(wsd, training, 15) == decay_problems(wsd, training) == []
    (problem,) = decay_problems(wsd, training, 14)
    assert "after optimizer.warmup_steps=5, into the 14 steps of training.epochs=1.5; set it to at most 9" in problem
    assert decay_problems(dataclasses.replace(wsd, schedule=Schedule.cosine), training, 14) == []


def test_exactly_one_of_epochs_and_max_steps() -> None:
    assert TrainingConfig().max_steps == 100
    with pytest.raises(ConfigError, match=r"training\.epochs=3: the run also has training\.max_steps=7"):
        TrainingConfig(epochs=3, max_steps=7)
