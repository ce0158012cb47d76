"""Kernels that a decoder layer launches for one micro-batch, forward and backward: a number that may only go down."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_ready.conftest import Run

BF16 = {"dtype": "bfloat16"}
SINGLE: dict[str, Any] = {"axes": {"strategy": "single"}, "model": BF16}
SHARDED: dict[str, Any] = {"axes": {"dp_shard": 8}, "world": 8}
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "full, packed": ({**SINGLE, "pack": True}, 68.5),  # 126.5 without fused layers
    "full, padded": (SINGLE, 61.5),
    "full, transformers' own layers": ({**SINGLE, "pack": True, "model": {**BF16, "fused": "none"}}, 126.5),
    "full, packed, dp_shard 8": ({**SHARDED, "pack": True}, 82.0),
    "LoRA, packed": ({**SINGLE, "pack": True, "peft": "lora"}, 127.0),
    "QLoRA, packed": ({**SINGLE, "pack": True, "peft": "qlora"}, 141.0),
}
SIZES = {"hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_launches_few_kernels(fake_cuda: Run, case: str) -> None:
    """The optimizer's kernels for the layer are among them, shared by the two micro-batches."""
    arguments, most = CASES[case]
    shorter, longer = (fake_cuda("step", **{**arguments, "model": model_with(arguments, layers)}) for layers in (2, 3))
    launches = (sum(longer["launches"].values()) - sum(shorter["launches"].values())) / shorter["micro_batches"]
    assert launches <= most, longer["launches"]
    assert launches > most - 1, f"lower the number of this test to {launches}"


def model_with(arguments: dict[str, Any], layers: int) -> dict[str, Any]:
    return {**arguments.get("model", {}), "config": {**SIZES, "num_hidden_layers": layers}}
