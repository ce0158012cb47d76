"""Skipped optimizer steps leave sharded parameters and optimizer state unchanged, for every optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.harness import run_ranks
from tests.unit.test_masked_step import OPTIMIZERS, compare, matrices

PLAIN_ONLY = ("homemade", "sgd_fused")
"""Optimizers that do not support DTensors."""


def sharded() -> nn.Module:
    """Build two matrices with uneven shards."""
    model = matrices()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def fill_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        full = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(full, parameter.device_mesh, [Shard(0)], src_data_rank=None)


def test_skipped_steps_leave_shards_unchanged() -> None:
    """Only rank 0 has a non-finite gradient."""
    names = [name for name in OPTIMIZERS if name not in PLAIN_ONLY]

    def on_rank(rank: int) -> list[str]:
        return [line for name in names for line in compare(name, sharded, fill_gradients, poisoned=rank == 0)]

    problems = [line for lines in run_ranks(2, on_rank) for line in lines]
    assert not problems, "\n".join(problems)
