"""Counting of targets. Losses are sums over target tokens, and the caller divides once by the global count."""

from __future__ import annotations

import torch

from components.config.schema.data import IGNORED
from components.distributed.collectives import reduce_loss

__all__ = ["count_targets", "reduce_loss"]


def count_targets(targets: torch.Tensor) -> torch.Tensor:
    """Return the number of targets (batch, seq) that are not ignored, as a float64 scalar on their device.

    float64 represents counts exactly up to 2^53.
    """
    return (targets != IGNORED).sum().to(torch.float64)
