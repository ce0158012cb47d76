"""Preference objectives on several families and meshes, against plain transformers and the papers' formulas.

float64: losses, gradient norms and the first step's gradient of every parameter within 1e-10, for all parameters and
for LoRA, whose reference is the peft library. float32: losses and norms of five steps within 1e-5 of float64 in one
process. Mixtures of experts train with the routers' auxiliary loss, divided by target tokens on every mesh.
`make parity PART=preferences` runs all cases; objectives, packing and loss methods are drawn for each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.distributed import adapted
from tests.distributed.adapted import ATTENTION, LORA, Adapted
from tests.distributed.curves import CP, DDP2, EP, FSDP2, HSDP, PP, TP
from tests.distributed.test_parity import EVERYTHING
from tests.distributed.test_preferences import OBJECTIVES, Curve, differences, expected, train
from tests.harness import run_ranks

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
LR = {torch.float64: 5e-3, torch.float32: 2e-4}
"""In float32 the larger updates amplify rounding beyond the bound within five steps, also in one process."""
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class PreferenceCase:
    """One model and objective on one mesh."""

    model: str
    objective: str
    mesh: dict[str, Any]
    packed: bool
    loss: str
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

    def built(self) -> Any:
        return adapted.ours(self.weights) if self.lora else adapted.build(self.weights)

    def expected(self) -> Curve:
        """Curve in float64, in one process."""
        weights = replace(self.weights, dtype=torch.float64)
        plain, base = adapted.build(weights), None
        if self.lora:
            plain, base = adapted.theirs(weights), plain
        formula, steps, lr = OBJECTIVES[self.objective][1], STEPS[self.dtype], LR[self.dtype]
        curve = expected(plain, formula, self.packed, self.router_aux, steps, lr, base)
        curve.gradients = {adapted.our_name(name): gradient for name, gradient in curve.gradients.items()}
        return curve

    def problems(self, got: Curve, reference: Curve) -> list[str]:
        if self.dtype != torch.float64:
            got = replace(got, gradients={})
        return [f"{self}: {problem}" for problem in differences(got, reference, BOUNDS[self.dtype])]


def all_cases(world: int, model: str) -> list[PreferenceCase]:
    """Every mesh that a model supports: all parameters and LoRA in float64, and one of them in float32."""
    chosen, draw = [], random.Random(f"{world} {model}")
    for number, mesh in enumerate(MESHES[world]):
        if "ep" in mesh and model != "mixtral":
            continue
        kinds = [(False, torch.float64), (True, torch.float64), (number % 2 == 1, torch.float32)]
        for lora, dtype in kinds:
            objective, loss = draw.choice([*OBJECTIVES]), draw.choice(["logits", "chunked"])
            chosen.append(PreferenceCase(model, objective, mesh, draw.random() < 0.5, loss, lora, dtype))
    return chosen


CHOSEN = {f"{world}-{model}": all_cases(world, model) for world in MESHES for model in MODELS} if EVERYTHING else {
    "2-mixtral": [
        PreferenceCase("mixtral", "dpo", EP, True, "chunked"),
        PreferenceCase("mixtral", "kto", {**TP, **SP}, True, "chunked", lora=True),
        PreferenceCase("mixtral", "hinge", FSDP2, False, "chunked", dtype=torch.float32),
    ]
}  # fmt: skip
"""Cases by number of processes and model. Each mesh leaves its process groups behind, so they have processes of their
own."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_preference_grid_matches_one_process(chosen: str) -> None:
    cases, world = CHOSEN[chosen], int(chosen.partition("-")[0])
    built = [(each.built(), each.expected()) for each in cases]

    def body(rank: int) -> list[tuple[list[str], set[str]]]:
        found = []
        for each, (model, reference) in zip(cases, built, strict=True):
            cfg, steps, lr = OBJECTIVES[each.objective][0], STEPS[each.dtype], LR[each.dtype]
            got = train(model, each.mesh, each.loss, cfg, each.packed, each.router_aux, steps, lr)
            found.append((each.problems(got, reference), set(got.gradients)))
        return found

    problems = []
    for each, (_, reference), ranks in zip(
        cases, built, zip(*run_ranks(world, body, timeout=1800), strict=True), strict=True
    ):
        problems += sorted({problem for lines, _ in ranks for problem in lines})
        if missing := set(reference.gradients) - set().union(*(names for _, names in ranks)):
            problems.append(f"{each}: no rank has the gradients of {sorted(missing)}")
    assert not problems, "\n".join(problems)
