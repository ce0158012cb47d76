"""Distillation and preference objectives on several families and meshes, each against plain PyTorch in one process.

float64: losses, gradient norms and the first step's gradient of every parameter within 1e-10, for all parameters and
for LoRA, whose reference is the peft library. float32: losses and norms of five steps within 1e-5 of float64 in one
process. Mixtures of experts train with the routers' auxiliary loss, divided by target tokens on every mesh.

Objectives, packing, loss methods, teachers and micro-batch sizes are drawn for each mesh. Teachers differ from their
students in hidden size and number of layers; a third of them is stored, as their most likely tokens. Mixtures of
experts learn from a mixture or from a dense teacher, which must be stored on meshes with ep.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import adapted, curves
from tests.distributed import test_distillation as distillation
from tests.distributed import test_preferences as preferences
from tests.distributed.adapted import ATTENTION, LORA, Adapted
from tests.distributed.curves import CP, DDP2, EP, FSDP2, HSDP, PP, TP, Curve
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import in_parity

MODELS = ("llama", "llama_tied", "qwen3", "gemma3", "mixtral")
ROUTER_AUX = 0.02
SP = {"sequence_parallel": True}
ZBV = {"pp_schedule": "ZBVZeroBubble"}
MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{"strategy": "single", "dp_shard": 1}],
    2: [
        DDP2,
        *(FSDP2, TP, {**TP, **SP}, {**CP, "cp_attention": "ulysses"}, {**CP, "cp_attention": "all_gather"}),
        *(PP, {**PP, **ZBV}, EP),
    ],
    4: [
        *(HSDP, {**FSDP2, "tp": 2}, {**FSDP2, "tp": 2, **SP}, {**FSDP2, "cp": 2}, {**CP, "tp": 2, **SP}),
        *({**PP, "tp": 2}, {**PP, "cp": 2}, {**PP, "dp_shard": 2}, {**PP, "dp_shard": 2, **ZBV}),
        *({**EP, "tp": 2}, {**EP, "dp_shard": 2}),
    ],
}
HEADS = {"llama_tied": {"num_attention_heads": 4, "num_key_value_heads": 2}}
"""Changed configs: Ulysses needs heads that cp divides."""
LAYERS = 4
"""ZBVZeroBubble has two stages on each of two ranks."""
STEPS = {torch.float64: 3, torch.float32: 5}
LR = {torch.float64: 5e-3, torch.float32: 2e-5}
"""In float32 larger updates amplify rounding: at 2e-4 AdamW makes 2.8e-5 of it with LoRA, in one process 1.2e-5."""
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class ObjectiveCase:
    """One model and objective on one mesh."""

    model: str
    objective: str
    mesh: dict[str, Any] = field(hash=False)
    packed: bool
    lora: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def router_aux(self) -> float:
        return ROUTER_AUX if self.model == "mixtral" else 0.0

    @property
    def weights(self) -> Adapted:
        """The model with its adapters, if it has any."""
        peft = ATTENTION if self.model == "mixtral" else LORA
        return Adapted(self.model, "", self.dtype, peft, layers=LAYERS, config=HEADS.get(self.model, {}))

    def built(self) -> nn.Module:
        """Build the model that is trained on the mesh."""
        return adapted.ours(self.weights) if self.lora else adapted.build(self.weights)

    def expected(self) -> Curve:
        """Curve in float64, in one process."""
        raise NotImplementedError

    def train(self, model: nn.Module) -> Curve:
        """Curve on the mesh. A collective."""
        raise NotImplementedError

    def plain(self) -> tuple[nn.Module, nn.Module | None]:
        """Build the model for one process in float64, and with LoRA the model without adapters."""
        weights = replace(self.weights, dtype=torch.float64)
        base = adapted.build(weights)
        return (adapted.theirs(weights), base) if self.lora else (base, None)


def kinds_of_training(world: int, model: str) -> Iterator[tuple[dict[str, Any], bool, torch.dtype]]:
    """Yield (mesh, LoRA, dtype): on every mesh that a model supports, all parameters and LoRA in float64, and one of
    them in float32."""
    for number, mesh in enumerate(runnable(MESHES[world])):
        if "ep" not in mesh or model == "mixtral":
            yield from [(mesh, False, torch.float64), (mesh, True, torch.float64)]
            yield mesh, number % 2 == 1, torch.float32


def problems_on_meshes(world: int, cases: Sequence[ObjectiveCase]) -> list[str]:
    """Train each case on `world` ranks; return what differs from one process, and gradients that no rank has."""
    built = [(each.built(), each.expected()) for each in cases]

    def body(rank: int) -> list[tuple[list[str], set[str]]]:
        found = []
        for each, (model, reference) in zip(cases, built, strict=True):
            got = each.train(model)
            names = set(got.gradients)
            if each.dtype != torch.float64:
                got.gradients = {}
            lines = [f"{each}: {problem}" for problem in curves.differences(got, reference, BOUNDS[each.dtype])]
            found.append((lines, names))
        return found

    problems = []
    for each, (_, reference), ranks in zip(
        cases, built, zip(*run_ranks(world, body, timeout=1800), strict=True), strict=True
    ):
        problems += sorted({problem for lines, _ in ranks for problem in lines})
        if missing := set(reference.gradients) - set().union(*(names for _, names in ranks)):
            problems.append(f"{each}: no rank has the gradients of {sorted(missing)}")
    return problems


@dataclass(frozen=True)
class PreferenceCase(ObjectiveCase):
    """One model and preference objective on one mesh."""

    loss: str = "chunked"

    def expected(self) -> Curve:
        plain, base = self.plain()
        formula, steps, lr = preferences.OBJECTIVES[self.objective][1], STEPS[self.dtype], LR[self.dtype]
        curve = preferences.expected(plain, formula, self.packed, self.router_aux, steps, lr, base)
        curve.gradients = {adapted.our_name(name): gradient for name, gradient in curve.gradients.items()}
        return curve

    def train(self, model: nn.Module) -> Curve:
        cfg, steps, lr = preferences.OBJECTIVES[self.objective][0], STEPS[self.dtype], LR[self.dtype]
        return preferences.train(model, self.mesh, self.loss, cfg, self.packed, self.router_aux, steps, lr)


def preference_cases(world: int, model: str) -> list[PreferenceCase]:
    chosen, draw = [], random.Random(f"{world} {model}")
    for mesh, lora, dtype in kinds_of_training(world, model):
        objective, loss = draw.choice([*preferences.OBJECTIVES]), draw.choice(["logits", "chunked"])
        chosen.append(PreferenceCase(model, objective, mesh, draw.random() < 0.5, lora, dtype, loss))
    return chosen


FORMULAS = {str(cfg.divergence): cfg for cfg in distillation.OBJECTIVES}
TEACHER = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class DistillationCase(ObjectiveCase):
    """One student, teacher and divergence on one mesh."""

    teacher: str = ""
    """Family of the teacher; empty: that of the student."""
    stored: bool = False
    """Whether the teacher's most likely tokens are read instead of running it."""
    micro_batch: int = 1

    def built_teacher(self, dtype: torch.dtype) -> nn.Module:
        """Build the teacher, whose hidden size and number of layers differ from the student's."""
        return adapted.build(Adapted(self.teacher or self.model, "", dtype, layers=6, config=TEACHER)).eval()

    def stored_tokens(self) -> distillation.PlainTopK:
        """The teacher's most likely tokens at the temperature of the objective."""
        return distillation.PlainTopK(self.built_teacher(torch.float64), 9, FORMULAS[self.objective].temperature)

    def expected(self) -> Curve:
        return curve_of_one_process(replace(self, mesh={}, micro_batch=0))

    def train(self, model: nn.Module) -> Curve:
        teacher = self.stored_tokens() if self.stored else self.built_teacher(self.dtype)
        cfg, steps, lr = FORMULAS[self.objective], STEPS[self.dtype], LR[self.dtype]
        return distillation.train(
            model, teacher, self.mesh, cfg, self.micro_batch, self.packed, self.router_aux, steps, lr
        )


@functools.cache
def curve_of_one_process(case: DistillationCase) -> Curve:
    """Return the curve of all cases that differ from this one in mesh and micro-batch size only."""
    teacher = case.built_teacher(torch.float64)
    stored = case.stored_tokens() if case.stored else None
    cfg, steps, lr = FORMULAS[case.objective], STEPS[case.dtype], LR[case.dtype]
    curve = distillation.expected(case.plain()[0], teacher, cfg, stored, case.packed, case.router_aux, steps, lr)
    curve.gradients = {adapted.our_name(name): gradient for name, gradient in curve.gradients.items()}
    return curve


def distillation_cases(world: int, model: str) -> list[DistillationCase]:
    chosen, draw = [], random.Random(f"{world} {model}")
    for mesh, lora, dtype in kinds_of_training(world, model):
        objective, packed, stored = draw.choice([*FORMULAS]), draw.random() < 0.5, draw.random() < 1 / 3
        teacher = draw.choice(["mixtral", "llama"]) if model == "mixtral" else model
        if "ep" in mesh and not stored:
            teacher = model  # a dense teacher does not run on a mesh with ep
        case = DistillationCase(model, objective, mesh, packed, lora, dtype, teacher, stored, draw.choice([1, 2]))
        chosen.append(case)
    return chosen


WORLDS_AND_MODELS = [(world, model) for world in MESHES for model in MODELS]
"""Each mesh leaves its process groups behind, so these have processes of their own."""


@in_parity
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world", "model"), WORLDS_AND_MODELS)
def test_preference_grid_matches_one_process(world: int, model: str) -> None:
    problems = problems_on_meshes(world, preference_cases(world, model))
    assert not problems, "\n".join(problems)


@in_parity
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world", "model"), WORLDS_AND_MODELS)
def test_distillation_grid_matches_one_process(world: int, model: str) -> None:
    problems = problems_on_meshes(world, distillation_cases(world, model))
    assert not problems, "\n".join(problems)
