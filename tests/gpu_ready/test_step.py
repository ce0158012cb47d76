"""A training step on fake CUDA tensors, on every layout: the host never waits, nothing is on the wrong device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_ready.conftest import Run

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "single": ({"strategy": "single"}, 1),
    "dp_shard": ({"dp_shard": 8}, 8),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 4}, 8),
    "tp": ({"dp_shard": 2, "tp": 2}, 4),
    "tp with sequence parallelism": ({"dp_shard": 2, "tp": 2, "sequence_parallel": True}, 4),
    "cp by ulysses": ({"dp_shard": 2, "cp": 2}, 4),
    "cp by all_gather": ({"dp_shard": 2, "cp": 2, "cp_attention": "all_gather"}, 4),
    "pp": ({"pp": 2, "dp_shard": 2}, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_never_waits_in_a_step(fake_cuda: Run, layout: str) -> None:
    axes, world = LAYOUTS[layout]
    for rank in {0, world - 1} if "pp" in axes else {0}:
        seen = fake_cuda("step", axes=axes, world=world, rank=rank)
        assert seen["waits"] == {}
        assert seen["devices"] == ["cuda"]
        assert seen["evaluation_waits"] == {}
        assert seen["evaluation_reads"] == 1  # once, for all batches
