"""Losses are sums over target tokens; whoever reports or differentiates a mean divides once, by the global count."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from components.distributed.collectives import reduce_loss

__all__ = ["IGNORED", "count_targets", "next_tokens", "reduce_loss", "token_loss_sum"]

IGNORED = -100
"""Label of a token that carries no loss (the convention of Hugging Face)."""


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return what each position has to predict: (batch, seq) labels, aligned with the inputs, moved one to the left.

    The last position predicts nothing (IGNORED). Done on whole rows, before cp cuts them; it copies no logits.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def token_loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropies of next-token predictions.

    Args:
        logits: (batch, seq, vocab); position t predicts targets[:, t].
        targets: (batch, seq) int64, from `next_tokens`; IGNORED where nothing is predicted.

    Returns a scalar in float32, or in float64 for float64 logits.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def count_targets(targets: torch.Tensor) -> torch.Tensor:
    """Return how many of `targets` (batch, seq) carry loss, as a float64 scalar on their device.

    float64 counts exactly up to 2^53.
    """
    return (targets != IGNORED).sum().to(torch.float64)
