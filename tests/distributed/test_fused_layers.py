"""Fused norms and rotary embeddings on meshes: the loss curve and gradients of one process without them."""

from __future__ import annotations

import pytest
import torch

from components import models
from tests.distributed import parity
from tests.distributed.parity import Case, build, run_case
from tests.distributed.test_parity import CP, FSDP2, PP, SP, TP
from tests.harness import run_ranks


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("axes", [FSDP2, {**TP, **SP}, CP, PP], ids=["fsdp2", "tp sp", "cp", "pp"])
def test_fused_layers_have_the_gradients_of_one_process(name: str, axes: dict[str, object]) -> None:
    expected = parity.reference(Case(name, axes, 2, steps=2))
    model = build(name, torch.float64)
    models.fuse_layers(model)

    def on_rank(rank: int) -> parity.Curve:
        return run_case(Case(name, axes, 2, steps=2), model)[0]

    for curve in run_ranks(2, on_rank):
        assert curve.losses == pytest.approx(expected.losses, rel=1e-10)
        for parameter, gradient in curve.gradients.items():
            assert parity.relative(gradient, expected.gradients[parameter]) < 1e-9, parameter
