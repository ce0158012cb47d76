"""Skipped steps leave no trace on sharded parameters either, whatever the optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.harness import run_ranks
from tests.unit.test_masked_step import OPTIMIZERS, compare, matrices

PLAIN_ONLY = ("homemade", "sgd_fused")
"""Optimizers that torch cannot run on DTensors at all."""


def sharded() -> nn.Module:
    """Two matrices whose shards are uneven."""
    model = matrices()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def fill_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        whole = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, [Shard(0)], src_data_rank=None)


def test_skipped_steps_leave_no_trace_on_shards() -> None:
    """Rank 0 alone has a value that is not finite."""
    names = [name for name in OPTIMIZERS if name not in PLAIN_ONLY]

    def on_rank(rank: int) -> list[str]:
        return [line for name in names for line in compare(name, sharded, fill_gradients, poisoned=rank == 0)]

    problems = [line for lines in run_ranks(2, on_rank) for line in lines]
    assert not problems, "\n".join(problems)
