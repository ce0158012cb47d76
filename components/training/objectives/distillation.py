"""Distillation: the student's next-token distribution is trained towards that of a teacher with the same tokenizer.

Either the teacher runs on the same mesh, on the same shard of each row, and passes on its last hidden states; or the
batches hold its most likely tokens at each position, which scripts/teacher.py stored. The loss head computes the logits
of both models a chunk of tokens at a time, so neither model's logits exist as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.objective import DistillationConfig
from components.config.teacher_files import LOG_PROBS, TARGET_LOG_PROB
from components.data.batches import TokenValues
from components.training.loss import count_targets
from components.training.objectives.contract import NOT_SHARDED, RowScores, RowWeights, Vocabulary
from components.training.objectives.cross_entropy import log_softmax, sum_over_shards
from components.training.objectives.divergence import token_divergence
from components.training.objectives.top_k import TopK, top_k_divergence

HIDDEN = "teacher_hidden"
"""Name in `Batch.token_values` of the teacher's last hidden states (batch, seq, teacher's hidden)."""


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """LM head of the teacher, with the same sharding along the vocabulary as the student's."""

    weight: torch.Tensor  # (this rank's vocabulary, teacher's hidden)
    bias: torch.Tensor | None = None  # (this rank's vocabulary,)
    logits_transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The teacher's elementwise transform of its logits; None: identity."""
    vocabulary: Vocabulary = NOT_SHARDED
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

        Raises RuntimeError without stored values and without the teacher's head.
        """
        w, temperature = self._cross_entropy_weight, self._temperature
        index, is_local = _position(targets, vocabulary, scores.shape[-1])

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
            divergence, gradient = top_k_divergence(self._divergence, stored, at_temperature(log_q), vocabulary)
        else:
            log_p = self._teacher_log_probs(values, vocabulary)
            teacher_cross_entropy = -log_prob_of_target(log_p)
            both = at_temperature(log_p), at_temperature(log_q)
            divergence, gradient = token_divergence(self._divergence, *both, vocabulary.group)
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

    def _teacher_log_probs(self, values: Mapping[str, torch.Tensor], vocabulary: Vocabulary) -> torch.Tensor:
        """Return the teacher's log-probabilities (chunk, this rank's vocabulary) from its hidden states."""
        if self.teacher is None:
            raise RuntimeError("DistillationLoss needs the teacher's head: see Distillation.with_token_values")
        return log_softmax(self.teacher.logits(values[HIDDEN]), vocabulary.group, False)[0]


def _position(targets: torch.Tensor, vocabulary: Vocabulary, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index (tokens, 1) of each target in this rank's vocabulary, and whether it is there, (tokens,)."""
    index = targets - vocabulary.first
    is_local = (targets != IGNORED) & (index >= 0) & (index < size)
    return index.clamp(0, size - 1)[:, None], is_local


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

    def stored_values(self, dataset: Any, split: str) -> TokenValues | None:
        """Return the stored values of a dataset's rows for its batches, or None if the teacher runs in every step."""
        return None

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
