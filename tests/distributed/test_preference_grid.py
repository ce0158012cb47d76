"""Preference objectives on several families and meshes, against plain transformers and the papers' formulas.

float64: losses, gradient norms and the first step's gradient of every parameter within 1e-10. Mixtures of experts train
with the routers' auxiliary loss, divided by target tokens on every mesh. `make parity PART=preferences` runs all cases;
objectives, packing and loss methods alternate over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.distributed import grid
from tests.distributed.parity import build
from tests.distributed.test_parity import EVERYTHING, HSDP
from tests.distributed.test_preferences import CP, FSDP2, OBJECTIVES, PP, TP, differences, expected, train
from tests.harness import run_ranks

MODELS = ("llama", "llama_tied", "qwen3", "gemma3", "mixtral")
ROUTER_AUX = 0.02
SP = {"sequence_parallel": True}
EP = {"strategy": "fsdp2", "dp_shard": 1, "ep": 2}
MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{"strategy": "single", "dp_shard": 1}],
    2: [
        {"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2},
        *(FSDP2, TP, {**TP, **SP}, {**CP, "cp_attention": "ulysses"}, {**CP, "cp_attention": "all_gather"}),
        *(PP, {**PP, "pp_schedule": "ZBVZeroBubble"}, EP),
    ],
    4: [
        *(HSDP, {**FSDP2, "tp": 2}, {**FSDP2, "tp": 2, **SP}, {**FSDP2, "cp": 2}, {**CP, "tp": 2, **SP}),
        *({**PP, "tp": 2}, {**PP, "cp": 2}, {**PP, "dp_shard": 2}, {**EP, "tp": 2}, {**EP, "dp_shard": 2}),
    ],
}
LAYERS = 4
"""ZBVZeroBubble has two stages on each of two ranks."""


@dataclass(frozen=True)
class PreferenceCase:
    """One model and objective on one mesh."""

    model: str
    objective: str
    mesh: dict[str, Any]
    packed: bool
    loss: str

    @property
    def router_aux(self) -> float:
        return ROUTER_AUX if self.model == "mixtral" else 0.0


def all_cases(world: int) -> list[PreferenceCase]:
    """Every model on every mesh that it supports; objectives, packing and loss methods alternate."""
    chosen, names = [], list(OBJECTIVES)
    for row, model in enumerate(MODELS):
        for column, mesh in enumerate(MESHES[world]):
            if "ep" in mesh and model != "mixtral":
                continue
            number = row + column
            loss = "logits" if number % 3 == 0 else "chunked"
            chosen.append(PreferenceCase(model, names[number % len(names)], mesh, number % 2 == 0, loss))
    return chosen


CHOSEN = {world: all_cases(world) for world in MESHES} if EVERYTHING else {
    2: [
        PreferenceCase("mixtral", "dpo", EP, True, "chunked"),
        PreferenceCase("mixtral", "kto", {**TP, **SP}, True, "chunked"),
    ]
}  # fmt: skip


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", CHOSEN)
def test_preference_grid_matches_one_process(world: int) -> None:
    cases = CHOSEN[world]
    built = {name: build(name, torch.float64, grid.values_of(name, LAYERS)) for name in {each.model for each in cases}}
    curves = {
        key: expected(built[key[0]], OBJECTIVES[key[1]][1], packed=key[2], router_aux=key[3])
        for key in {(each.model, each.objective, each.packed, each.router_aux) for each in cases}
    }

    def body(rank: int) -> list[str]:
        problems = []
        for each in cases:
            cfg = OBJECTIVES[each.objective][0]
            got = train(built[each.model], each.mesh, each.loss, cfg, each.packed, each.router_aux)
            reference = curves[each.model, each.objective, each.packed, each.router_aux]
            problems += [f"{each}: {problem}" for problem in differences(got, reference)]
        return problems

    problems = sorted({line for lines in run_ranks(world, body, timeout=1800) for line in lines})
    assert not problems, "\n".join(problems)
