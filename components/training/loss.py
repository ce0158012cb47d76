"""Counting of targets, and sums over ranks. Losses are sums over units; the caller divides once by the global count."""

from __future__ import annotations

import torch
import torch.distributed as dist

from components.config.schema.data import IGNORED
from components.distributed.collectives import reduce_loss

__all__ = ["count_targets", "reduce_loss"]


def count_targets(targets: torch.Tensor) -> torch.Tensor:
    """Return the number of targets (batch, seq) that are not ignored, as a float64 scalar on their device.

    float64 represents counts exactly up to 2^53.
    """
    return (targets != IGNORED).sum().to(torch.float64)


def count_inputs(targets: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens up to the last target of each row (batch, seq), as a float64 scalar."""
    positions = torch.arange(1, targets.shape[-1] + 1, device=targets.device)
    return ((targets != IGNORED) * positions).amax(-1).sum().to(torch.float64)


def sum_over_ranks(vector: torch.Tensor) -> torch.Tensor:
    """All-reduce a vector over all ranks in place, and return it."""
    if (ranks := all_ranks()) is not None:
        dist.all_reduce(vector, group=ranks)
    return vector


def all_ranks() -> dist.ProcessGroup | None:
    """Return the process group of all ranks, or None for a single process."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
