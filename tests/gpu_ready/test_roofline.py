"""Predicted tokens per second of whole models, without a GPU: see roofline.py."""

from __future__ import annotations

import pytest

from tests.gpu_ready.conftest import Run
from tests.gpu_ready.roofline import DEVICES, WORK, costs, step_seconds
from tests.suites import PARITY

needs_all = pytest.mark.skipif(not PARITY, reason="make parity: plays steps of 8B models")


def predicted(run: Run, name: str, device: str) -> float:
    """Return the tokens per second without compiled layers."""
    work = WORK[name]
    return work.tokens / sum(step_seconds(work, costs(run, work, "all"), DEVICES[device]).values())


@needs_all
def test_fused_layers_are_predicted_to_reach_a_rate(fake_cuda: Run) -> None:
    """47,600 was predicted before the layers were fused and the loss added its chunks in one kernel."""
    assert predicted(fake_cuda, "1B full", "H200") >= 58_000


@needs_all
def test_adapters_of_8b_are_predicted_to_reach_a_rate(fake_cuda: Run) -> None:
    lora, qlora = (predicted(fake_cuda, name, "H200") for name in ("8B LoRA", "8B QLoRA"))
    assert lora >= 14_300  # 11,400 before
    assert lora / qlora <= 1.1
