"""Parameters that belong to single attention heads: parallel styles for tp, and modules with some of the heads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from components.distributed.tensor.tensor_parallel import distribute_parameters

HEAD_COUNTS = ("num_heads", "num_key_value_heads")
"""Attributes by which some attention modules count their heads; most families count them by the width instead."""


class PerHead(ParallelStyle):
    """Direct parameters with one row per head, (heads, ...): attention sinks, and norms with weights for each head.

    Each rank computes with the rows of its heads. If there are fewer (kv) heads than ranks, the parameter is replicated
    and each rank takes the row of the one head it computes. Applied to an attention module, it also divides the
    module's HEAD_COUNTS.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        for name in HEAD_COUNTS:
            if isinstance(count := getattr(module, name, None), int):
                setattr(module, name, max(count // ranks, 1))
        sharded = {
            name: [Shard(0)] if parameter.shape[0] % ranks == 0 else [Replicate()]
            for name, parameter in module.named_parameters(recurse=False)
        }
        distribute_parameters(module, device_mesh, by_name=sharded)
        compute = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _rows_of_rank(module):
                return compute(*args, **kwargs)

        module.forward = forward
        return module


class PerHeadNorms(ParallelStyle):
    """A module with one nn.LayerNorm per head in the list `norms` (StableLM), applied to (batch, heads, seq, head_dim).

    The norms are replicated, and each rank applies those of its heads. All of them enter the forward, so that every
    rank has a gradient, possibly zero, of every norm, and the reductions over ranks match.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norms: Any = module.norms
        for norm in norms:
            distribute_parameters(norm, device_mesh)
        ranks, rank = device_mesh.size(), device_mesh.get_local_rank()

        def rows(name: str) -> torch.Tensor | None:  # (local heads, 1, head_dim)
            if norms[0]._parameters.get(name) is None:
                return None
            stacked = torch.stack([_local(norm._parameters[name], Partial()) for norm in norms])  # (heads, head_dim)
            return _chunk(stacked, ranks, rank)[:, None]

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, local heads, seq, head_dim)
            normalized = F.layer_norm(hidden, norms[0].normalized_shape, eps=norms[0].eps)
            weight, bias = rows("weight"), rows("bias")
            normalized = normalized if weight is None else normalized * weight.to(hidden.dtype)
            return normalized if bias is None else normalized + bias.to(hidden.dtype)

        module.forward = forward
        return module


@contextmanager
def _rows_of_rank(module: nn.Module) -> Iterator[None]:
    """Replace the module's direct parameters by the rows of this rank's heads within the context."""
    stored: dict[str, Any] = dict(module._parameters)
    local: dict[str, Any] = {}
    for name, parameter in stored.items():
        if isinstance(parameter, DTensor):
            mesh, placement = parameter.device_mesh, parameter.placements[0]
            local[name] = _local(parameter, placement if placement.is_shard() else Partial())
            if placement.is_replicate():
                local[name] = _chunk(local[name], mesh.size(), mesh.get_local_rank())
    module._parameters.update(local)
    try:
        yield
    finally:
        module._parameters.update(stored)


def _local(parameter: Any, gradient: Any) -> torch.Tensor:
    return parameter.to_local(grad_placements=[gradient]) if isinstance(parameter, DTensor) else parameter


def _chunk(rows: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return the rows of a rank's heads, (heads, ...) -> (heads / ranks or 1, ...)."""
    heads = rows.shape[0]
    return rows.chunk(ranks)[rank] if heads >= ranks else rows[rank // (ranks // heads)][None]


def with_heads(module: nn.Module, first: int, query: torch.Tensor, key: torch.Tensor) -> nn.Module:
    """Return a copy of an attention module with the heads of `query` (batch, heads, seq, head_dim) from `first` on."""
    heads, local = query.shape[1], copy.copy(module)
    # Its own parameters (sinks) have one row per query head; key may have fewer heads.
    rows: dict[str, Any] = {name: each[first : first + heads] for name, each in module.named_parameters(recurse=False)}
    local._parameters = {**module._parameters, **rows}
    local.num_key_value_groups = heads // key.shape[1]  # type: ignore[assignment]
    return local
