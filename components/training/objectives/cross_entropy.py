"""Cross-entropy of target tokens, with label smoothing and z-loss, and the objectives of score heads.

recipes/classify.py classifies texts, or trains a reward model on pairs of answers. The outputs of the score head
(components/models/classifier.py) at the last token of each row are the logits of its labels, or one reward. The data
put a target at this token and nowhere else, so classification is the cross-entropy of a vocabulary of labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.objective import ClassificationConfig, NextTokenConfig, RewardConfig, ScoreConfig
from components.distributed.mesh import Mesh
from components.training.objectives.base import Chunk, TokenLoss, TokenObjective


@dataclass(frozen=True, slots=True)
class CrossEntropy(TokenLoss):
    """Negative log-probability of each target.

    Label smoothing (Szegedy et al. 2016) spreads a share of each target's probability evenly over the vocabulary. The
    z-loss (Chowdhery et al. 2022) adds a multiple of the squared log of the softmax denominator, which keeps logits
    small.
    """

    label_smoothing: float = 0.0
    """Share of each target's probability that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax denominator."""
    near_one: bool = False
    """Compute losses near 0 from the probability of all other tokens: the log-probability of a target whose probability
    is 1 within rounding is 0 otherwise. For objectives that depend on 1 - the probability; without the two terms above.
    Takes another pass over the logits."""

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of logits (batch, seq, vocabulary): see `TokenLoss`."""
        if weights is not None or self.near_one:
            return TokenLoss.of_logits(self, logits, targets, weights)
        scores, ids = upcast(logits).flatten(0, 1), targets.flatten()  # (tokens, vocabulary), (tokens,)
        smoothing = self.label_smoothing
        loss = F.cross_entropy(scores, ids, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
        if self.z_loss:
            loss = loss + self.z_loss * (scores.logsumexp(-1).square() * (ids != IGNORED)).sum()
        return loss

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the losses (batch, seq) of logits (batch, seq, vocabulary); 0 where the target is ignored."""
        scores, ids = upcast(logits).flatten(0, 1), targets.flatten()
        if self.near_one:
            index = ids.clamp(min=0)[:, None]
            of_others = scores.scatter(1, index, -torch.inf).logsumexp(-1)
            losses = torch.logaddexp(of_others - scores.gather(1, index)[:, 0], torch.zeros_like(of_others))
            return losses.where(ids != IGNORED, 0).view(targets.shape)
        smoothing = self.label_smoothing
        losses = F.cross_entropy(scores, ids, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
        if self.z_loss:
            losses = losses + self.z_loss * scores.logsumexp(-1).square() * (ids != IGNORED)
        return losses.view(targets.shape)

    def of_chunk(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss sum of a chunk of tokens and its gradient: see `TokenLoss`."""
        scores, vocabulary, weights = chunk.scores, chunk.vocabulary, chunk.weights
        log_probs, log_sum = log_softmax(scores, vocabulary.group, bool(self.z_loss))
        is_real, (index, is_local) = chunk.targets != IGNORED, chunk.position()
        smoothing, size = self.label_smoothing, vocabulary.size or scores.shape[-1]
        target_terms = log_probs.gather(1, index)[:, 0].where(is_local, 0)  # (chunk,)
        at_target: float | torch.Tensor = smoothing - 1  # added to the gradient
        if self.near_one:
            of_others = log_mass_of_others(log_probs, index, is_local[:, None], vocabulary.group)  # (chunk,)
            is_near_one = is_local & (of_others < -math.log(2))
            target_terms = torch.log1p(-of_others.exp()).where(is_near_one, target_terms)
            at_target = -of_others.exp()[:, None]  # log_mass_of_others set the target's probability to 0
        if smoothing:
            target_terms = (1 - smoothing) * target_terms + smoothing / size * log_probs.sum(-1) * is_real
        z_terms = None if log_sum is None else self.z_loss * log_sum.square() * is_real  # (chunk,)
        if weights is not None:
            target_terms = target_terms * weights
            z_terms = None if z_terms is None else z_terms * weights
        if not chunk.per_token:
            target_terms, z_terms = target_terms.sum(), None if z_terms is None else z_terms.sum()
        if vocabulary.group is not None:
            dist.all_reduce(target_terms, group=vocabulary.group)
        loss = -target_terms if z_terms is None else z_terms - target_terms
        if not chunk.with_gradient:
            return loss, None
        gradient = log_probs.exp_()
        if log_sum is not None:
            gradient *= 1 + 2 * self.z_loss * log_sum[:, None]
        if torch.compiler.is_compiling():  # elementwise, so that it is fused with the passes around it
            is_target = torch.arange(scores.shape[-1], device=scores.device) == index  # (chunk, vocabulary)
            gradient += at_target * (is_target & is_local[:, None])
        else:
            gradient.scatter_add_(1, index, at_target * is_local[:, None].to(scores.dtype))
        if smoothing:
            gradient -= smoothing / size
        if weights is not None:
            gradient *= weights[:, None]
        return loss, gradient


def log_softmax(
    scores: torch.Tensor, group: dist.ProcessGroup | None, with_log_sum: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities (chunk, this rank's vocabulary), and the log of the softmax denominator (chunk,).

    The softmax is over the vocabulary of all ranks of `group` (None: not sharded). The second result is None unless
    `with_log_sum`.
    """
    if group is None:
        return scores.log_softmax(-1), scores.logsumexp(-1) if with_log_sum else None
    local = scores.logsumexp(-1)  # (chunk,)
    largest = local.clone()  # subtracted before exp, so that it cannot overflow
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total = (local - largest).exp_()
    dist.all_reduce(total, group=group)
    log_sum = largest + total.log_()
    return scores - log_sum[:, None], log_sum if with_log_sum else None


def log_mass_of_others(
    log_p: torch.Tensor, index: torch.Tensor, is_local: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Set the log-probabilities of the given tokens to -inf in place, and return the log of the others' sum, (tokens,).

    Unlike 1 - the sum of the given ones, it is exact for a sum near 0.
    """
    excluded = torch.full_like(log_p[:, :1], torch.inf).expand(index.shape).where(~is_local, -torch.inf)
    log_p.scatter_reduce_(1, index, excluded, "amin")  # entries of other ranks' tokens stay as they are
    local = log_p.logsumexp(-1)
    if group is None:
        return local
    largest = local.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    largest = largest.where(largest > -torch.inf, 0)  # there are no other tokens
    return largest + sum_over_shards((local - largest).exp_(), group).log_()


def upcast(logits: torch.Tensor) -> torch.Tensor:
    """Return float64 logits as they are, and all others in float32: losses need at least that precision."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def sum_over_shards(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-reduce values over `group` in place if it is given, and return them."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


class NextToken(TokenObjective):
    """Mean cross-entropy of target tokens, with the config's label smoothing and z-loss.

    Evaluation uses the plain cross-entropy, `PLAIN`.
    """

    def __init__(self, cfg: NextTokenConfig | None = None) -> None:
        """Create the objective; `cfg` None: without label smoothing and z-loss."""
        self.token_loss = CrossEntropy() if cfg is None else CrossEntropy(cfg.label_smoothing, cfg.z_loss)


PLAIN = NextToken()
"""Cross-entropy of target tokens without label smoothing and z-loss."""


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
        self.add_sums(*(metric.where(is_real, 0).sum() for metric in metrics))
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
