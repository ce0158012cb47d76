"""Divergences of two distributions, with their gradients."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from components.config.schema.objective import Divergence
from components.training.objectives.cross_entropy import sum_over_shards


def token_divergence(
    kind: Divergence, log_p: torch.Tensor, log_q: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence of each token (tokens,), and its gradient with respect to the student's logits.

    Args:
        log_p: Log-probabilities of the teacher, (tokens, this rank's vocabulary). Overwritten, to save memory.
        log_q: Those of the student, overwritten too.
        group: Process group that the vocabulary is sharded over; None if it is not sharded.

    For a divergence with the derivative g by the student's probabilities q, the gradient is q (g - sum of q g).
    """
    match kind:
        case Divergence.forward_kl:  # g = -p / q
            p = log_p.exp()
            value = sum_over_shards(log_p.sub_(log_q).mul_(p).sum(-1), group)
            return value, log_q.exp_().sub_(p)
        case Divergence.reverse_kl:  # g = log(q / p), up to a constant that the gradient does not depend on
            q = log_q.exp()
            weighted = log_q.sub_(log_p).mul_(q)
            value = sum_over_shards(weighted.sum(-1), group)
            return value, weighted.sub_(q.mul_(value[:, None]))
        case Divergence.jensen_shannon:  # g = log(q / m) / 2
            log_m = torch.logaddexp(log_p, log_q).sub_(math.log(2))
            p, q = log_p.exp(), log_q.exp()
            weighted = log_q.sub_(log_m).mul_(q).div_(2)
            of_teacher = log_p.sub_(log_m).mul_(p).div_(2).sum(-1)
            of_both = sum_over_shards(torch.stack([of_teacher, weighted.sum(-1)]), group)
            return of_both.sum(0), weighted.sub_(q.mul_(of_both[1][:, None]))
