"""Families, meshes and kinds of training for grids of objectives, each compared with plain PyTorch in one process.

float64: losses, gradient norms and the first step's gradient of every parameter within 1e-10, for all parameters and
for LoRA, whose reference is the peft library. float32: losses and norms of five steps within 1e-5 of float64 in one
process. Mixtures of experts train with the routers' auxiliary loss, divided by target tokens on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from tests.distributed import adapted
from tests.distributed.adapted import ATTENTION, LORA, Adapted
from tests.distributed.curves import CP, DDP2, EP, FSDP2, HSDP, PP, TP
from tests.harness import run_ranks
from tests.optional import runnable

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

    def plain(self) -> tuple[nn.Module, nn.Module | None]:
        """Build the model for one process in float64, and with LoRA the model without adapters."""
        weights = replace(self.weights, dtype=torch.float64)
        base = adapted.build(weights)
        return (adapted.theirs(weights), base) if self.lora else (base, None)


class ObjectiveCurve(Protocol):
    """Losses and norms of some steps, and the gradients of the first."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]


CaseT = TypeVar("CaseT", bound=ObjectiveCase)
CurveT = TypeVar("CurveT", bound=ObjectiveCurve)


def kinds_of_training(world: int, model: str) -> Iterator[tuple[dict[str, Any], bool, torch.dtype]]:
    """Yield (mesh, LoRA, dtype): on every mesh that a model supports, all parameters and LoRA in float64, and one of
    them in float32."""
    for number, mesh in enumerate(runnable(MESHES[world])):
        if "ep" not in mesh or model == "mixtral":
            yield from [(mesh, False, torch.float64), (mesh, True, torch.float64)]
            yield mesh, number % 2 == 1, torch.float32


def problems_on_meshes(
    world: int,
    cases: Sequence[CaseT],
    expected: Callable[[CaseT], CurveT],
    train: Callable[[CaseT, nn.Module], CurveT],
    differences: Callable[[CurveT, CurveT, float], list[str]],
) -> list[str]:
    """Train each case on `world` ranks; return what differs from one process, and gradients that no rank has.

    Args:
        expected: Returns the curve of one process, in float64.
        train: Returns the curve of a model on the mesh. A collective.
        differences: Compares (curve on the mesh, curve of one process) within a relative bound.
    """
    built = [(each.built(), expected(each)) for each in cases]

    def body(rank: int) -> list[tuple[list[str], set[str]]]:
        found = []
        for each, (model, reference) in zip(cases, built, strict=True):
            got = train(each, model)
            names = set(got.gradients)
            if each.dtype != torch.float64:
                got.gradients = {}
            lines = [f"{each}: {problem}" for problem in differences(got, reference, BOUNDS[each.dtype])]
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
