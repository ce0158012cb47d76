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


def token_loss_sum(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> torch.Tensor:
    """Return the sum of the cross-entropies of next-token predictions.

    Args:
        logits: (batch, seq, vocabulary); position t predicts targets[:, t].
        targets: (batch, seq) int64, from `next_tokens`; IGNORED where nothing is predicted.
        label_smoothing: Share of each target that is spread evenly over the vocabulary.
        z_loss: Factor of the squared log of the softmax's denominator, which is added.

    Returns a scalar in float32, or in float64 for float64 logits.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    rows, answers = logits.flatten(0, 1), targets.flatten()  # (tokens, vocabulary), (tokens,)
    loss = F.cross_entropy(rows, answers, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        loss = loss + z_loss * (rows.logsumexp(-1).square() * (answers != IGNORED)).sum()
    return loss


def count_targets(targets: torch.Tensor) -> torch.Tensor:
    """Return how many of `targets` (batch, seq) carry loss, as a float64 scalar on their device.

    float64 counts exactly up to 2^53.
    """
    return (targets != IGNORED).sum().to(torch.float64)
