"""tp replicas stay bitwise equal even if their gradients differ, as with nondeterministic GPU kernels.

CPU kernels are deterministic, so the test perturbs gradients: on each rank, the gradients of norms, and of attention
whose heads tp does not divide, differ by a relative 1e-6.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from components.training import step
from tests.distributed.parity import Case, build, reference, run_case
from tests.harness import run_ranks

MODEL = "llama_uneven_heads"
TP2 = {"strategy": "fsdp2", "dp_shard": 1, "tp": 2}
FSDP2_TP2 = {"strategy": "fsdp2", "dp_shard": 2, "tp": 2}
PP2_TP2 = {"strategy": "fsdp2", "dp_shard": 1, "pp": 2, "tp": 2}
CASES = {2: [TP2], 4: [FSDP2_TP2, {**FSDP2_TP2, "sequence_parallel": True}, PP2_TP2]}


class _PerturbGradient(torch.autograd.Function):
    """Identity whose gradient differs between ranks."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * (1 + 1e-6 * int(os.environ["RANK"]))


class _PerturbedNorm(LlamaRMSNorm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, hidden)
        return F.rms_norm(hidden, hidden.shape[-1:], _PerturbGradient.apply(self.weight), self.variance_epsilon)


class _PerturbedLinear(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, in) -> (batch, seq, out)
        return F.linear(hidden, _PerturbGradient.apply(self.weight), self.bias)


def perturbed_model(name: str) -> nn.Module:
    """Build a model whose norms and attention compute gradients that differ between ranks."""
    model = build(name, torch.float64)
    for path, module in model.named_modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = _PerturbedNorm
        elif isinstance(module, nn.Linear) and "self_attn" in path:
            module.__class__ = _PerturbedLinear
    return model


@functools.cache
def expected_losses() -> list[float]:
    """Losses of all cases in one process."""
    return reference(Case(MODEL, TP2, 2, 3)).losses


def drifted(shapes: list[dict[str, Any]], losses: list[float]) -> list[list[str]]:
    """Run the shapes on this rank; return the names of the parameters whose replicas differ after the last step."""
    found = []
    for shape in shapes:
        curve, different = run_case(Case(MODEL, shape, 2, 3), perturbed_model(MODEL))
        assert curve.losses == pytest.approx(losses, rel=1e-4)
        found.append(different)
    return found


@pytest.mark.parametrize("world", CASES)
def test_replicas_stay_equal_if_their_gradients_differ(world: int) -> None:
    losses = expected_losses()
    found = run_ranks(world, lambda rank: drifted(CASES[world], losses), timeout=120)
    assert found == [[[] for _ in CASES[world]]] * world


def test_replicas_drift_without_equalization() -> None:
    losses = expected_losses()

    def body(rank: int) -> list[list[str]]:
        step.equalize_replicas = lambda parameters: None
        return drifted([TP2], losses)

    for (names,) in run_ranks(2, body):
        assert {"model.norm.weight", "model.layers.0.self_attn.q_proj.weight"} <= set(names)
        assert "model.layers.0.mlp.up_proj.weight" not in names  # sharded, so not a replica
