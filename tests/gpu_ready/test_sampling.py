"""Answers on fake CUDA tensors: nothing on the CPU, one read per token, a cache in the compute dtype."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_ready.conftest import Run
from tests.gpu_ready.matrix import LAYOUTS, MIXED, Layout
from tests.suites import PARITY, select

SAMPLED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "single": (LAYOUTS["single"], {}),
    "dp_shard": (LAYOUTS["dp_shard"], {}),
    "dp_shard, weights for each token": (LAYOUTS["dp_shard"], {"gathers": False}),
    "offloaded weights": (({"dp_shard": 2, "cpu_offload": True}, 2), {}),
    "offloaded weights, for each token": (({"dp_shard": 2, "cpu_offload": True}, 2), {"gathers": False}),
    "tp": (LAYOUTS["tp"], {}),
    "cp": (LAYOUTS["cp by ulysses"], {}),
}
EACH_COMMIT = ["single", "dp_shard", "offloaded weights, for each token", "tp"]


@pytest.mark.parametrize("name", select([*SAMPLED], EACH_COMMIT, PARITY))
def test_answers_are_computed_on_the_device(fake_cuda: Run, name: str) -> None:
    """Two tensors on different devices in an operator would raise an error."""
    (axes, world), options = SAMPLED[name]
    found = fake_cuda("sample", axes=axes, world=world, model=MIXED, **options)
    assert found["lengths"] == [8, 8]
    assert found["reads"] == 8
    assert (found["devices"], found["dtypes"]) == (["cuda"], ["torch.bfloat16"])
