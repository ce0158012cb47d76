"""Fused layers, recomputed and offloaded activations, and prefetching on meshes: gradients of one plain process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from components import models
from components.config.schema.parallelism import ActivationCheckpointing
from components.models.activations import _OffloadedTensor
from tests.distributed import parity
from tests.distributed.parity import Case, build, run_case
from tests.distributed.test_parity import CP, FSDP2, PP, SP, TP
from tests.harness import run_ranks


class Variant(NamedTuple):
    """A step that computes the same in another way."""

    axes: dict[str, Any]
    model: str = "llama"
    fused: bool = False
    offloads: bool = False
    accumulation: int = 2
    bound: float = 1e-10


VARIANTS = [
    *(
        Variant(axes, name, fused=True, bound=1e-9)
        for name in ("llama", "qwen3")
        for axes in (FSDP2, {**TP, **SP}, CP, PP)
    ),
    *(Variant({**axes, "activation_checkpointing": "selective"}) for axes in (FSDP2, {**TP, **SP})),
    *(Variant(axes, offloads=True) for axes in (FSDP2, {**TP, **SP})),
    Variant({**PP, "activation_checkpointing": "full"}, offloads=True, accumulation=4),
    Variant({"dp_shard": 2, "prefetch": 2}),
]


@contextmanager
def offloading() -> Iterator[None]:
    """Offload activations after they are checkpointed; on CPUs, copies in host memory replace the transfers."""
    stored = []
    checkpoint_activations, create = models.checkpoint_activations, _OffloadedTensor.__init__

    def offload(model: torch.nn.Module, policy: ActivationCheckpointing) -> None:
        checkpoint_activations(model, policy)
        models.offload_activations(model, torch.device("cpu"), smallest=1)

    with (
        patch.object(models, "checkpoint_activations", offload),  # what `run_case` calls
        patch.object(_OffloadedTensor, "__init__", lambda *args: (stored.append(1), create(*args))[1]),
    ):
        yield
    assert stored


def test_variants_have_the_gradients_of_one_process() -> None:
    built: dict[str, torch.nn.Module] = {}
    expected: dict[str, parity.Curve] = {}
    for name in ("llama", "qwen3"):
        built[name] = build(name, torch.float64, {**parity.MODELS[name], "num_hidden_layers": 4})
        expected[name] = parity.reference(Case(name, FSDP2, steps=2), copy.deepcopy(built[name]))

    def on_rank(rank: int) -> list[str]:
        problems = []
        for variant in VARIANTS:
            model = copy.deepcopy(built[variant.model])
            if variant.fused:
                models.fuse_layers(model)
            with offloading() if variant.offloads else nullcontext():
                curve, different = run_case(Case(variant.model, variant.axes, variant.accumulation, steps=2), model)
            plain = expected[variant.model]
            problems += [f"{variant}: replicas of {name} differ" for name in different]
            if curve.losses != pytest.approx(plain.losses, rel=1e-10):
                problems.append(f"{variant}: losses {curve.losses}, not {plain.losses}")
            assert curve.gradients
            for name, gradient in curve.gradients.items():
                error = parity.relative(gradient, plain.gradients[name])
                if not error < variant.bound:
                    problems.append(f"{variant}: gradient of {name} is off by {error:.1e}")
        return problems

    problems = [line for lines in run_ranks(2, on_rank, timeout=240) for line in lines]
    assert not problems, "\n".join(problems)
