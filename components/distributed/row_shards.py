"""Rows divided over the ranks of the cp axis: which tokens a rank holds, and exchanges of tokens for heads.

A row is split into 2 x cp chunks, and rank r holds chunks r and 2 x cp - 1 - r, so that causal attention costs the same
FLOPs on every rank (the zigzag order of Brandon et al. 2023).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh


def local_positions(seq: int, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """Return the positions of this rank's tokens in a sequence of `seq` tokens: (seq / cp,), the early chunk first."""
    size = seq // (2 * mesh.size())
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in local_chunks(mesh)])


def local_chunks(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the indices of this rank's two chunks among the 2 x cp of a sequence."""
    rank = mesh.get_local_rank()
    return rank, 2 * mesh.size() - 1 - rank


def to_heads(mesh: DeviceMesh, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Exchange (batch, seq / cp, heads, width) for (batch, seq, heads / cp, width), in sequence order.

    One all-to-all for all tensors, whose heads and widths may differ; cp divides the heads of each. The results share
    one buffer, in which the heads of a token are adjacent: the layout that projections write and kernels read.
    """
    cp = mesh.size()
    batch, tokens = tensors[0].shape[:2]
    shapes = [(tensor.shape[2] // cp, tensor.shape[3]) for tensor in tensors]  # heads of a rank, width
    by_rank = [tensor.reshape(batch, tokens, cp, -1).movedim(2, 0) for tensor in tensors]
    received = all_to_all_single_autograd(torch.cat(by_rank, dim=-1), None, None, mesh.get_group())
    width = sum(heads * each for heads, each in shapes)
    shards = received.view(cp, batch, 2, tokens // 2, width)
    full = in_sequence_order(shards, dim=2).reshape(batch, cp * tokens, width)
    parts = full.split([heads * each for heads, each in shapes], dim=-1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def to_tokens(mesh: DeviceMesh, output: torch.Tensor) -> torch.Tensor:
    """Exchange (batch, seq, heads / cp, width) for (batch, seq / cp, heads, width)."""
    cp = mesh.size()
    batch, seq, heads, width = output.shape
    by_rank = in_rank_order(output, cp, dim=1)  # (cp, batch, seq / cp, heads / cp, width)
    received = all_to_all_single_autograd(by_rank, None, None, mesh.get_group())
    by_head = received.view(cp, batch, seq // cp, heads, width).movedim(0, 2)  # (batch, seq / cp, cp, ...)
    return by_head.reshape(batch, seq // cp, cp * heads, width)


class GatherShards(torch.autograd.Function):
    """All-gather along dim 0. Each rank's gradient covers its own queries only, so the backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = shard.new_empty(dist.get_world_size(group) * shard.shape[0], *shard.shape[1:])
        dist.all_gather_into_tensor(gathered, shard, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        shard_grad = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(shard_grad, grad.contiguous(), group=ctx.group)
        return shard_grad, None


def in_sequence_order(shards: torch.Tensor, dim: int) -> torch.Tensor:
    """Reorder the chunks of all ranks from zigzag to sequence order.

    Args:
        shards: (cp, ..., 2, chunk, ...).
        dim: Dimension of `shards` that holds the two chunks of a rank.

    Returns a tensor (..., 2 x cp, chunk, ...).
    """
    early, late = shards.select(dim, 0), shards.select(dim, 1).flip(0)  # (cp, ..., chunk, ...)
    return torch.cat([early, late]).movedim(0, dim - 1)


def in_rank_order(full: torch.Tensor, cp: int, dim: int) -> torch.Tensor:
    """Return the zigzag shards of all ranks, contiguous: (..., seq, ...) -> (cp, ..., seq / cp, ...).

    Args:
        dim: Sequence dim of `full`.
    """
    chunks = full.unflatten(dim, (2 * cp, -1))
    early, late = chunks.narrow(dim, 0, cp), chunks.narrow(dim, cp, cp).flip(dim)
    return torch.stack([early, late], dim=dim + 1).movedim(dim, 0).contiguous().flatten(dim + 1, dim + 2)
