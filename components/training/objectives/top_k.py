"""Divergence from the k most likely tokens of a teacher, whose other tokens count as one.

The distributions of teacher and student are compared on k + 1 outcomes: each of the teacher's k most likely tokens, and
any other token. This is the divergence of the full distributions if k is the size of the vocabulary, and never more
than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from components.config.schema.objective import Divergence
from components.config.teacher_files import LOG_PROBS, TOKEN_IDS
from components.training.objectives.contract import Vocabulary
from components.training.objectives.cross_entropy import log_mass_of_others, sum_over_shards
from components.training.objectives.divergence import token_divergence


class TopK(NamedTuple):
    """A teacher's k most likely tokens at each position of a chunk."""

    ids: torch.Tensor  # (tokens, k) int64
    """Token ids."""
    log_probs: torch.Tensor  # (tokens, k + 1)
    """Their log-probabilities; the last entry is that of all other tokens together, -inf if there are none."""

    @classmethod
    def of_chunk(cls, values: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        """Return the values of a chunk (see `TokenLoss.of_chunk`) with the log-probabilities in `dtype`, normalized."""
        log_probs = values[LOG_PROBS].view(torch.float32).to(dtype)
        return cls(values[TOKEN_IDS].long(), log_probs.log_softmax(-1))


def find_top_k(log_p: torch.Tensor, k: int, vocabulary: Vocabulary) -> TopK:
    """Return the k most likely tokens. A collective over the ranks that the vocabulary is sharded over.

    Args:
        log_p: Log-probabilities (tokens, this rank's vocabulary). Overwritten.
    """
    group = vocabulary.group
    values, ids = log_p.topk(min(k, log_p.shape[1]))  # (tokens, k)
    ids += vocabulary.first
    if group is not None:
        missing = k - values.shape[1]
        both = [
            torch.nn.functional.pad(values, (0, missing), value=-torch.inf),
            torch.nn.functional.pad(ids, (0, missing)),
        ]
        values, ids = (torch.cat(_all_gather(each, group), dim=1) for each in both)  # (tokens, ranks x k)
        values, order = values.topk(k)
        ids = ids.gather(1, order)
    rest = log_mass_of_others(log_p, *_positions(ids, vocabulary, log_p.shape[1]), group)
    return TopK(ids, torch.cat([values, rest[:, None]], dim=1))


def top_k_divergence(
    kind: Divergence, teacher: TopK, log_q: torch.Tensor, vocabulary: Vocabulary
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence of each token (tokens,), and its gradient with respect to the student's logits.

    Args:
        log_q: Log-probabilities of the student (tokens, this rank's vocabulary). Overwritten, to save memory.

    The student's probability of all tokens outside of the k is the sum of theirs, q_rest. So with the gradient g of the
    divergence on k + 1 outcomes, the gradient is g_j for a token j of the k, and g_rest x q_i / q_rest for another
    token i.
    """
    size = log_q.shape[1]
    index, is_local = _positions(teacher.ids, vocabulary, size)
    of_k = sum_over_shards(log_q.gather(1, index).where(is_local, 0), vocabulary.group)  # (tokens, k)
    if teacher.ids.shape[1] == (vocabulary.size or size):  # there are no other tokens
        divergence, of_outcomes = token_divergence(kind, teacher.log_probs[:, :-1].contiguous(), of_k, None)
        gradient = log_q.zero_()
    else:
        log_rest = log_mass_of_others(log_q, index, is_local, vocabulary.group)[:, None]  # (tokens, 1)
        outcomes = torch.cat([of_k, log_rest], dim=1)  # (tokens, k + 1)
        divergence, of_outcomes = token_divergence(kind, teacher.log_probs, outcomes, None)
        of_outcomes, of_rest = of_outcomes[:, :-1], of_outcomes[:, -1:]
        gradient = log_q.sub_(log_rest).exp_().mul_(of_rest)  # 0 for the k tokens
    return divergence, gradient.scatter_add_(1, index, of_outcomes.where(is_local, 0))


def _positions(ids: torch.Tensor, vocabulary: Vocabulary, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of token ids (tokens, k) in this rank's vocabulary, and which of them are there."""
    index = ids - vocabulary.first
    return index.clamp(0, size - 1), (index >= 0) & (index < size)


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
