"""The two methods of scripts/benchmark/loss_memory.py compute the same gradients."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from scripts.benchmark.loss_memory import METHODS, OBJECTIVES, make_inputs


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_methods_have_the_same_gradients(objective: str) -> None:
    options = Namespace(tokens=64, hidden=16, dtype="float64", targets=0.7)
    gradients = []
    for method in METHODS:
        inputs = make_inputs(200, options, torch.device("cpu"))
        OBJECTIVES[objective](inputs, method).backward()
        gradients.append((inputs.hidden.grad, inputs.weight.grad))
    for logits, chunked in zip(*gradients, strict=True):
        assert logits.abs().max() > 1e-6
        torch.testing.assert_close(chunked, logits, rtol=1e-5, atol=1e-9)
