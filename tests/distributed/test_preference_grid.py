"""Preference objectives on several families and meshes, against plain transformers and the papers' formulas.

`make parity PART=preferences` runs all cases of objective_grid.py; objectives, packing and loss methods are drawn for
each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tests.distributed import adapted
from tests.distributed.objective_grid import (
    LR,
    MESHES,
    MODELS,
    STEPS,
    ObjectiveCase,
    kinds_of_training,
    problems_on_meshes,
)
from tests.distributed.test_preferences import OBJECTIVES, Curve, differences, expected, train
from tests.suites import in_parity


@dataclass(frozen=True)
class PreferenceCase(ObjectiveCase):
    """One model and preference objective on one mesh."""

    loss: str = "chunked"

    def expected(self) -> Curve:
        """Curve in float64, in one process."""
        plain, base = self.plain()
        formula, steps, lr = OBJECTIVES[self.objective][1], STEPS[self.dtype], LR[self.dtype]
        curve = expected(plain, formula, self.packed, self.router_aux, steps, lr, base)
        curve.gradients = {adapted.our_name(name): gradient for name, gradient in curve.gradients.items()}
        return curve

    def train(self, model: torch.nn.Module) -> Curve:
        """Curve on the mesh."""
        cfg, steps, lr = OBJECTIVES[self.objective][0], STEPS[self.dtype], LR[self.dtype]
        return train(model, self.mesh, self.loss, cfg, self.packed, self.router_aux, steps, lr)


def all_cases(world: int, model: str) -> list[PreferenceCase]:
    chosen, draw = [], random.Random(f"{world} {model}")
    for mesh, lora, dtype in kinds_of_training(world, model):
        objective, loss = draw.choice([*OBJECTIVES]), draw.choice(["logits", "chunked"])
        chosen.append(PreferenceCase(model, objective, mesh, draw.random() < 0.5, lora, dtype, loss))
    return chosen


CHOSEN = {f"{world}-{model}": all_cases(world, model) for world in MESHES for model in MODELS}
"""Cases by number of processes and model. Each mesh leaves its process groups behind, so they have processes of their
own."""


@in_parity
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_preference_grid_matches_one_process(chosen: str) -> None:
    world = int(chosen.partition("-")[0])
    problems = problems_on_meshes(world, CHOSEN[chosen], PreferenceCase.expected, PreferenceCase.train, differences)
    assert not problems, "\n".join(problems)
