"""Distillation: the student's next-token distribution is trained towards that of a teacher with the same tokenizer.

Either the teacher runs on the same mesh, on the same shard of each row, and passes on its last hidden states; or the
batches hold its most likely tokens at each position, which scripts/teacher.py stored. The loss head computes the logits
of both models a chunk of tokens at a time, so neither model's logits exist as a whole.

With the k most likely tokens only, teacher and student are compared on k + 1 outcomes: each of these tokens, and any
other token. This is the divergence of the full distributions if k is the size of the vocabulary, and never more than
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.objective import DistillationConfig, Divergence
from components.config.teacher_files import LOG_PROBS, TARGET_LOG_PROB, TOKEN_IDS
from components.data.dataset import TokenValues
from components.training.objectives.base import CROSS_ENTROPY, Chunk, TokenLoss, TokenObjective, Vocabulary
from components.training.objectives.cross_entropy import log_mass_of_others, log_softmax, sum_over_shards

HIDDEN = "teacher_hidden"
"""Name in `Batch.token_values` of the teacher's last hidden states (batch, seq, teacher's hidden)."""


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """LM head of the teacher, with the same sharding along the vocabulary as the student's."""

    weight: torch.Tensor  # (this rank's vocabulary, teacher's hidden)
    bias: torch.Tensor | None = None  # (this rank's vocabulary,)
    logits_transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The teacher's elementwise transform of its logits; None: identity."""
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """Sharding of the weight along the vocabulary."""

    def logits(self, hidden_bits: torch.Tensor) -> torch.Tensor:
        """Return logits (chunk, this rank's vocabulary) in float32 or float64.

        Args:
            hidden_bits: Hidden states (chunk, teacher's hidden) as the integers of `components.batch.bits_of`.
        """
        logits = F.linear(hidden_bits.view(self.weight.dtype), self.weight, self.bias)
        if self.logits_transform is not None:
            logits = self.logits_transform(logits)
        return logits if logits.dtype == torch.float64 else logits.float()


TeacherHidden = Callable[[Sequence[Batch]], tuple[list[torch.Tensor | None], TeacherHead | None]]
"""Function that returns the teacher's last hidden states of each micro-batch and its head; None on pipeline ranks
without the last stage. A collective."""


class DistillationLoss(TokenLoss):
    """Token loss (1 - w) T^2 D(teacher, student) + w x cross-entropy, where w is the weight of the cross-entropy.

    The divergence D compares the distributions at temperature T. The factor T^2 keeps the size of its gradient
    independent of T (Hinton et al. 2015). With the teacher's distribution p and the student's q, D is

    - forward_kl: KL(p || q),
    - reverse_kl: KL(q || p) (Gu et al. 2024),
    - jensen_shannon: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2 (Agarwal et al. 2024).
    """

    def __init__(self, cfg: DistillationConfig, hidden_states: TeacherHidden | None = None) -> None:
        self._divergence, self._temperature = cfg.divergence, cfg.temperature
        self._cross_entropy_weight, self._hidden_states = cfg.cross_entropy_weight, hidden_states
        self.teacher: TeacherHead | None = None
        """Head of the teacher, for the hidden states of the current step."""

    def with_token_values(self, model: Any, batches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches with the teacher's last hidden states, on ranks with an LM head. A collective."""
        if self._hidden_states is None:
            return list(batches)
        hidden, self.teacher = self._hidden_states(batches)
        return [
            batch if each is None else replace(batch, token_values={**batch.token_values, HIDDEN: each})
            for batch, each in zip(batches, hidden, strict=True)
        ]

    def of_chunk(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss sum of a chunk of tokens and its gradient: see `TokenLoss`.

        Raises RuntimeError without stored values and without the teacher's head.
        """
        scores, vocabulary, values = chunk.scores, chunk.vocabulary, chunk.values
        w, temperature = self._cross_entropy_weight, self._temperature
        index, is_local = chunk.position()

        def log_prob_of_target(log_probs: torch.Tensor) -> torch.Tensor:  # (chunk,)
            return sum_over_shards(log_probs.gather(1, index)[:, 0].where(is_local, 0), vocabulary.group)

        def at_temperature(log_probs: torch.Tensor) -> torch.Tensor:
            return (
                log_probs if temperature == 1 else log_softmax(log_probs.div_(temperature), vocabulary.group, False)[0]
            )

        log_q = log_softmax(scores, vocabulary.group, False)[0]
        cross_entropy = -log_prob_of_target(log_q)
        cross_entropy_gradient = log_q.exp() if w > 0 else None
        if LOG_PROBS in values:
            teacher_cross_entropy = -values[TARGET_LOG_PROB].view(torch.float32).to(scores.dtype)
            stored = TopK.of_chunk(values, scores.dtype)
            divergence, gradient = _top_k_divergence(self._divergence, stored, at_temperature(log_q), vocabulary)
        else:
            log_p = self._teacher_log_probs(values, vocabulary)
            teacher_cross_entropy = -log_prob_of_target(log_p)
            both = at_temperature(log_p), at_temperature(log_q)
            divergence, gradient = _token_divergence(self._divergence, *both, vocabulary.group)
        divergence = divergence.where(chunk.targets != IGNORED, 0)  # (chunk,)
        self.add_sums(divergence.sum(), cross_entropy.sum(), teacher_cross_entropy.sum())
        losses = (1 - w) * temperature**2 * divergence + w * cross_entropy
        gradient *= (1 - w) * temperature
        if cross_entropy_gradient is not None:
            cross_entropy_gradient.scatter_add_(1, index, -is_local[:, None].to(scores.dtype))
            gradient.add_(cross_entropy_gradient, alpha=w)
        if chunk.weights is not None:
            losses, gradient = losses * chunk.weights, gradient.mul_(chunk.weights[:, None])
        return losses if chunk.per_token else losses.sum(), gradient if chunk.with_gradient else None

    def _teacher_log_probs(self, values: Mapping[str, torch.Tensor], vocabulary: Vocabulary) -> torch.Tensor:
        """Return the teacher's log-probabilities (chunk, this rank's vocabulary) from its hidden states."""
        if self.teacher is None:
            raise RuntimeError("DistillationLoss needs the teacher's head: see DistillationLoss.with_token_values")
        return log_softmax(self.teacher.logits(values[HIDDEN]), vocabulary.group, False)[0]


class Distillation(TokenObjective):
    """Mean distillation loss of target tokens.

    Args:
        hidden_states: Runs the teacher on a step's micro-batches; None: its most likely tokens are stored.
    """

    metrics = ("divergence", CROSS_ENTROPY, "teacher_cross_entropy")

    def __init__(self, cfg: DistillationConfig, hidden_states: TeacherHidden | None = None) -> None:
        self.token_loss = DistillationLoss(cfg, hidden_states)

    def stored_values(self, dataset: Any, split: str) -> TokenValues | None:
        """Return the stored values of a dataset's rows for its batches, or None if the teacher runs in every step."""
        return None


def _token_divergence(
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


def _top_k_divergence(
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
        divergence, of_outcomes = _token_divergence(kind, teacher.log_probs[:, :-1].contiguous(), of_k, None)
        gradient = log_q.zero_()
    else:
        log_rest = log_mass_of_others(log_q, index, is_local, vocabulary.group)[:, None]  # (tokens, 1)
        outcomes = torch.cat([of_k, log_rest], dim=1)  # (tokens, k + 1)
        divergence, of_outcomes = _token_divergence(kind, teacher.log_probs, outcomes, None)
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
