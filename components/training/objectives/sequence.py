"""Objectives of recipes/classify.py: classification of texts, and reward models on pairs of answers.

The model has a score head (components/models/classifier.py), whose outputs at the last token of each row are the
logits of its labels, or one reward. The data put a target at this token and nowhere else, so classification is the
cross-entropy of a vocabulary of labels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.objective import ClassificationConfig, RewardConfig, ScoreConfig
from components.distributed.mesh import Mesh
from components.training.objectives.base import TokenLoss, TokenObjective
from components.training.objectives.cross_entropy import CrossEntropy, upcast


class _LabelLoss(TokenLoss):
    """Cross-entropy of labels; the metric is the number of rows whose label has the highest score."""

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of logits (batch, seq, labels): see `TokenLoss`."""
        self.add_sums((logits.argmax(-1) == targets).sum())  # no label equals IGNORED
        return CrossEntropy().of_logits(logits, targets, weights)

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the losses (batch, seq) of logits (batch, seq, labels); 0 where the target is ignored."""
        return CrossEntropy().per_token(logits, targets)


class _RewardLoss(TokenLoss):
    """Bradley-Terry loss of pairs of neighboring rows, the chosen and the rejected answer.

    Under cp the scored tokens of a pair may be on different ranks. The rewards are summed over cp, and each rank
    computes the gradient of its own tokens. The value of the loss, and the metrics, count on the first cp rank only.

    Args:
        center_weight: Weight of the squared sum of a pair's rewards.
        cp_group: Ranks that hold the other shards of the rows; None: rows are not sharded.
    """

    def __init__(self, center_weight: float = 0.0, cp_group: dist.ProcessGroup | None = None) -> None:
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
        self.add_sums(*(each.where(is_real, 0).sum() for each in metrics))
        return loss


class Classification(TokenObjective):
    """Mean cross-entropy of the labels of texts, which are the targets: padding rows do not count."""

    unit = "text"
    metrics = ("accuracy",)

    def __init__(self) -> None:
        self.token_loss = _LabelLoss()


class Reward(TokenObjective):
    """Mean Bradley-Terry loss of preference pairs: -log sigmoid(reward of the chosen - reward of the rejected answer).

    Reward models are trained so by Ouyang et al. (2022), equation 1.
    """

    unit = "pair"
    metrics = ("margin", "accuracy", "reward_chosen", "reward_rejected")

    def __init__(self, cfg: RewardConfig, mesh: Mesh | None = None) -> None:
        """`mesh`: the mesh whose cp axis shards the rows; None: rows are not sharded."""
        has_cp = mesh is not None and mesh.size("cp") > 1
        self.token_loss = _RewardLoss(cfg.center_weight, mesh["cp"].get_group() if has_cp and mesh else None)

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
