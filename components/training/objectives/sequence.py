"""Objectives of recipes/classify.py: classification of texts, and reward models on pairs of answers.

The model has a score head (components/models/classifier.py), whose outputs at the last token of each row are the
logits of its labels, or one reward. The data put a target at this token and nowhere else, so classification is the
cross-entropy of a vocabulary of labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.objective import ClassificationConfig, RewardConfig, ScoreConfig
from components.distributed.mesh import Mesh
from components.training.loss import count_targets
from components.training.objectives.contract import RowScores, RowWeights, TokenLoss, Vocabulary
from components.training.objectives.cross_entropy import CrossEntropy, upcast


class ScoreLoss:
    """Base of the losses of a score head, which sum up metrics of the scored rows."""

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None  # (metrics,) float64
        """Sums of the metrics since they were last read; None: nothing was scored."""

    def add(self, *sums: torch.Tensor) -> None:
        """Add to the sums of the metrics, scalars."""
        added = torch.stack([each.detach().double() for each in sums])
        self.sums = added if self.sums is None else self.sums + added

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
    ) -> NoReturn:
        """Raise NotImplementedError: a score head returns all of its few logits."""
        raise NotImplementedError("the loss of a score head is not computed in chunks")


class LabelLoss(ScoreLoss):
    """Cross-entropy of labels; the metric is the number of rows whose label has the highest score."""

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of logits (batch, seq, labels): see `TokenLoss`."""
        self.add((logits.argmax(-1) == targets).sum())  # no label equals IGNORED
        return CrossEntropy().of_logits(logits, targets, weights)

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the losses (batch, seq) of logits (batch, seq, labels); 0 where the target is ignored."""
        return CrossEntropy().per_token(logits, targets)


class RewardLoss(ScoreLoss):
    """Bradley-Terry loss of pairs of neighboring rows, the chosen and the rejected answer.

    Under cp the scored tokens of a pair may be on different ranks. The rewards are summed over cp, and each rank
    computes the gradient of its own tokens. The value of the loss, and the metrics, count on the first cp rank only.

    Args:
        center_weight: Weight of the squared sum of a pair's rewards.
        cp_group: Ranks that hold the other shards of the rows; None: rows are not sharded.
    """

    def __init__(self, center_weight: float = 0.0, cp_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._center_weight, self._cp_group = center_weight, cp_group

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of the pairs of a micro-batch, a scalar in float32 or float64.

        Args:
            logits: (2 x pairs, seq, 1), or this cp rank's shard of the sequence.
            targets: (2 x pairs, seq); IGNORED except at the scored token.
            weights: Not used: pairs have no weights.
        """
        is_scored = targets != IGNORED
        rewards = upcast(logits)[..., 0].where(is_scored, 0).sum(1)  # (2 x pairs,)
        counts = is_scored.sum(1).to(rewards.dtype)
        if self._cp_group is not None:
            totals = torch.stack([rewards.detach(), counts])
            dist.all_reduce(totals, group=self._cp_group)
            rewards, counts = rewards + (totals[0] - rewards.detach()), totals[1]
        chosen, rejected = rewards.view(-1, 2).unbind(1)  # (pairs,) each
        is_real = (counts.view(-1, 2) > 0).all(1)
        margins = chosen - rejected
        losses = -F.logsigmoid(margins)
        if self._center_weight:
            losses = losses + self._center_weight * (chosen + rejected).square()
        loss = losses.where(is_real, 0).sum()
        metrics = [margins, (margins > 0).to(margins.dtype), chosen, rejected]
        if self._cp_group is not None and dist.get_rank(self._cp_group) > 0:
            return loss - loss.detach()
        self.add(*(each.where(is_real, 0).sum() for each in metrics))
        return loss

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Raise NotImplementedError: the loss is one of pairs of rows."""
        raise NotImplementedError("the Bradley-Terry loss is one of pairs of rows, not of tokens")


class _Scoring:
    """Base of the objectives: a sum of losses in one pass, with metrics that the loss has summed up."""

    needs_row_scores = False
    metrics: tuple[str, ...]

    def __init__(self, token_loss: LabelLoss | RewardLoss) -> None:
        self._loss = token_loss

    @property
    def token_loss(self) -> TokenLoss:
        """Loss of the scores of a micro-batch."""
        return self._loss

    def with_token_values(self, model: Any, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches unchanged: the loss depends on scores and targets only."""
        return list(batches)

    def token_sums(self) -> torch.Tensor:
        """Return the sums (metrics,) float64 of the metrics over this rank's rows since the last call."""
        sums, self._loss.sums = self._loss.sums, None
        return torch.zeros(len(self.metrics), dtype=torch.float64) if sums is None else sums

    def row_values(self, model: Any, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
        """Return no values: there is no pass that only scores rows."""
        return {}

    def step_sums(self, scores: RowScores) -> None:
        """Return None: there are no row weights."""

    def weights(self, scores: RowScores, step_sums: torch.Tensor | None = None) -> RowWeights:
        """Raise NotImplementedError: the loss is computed in one pass, without row weights."""
        raise NotImplementedError(f"{type(self).__name__} is computed in one pass and has no row weights")


class Classification(_Scoring):
    """Mean cross-entropy of the labels of texts."""

    unit = "text"
    metrics = ("accuracy",)

    def __init__(self) -> None:
        super().__init__(LabelLoss())

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of texts, a float64 scalar; padding rows do not count."""
        return count_targets(batch.targets)


class Reward(_Scoring):
    """Mean Bradley-Terry loss of preference pairs: -log sigmoid(reward of the chosen - reward of the rejected answer).

    Reward models are trained so by Ouyang et al. (2022), equation 1.
    """

    unit = "pair"
    metrics = ("margin", "accuracy", "reward_chosen", "reward_rejected")

    def __init__(self, cfg: RewardConfig, mesh: Mesh | None = None) -> None:
        """`mesh`: the mesh whose cp axis shards the rows; None: rows are not sharded."""
        has_cp = mesh is not None and mesh.size("cp") > 1
        super().__init__(RewardLoss(cfg.center_weight, mesh["cp"].get_group() if has_cp and mesh else None))

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of pairs (two rows each), a float64 scalar; padding rows do not count."""
        return ((batch.targets != IGNORED).sum(1).view(-1, 2) > 0).all(1).sum().to(torch.float64)


def build_scoring(cfg: ScoreConfig, mesh: Mesh | None) -> Classification | Reward:
    """Return the objective of a config. Raises TypeError for a config that is none of the kinds."""
    match cfg:
        case ClassificationConfig():
            return Classification()
        case RewardConfig():
            return Reward(cfg, mesh)
    raise TypeError(f"build_scoring: there is no objective for {type(cfg).__name__}")
