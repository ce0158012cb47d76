"""Distillation: the student's next-token distribution is trained towards that of a teacher with the same tokenizer.

The teacher runs on the same mesh, on the same shard of each row, and passes on its last hidden states. The loss head
computes the logits of both models a chunk of tokens at a time, so neither model's logits exist as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.objective import DistillationConfig, Divergence
from components.training.loss import count_targets
from components.training.objectives.contract import RowScores, RowWeights, Vocabulary
from components.training.objectives.cross_entropy import log_softmax

HIDDEN = "teacher_hidden"
"""Name in `Batch.token_values` of the teacher's last hidden states (batch, seq, teacher's hidden)."""


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """LM head of the teacher, with the same sharding along the vocabulary as the student's."""

    weight: torch.Tensor  # (this rank's vocabulary, teacher's hidden)
    bias: torch.Tensor | None = None  # (this rank's vocabulary,)
    logits_transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The teacher's elementwise transform of its logits; None: identity."""

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


class DistillationLoss:
    """Token loss (1 - w) T^2 D(teacher, student) + w x cross-entropy, where w is the weight of the cross-entropy.

    The divergence D compares the distributions at temperature T. The factor T^2 keeps the size of its gradient
    independent of T (Hinton et al. 2015). With the teacher's distribution p and the student's q, D is

    - forward_kl: KL(p || q),
    - reverse_kl: KL(q || p) (Gu et al. 2024),
    - jensen_shannon: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2 (Agarwal et al. 2024).
    """

    def __init__(self, cfg: DistillationConfig) -> None:
        self._divergence, self._temperature = cfg.divergence, cfg.temperature
        self._cross_entropy_weight = cfg.cross_entropy_weight
        self.teacher: TeacherHead | None = None
        """Head of the teacher, for the hidden states of the current step."""
        self.sums: torch.Tensor | None = None  # (3,) float64
        """Sums of D and of the student's and the teacher's cross-entropy over the target tokens so far; None: none."""

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Raise NotImplementedError: the teacher's logits are computed in chunks only."""
        raise NotImplementedError("distillation needs model.loss=chunked")

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Raise NotImplementedError: the teacher's logits are computed in chunks only."""
        raise NotImplementedError("distillation needs model.loss=chunked")

    def of_chunk(
        self,
        scores: torch.Tensor,
        targets: torch.Tensor,
        vocabulary: Vocabulary,
        weights: torch.Tensor | None,
        values: Mapping[str, torch.Tensor],
        *,
        per_token: bool,
        with_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss sum of a chunk of tokens and its gradient: see `TokenLoss`.

        Raises RuntimeError without the teacher's head.
        """
        if self.teacher is None:
            raise RuntimeError("DistillationLoss needs the teacher's head: see Distillation.with_token_values")
        w, temperature = self._cross_entropy_weight, self._temperature
        group, index, is_local = vocabulary.group, *_position(targets, vocabulary, scores.shape[-1])
        log_p, log_q = (
            log_softmax(self.teacher.logits(values[HIDDEN]), group, False)[0],
            log_softmax(scores, group, False)[0],
        )
        target_log_probs = torch.stack([each.gather(1, index)[:, 0].where(is_local, 0) for each in (log_q, log_p)])
        if group is not None:
            dist.all_reduce(target_log_probs, group=group)
        cross_entropy, teacher_cross_entropy = -target_log_probs
        cross_entropy_gradient = log_q.exp() if w > 0 else None
        if temperature != 1:
            log_p, log_q = (log_softmax(each.div_(temperature), group, False)[0] for each in (log_p, log_q))
        divergence, gradient = token_divergence(self._divergence, log_p, log_q, group)
        divergence = divergence.where(targets != IGNORED, 0)  # (chunk,)
        sums = torch.stack([divergence.sum(), cross_entropy.sum(), teacher_cross_entropy.sum()]).double()
        self.sums = sums if self.sums is None else self.sums + sums
        losses = (1 - w) * temperature**2 * divergence + w * cross_entropy
        gradient *= (1 - w) * temperature
        if cross_entropy_gradient is not None:
            cross_entropy_gradient.scatter_add_(1, index, -is_local[:, None].to(scores.dtype))
            gradient.add_(cross_entropy_gradient, alpha=w)
        if weights is not None:
            losses, gradient = losses * weights, gradient.mul_(weights[:, None])
        return losses if per_token else losses.sum(), gradient if with_gradient else None


def _position(targets: torch.Tensor, vocabulary: Vocabulary, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index (tokens, 1) of each target in this rank's vocabulary, and whether it is there, (tokens,)."""
    index = targets - vocabulary.first
    is_local = (targets != IGNORED) & (index >= 0) & (index < size)
    return index.clamp(0, size - 1)[:, None], is_local


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
            value = _sum(log_p.sub_(log_q).mul_(p).sum(-1), group)
            return value, log_q.exp_().sub_(p)
        case Divergence.reverse_kl:  # g = log(q / p), up to a constant that the gradient does not depend on
            q = log_q.exp()
            weighted = log_q.sub_(log_p).mul_(q)
            value = _sum(weighted.sum(-1), group)
            return value, weighted.sub_(q.mul_(value[:, None]))
        case Divergence.jensen_shannon:  # g = log(q / m) / 2
            log_m = torch.logaddexp(log_p, log_q).sub_(math.log(2))
            p, q = log_p.exp(), log_q.exp()
            weighted = log_q.sub_(log_m).mul_(q).div_(2)
            of_teacher = log_p.sub_(log_m).mul_(p).div_(2).sum(-1)
            of_both = _sum(torch.stack([of_teacher, weighted.sum(-1)]), group)
            return of_both.sum(0), weighted.sub_(q.mul_(of_both[1][:, None]))


def _sum(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


class Distillation:
    """Mean distillation loss of target tokens.

    Args:
        hidden_states: Runs the teacher on a step's micro-batches.
    """

    unit = "target token"
    needs_row_scores = False
    metrics = ("divergence", "cross_entropy", "teacher_cross_entropy")

    def __init__(self, cfg: DistillationConfig, hidden_states: TeacherHidden) -> None:
        self.token_loss = DistillationLoss(cfg)
        self._hidden_states = hidden_states

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of targets that are not ignored, a float64 scalar."""
        return count_targets(batch.targets)

    def with_token_values(self, model: Any, batches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches with the teacher's last hidden states, on ranks with an LM head. A collective."""
        hidden, self.token_loss.teacher = self._hidden_states(batches)
        return [
            batch if each is None else replace(batch, token_values={**batch.token_values, HIDDEN: each})
            for batch, each in zip(batches, hidden, strict=True)
        ]

    def token_sums(self) -> torch.Tensor:
        """Return the sums (3,) float64 of the divergence and of both models' cross-entropy since the last call."""
        sums, self.token_loss.sums = self.token_loss.sums, None
        return torch.zeros(3, dtype=torch.float64) if sums is None else sums

    def row_values(self, model: Any, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
        """Return no values: rows are not scored."""
        return {}

    def step_sums(self, scores: RowScores) -> None:
        """Return None: there are no row weights."""

    def weights(self, scores: RowScores, step_sums: torch.Tensor | None = None) -> RowWeights:
        """Raise NotImplementedError: a sum of token losses has no row weights."""
        raise NotImplementedError("Distillation is a sum of token losses and has no row weights")
