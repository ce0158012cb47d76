"""Distillation on several families and meshes, against plain transformers and the formulas of the divergences.

`make parity PART=distillation` runs all cases of objective_grid.py; divergences, teachers, packing and micro-batch
sizes are drawn for each. Teachers differ from their students in hidden size and number of layers; a third of them is
stored, as their most likely tokens. Mixtures of experts learn from a mixture or from a dense teacher, which must be
stored on meshes with ep.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace

import pytest
import torch

from tests.distributed import adapted
from tests.distributed.adapted import Adapted
from tests.distributed.objective_grid import (
    LR,
    MESHES,
    MODELS,
    STEPS,
    ObjectiveCase,
    kinds_of_training,
    problems_on_meshes,
)
from tests.distributed.test_distillation import OBJECTIVES, Curve, PlainTopK, differences, expected, train
from tests.suites import in_parity

FORMULAS = {str(cfg.divergence): cfg for cfg in OBJECTIVES}
TEACHER = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class DistillationCase(ObjectiveCase):
    """One student, teacher and divergence on one mesh."""

    teacher: str = ""
    """Family of the teacher; empty: that of the student."""
    stored: bool = False
    """Whether the teacher's most likely tokens are read instead of running it."""
    micro_batch: int = 1

    def built_teacher(self, dtype: torch.dtype) -> torch.nn.Module:
        """Build the teacher, whose hidden size and number of layers differ from the student's."""
        return adapted.build(Adapted(self.teacher or self.model, "", dtype, layers=6, config=TEACHER)).eval()

    def stored_tokens(self) -> PlainTopK:
        """The teacher's most likely tokens at the temperature of the objective."""
        return PlainTopK(self.built_teacher(torch.float64), 9, FORMULAS[self.objective].temperature)

    def expected(self) -> Curve:
        """Curve in float64, in one process."""
        return curve_of_one_process(replace(self, mesh={}, micro_batch=0))

    def train(self, model: torch.nn.Module) -> Curve:
        """Curve on the mesh."""
        teacher = self.stored_tokens() if self.stored else self.built_teacher(self.dtype)
        cfg, steps, lr = FORMULAS[self.objective], STEPS[self.dtype], LR[self.dtype]
        return train(model, teacher, self.mesh, cfg, self.micro_batch, self.packed, self.router_aux, steps, lr)


@functools.cache
def curve_of_one_process(case: DistillationCase) -> Curve:
    """Return the curve of all cases that differ from this one in mesh and micro-batch size only."""
    teacher = case.built_teacher(torch.float64)
    stored = case.stored_tokens() if case.stored else None
    cfg, steps, lr = FORMULAS[case.objective], STEPS[case.dtype], LR[case.dtype]
    curve = expected(case.plain()[0], teacher, cfg, stored, case.packed, case.router_aux, steps, lr)
    curve.gradients = {adapted.our_name(name): gradient for name, gradient in curve.gradients.items()}
    return curve


def all_cases(world: int, model: str) -> list[DistillationCase]:
    chosen, draw = [], random.Random(f"{world} {model}")
    for mesh, lora, dtype in kinds_of_training(world, model):
        objective, packed, stored = draw.choice([*FORMULAS]), draw.random() < 0.5, draw.random() < 1 / 3
        teacher = draw.choice(["mixtral", "llama"]) if model == "mixtral" else model
        if "ep" in mesh and not stored:
            teacher = model  # a dense teacher does not run on a mesh with ep
        case = DistillationCase(model, objective, mesh, packed, lora, dtype, teacher, stored, draw.choice([1, 2]))
        chosen.append(case)
    return chosen


CHOSEN = {f"{world}-{model}": all_cases(world, model) for world in MESHES for model in MODELS}
"""Cases by number of processes and student. Each mesh leaves its process groups behind, so they have processes of their
own."""


@in_parity
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_distillation_grid_matches_one_process(chosen: str) -> None:
    world = int(chosen.partition("-")[0])
    problems = problems_on_meshes(world, CHOSEN[chosen], DistillationCase.expected, DistillationCase.train, differences)
    assert not problems, "\n".join(problems)
