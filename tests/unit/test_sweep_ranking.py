"""Counting of held-out losses towards training.early_stop_patience."""

from __future__ import annotations

import math

import pytest

from components.training.state import TrainState


@pytest.mark.parametrize(
    ("losses", "min_delta", "counts"),
    [
        ([3.0, 2.0, 2.5, 2.0, 1.9], 0.0, [0, 0, 1, 2, 0]),
        ([3.0, 2.95, 2.89, 2.85], 0.1, [0, 1, 0, 1]),
        ([math.nan, 3.0, math.nan, math.inf], 0.0, [1, 0, 1, 2]),
        ([3.0, None, 3.0], 0.0, [0, 0, 1]),
    ],
)
def test_evaluations_without_improvement_are_counted_across_resumes(
    losses: list[float | None], min_delta: float, counts: list[int]
) -> None:
    state, found = TrainState(), []
    for number, loss in enumerate(losses):
        state.step = 10 * number
        state.count_eval(loss, min_delta)
        found.append(state.evals_without_improvement)
        state = TrainState.from_dict(state.to_dict())
        if loss is not None:
            state.count_eval(loss, min_delta)  # the evaluation at the start of a resumed run
    assert found == counts
