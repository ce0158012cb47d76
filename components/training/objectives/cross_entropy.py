"""Cross-entropy of target tokens, with label smoothing and z-loss, for pretraining and supervised fine-tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from components.config.schema.data import IGNORED
from components.config.schema.objective import NextTokenConfig
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
