"""Collectives of every mesh group use the timeout of the run, so a hanging rank does not block the others."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from components import distributed
from components.config.schema.parallelism import ParallelismConfig
from components.distributed.expert import _divided_over
from tests.harness import join_world, run_ranks

SECONDS = 4.0


@pytest.mark.parametrize("name", ["pp", "fsdp"])
def test_collective_with_a_missing_rank_times_out(name: str) -> None:
    """Covers a mesh axis and a flattened view."""

    def body(rank: int) -> float:
        join_world(timedelta(seconds=SECONDS))
        axes = {"pp": 2, "dp_shard": 2} if name == "pp" else {"dp_shard": 2, "cp": 2}
        group = distributed.build_mesh(ParallelismConfig(**axes), "cpu")[name].get_group()
        began = time.monotonic()
        if rank > 0:
            return 0.0  # like a hanging rank, its connections stay open
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1), group=group)
        return time.monotonic() - began

    waited = run_ranks(4, body, init=False, timeout=60)[0]
    assert SECONDS - 1 < waited < SECONDS + 10


def test_expert_group_uses_the_timeout_of_the_run() -> None:
    """The group of experts that are sharded over both ep and tp is not a view of the mesh."""
    layout = ParallelismConfig(dp_shard=2, ep=2, tp=2)

    def body(rank: int) -> timedelta:
        join_world(timedelta(seconds=40))
        experts = _divided_over(distributed.build_mesh(layout, "cpu").device_mesh["ep", "tp"], [Shard(0), Shard(0)])
        assert experts is not None
        assert experts.size() == 4
        return experts.get_group()._get_backend(torch.device("cpu")).options._timeout

    assert run_ranks(8, body, init=False, timeout=120) == [timedelta(seconds=40)] * 8
