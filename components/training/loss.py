"""Losses are sums over target tokens; whoever reports or differentiates a mean divides once, by the global count."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

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


def reduce_loss(
    loss_store: list[torch.Tensor],
    total_num_tokens: torch.Tensor,
    per_token_loss: bool = True,
    dp_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum losses and their denominator over micro-batches and ranks (seed page 001, NeMo AutoModel).

    Args:
        loss_store: Sums of token losses, one scalar per micro-batch; may be empty (a rank without data).
        total_num_tokens: Target tokens of this rank's micro-batches: local, not yet reduced.
        per_token_loss: True: the denominator is the number of tokens; False: the number of micro-batches.
        dp_group: Ranks to sum over (dp x cp); None: this rank alone.

    Returns (loss, denominator), each of shape (1,) and detached: the loss in float64, the denominator in int64. The
    mean is their quotient. Raises FloatingPointError naming the ranks whose loss is not finite.
    """
    device = total_num_tokens.device
    losses = [loss.detach().to(device=device, dtype=torch.float64).reshape(()) for loss in loss_store]
    total = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64, device=device)
    count = (
        total_num_tokens.detach().sum().to(torch.float64)
        if per_token_loss
        else torch.tensor(float(len(losses)), dtype=torch.float64, device=device)
    )
    size, rank = (dist.get_world_size(dp_group), dist.get_rank(dp_group)) if dp_group is not None else (1, 0)
    broken = torch.zeros(size, dtype=torch.float64, device=device)
    broken[rank] = (~torch.isfinite(total)).to(torch.float64)
    packed = torch.cat([total.nan_to_num(0, 0, 0)[None], count[None], broken])  # (2 + ranks,)
    if size > 1:
        dist.all_reduce(packed, group=dp_group)
    culprits = packed[2:].nonzero().flatten().tolist()
    if culprits:
        raise FloatingPointError(f"the loss of rank {', '.join(map(str, culprits))} of {size} is not finite")
    return packed[:1], packed[1:2].to(torch.int64)
