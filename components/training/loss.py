"""Losses are sums over target tokens; whoever reports or differentiates a mean divides once, by the global count."""

from __future__ import annotations

import torch

from components.config.schema.data import IGNORED
from components.distributed.collectives import reduce_loss

__all__ = ["count_targets", "reduce_loss"]


def count_targets(targets: torch.Tensor) -> torch.Tensor:
    """Return how many of `targets` (batch, seq) are not ignored, as a float64 scalar on their device.

    float64 counts exactly up to 2^53.
    """
    return (targets != IGNORED).sum().to(torch.float64)
