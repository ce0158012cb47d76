"""Cross-entropy of target tokens, with label smoothing and z-loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.nn.functional as F

from components.config.schema.data import IGNORED
from components.training.objectives.contract import Vocabulary


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Negative log-probability of each target.

    Label smoothing (Szegedy et al. 2016) spreads a share of each target's probability evenly over the vocabulary. The
    z-loss (Chowdhery et al. 2022) adds a multiple of the squared log of the softmax denominator, which keeps logits
    small.
    """

    label_smoothing: float = 0.0
    """Share of each target's probability that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax denominator."""

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of logits (batch, seq, vocabulary): see `TokenLoss`."""
        if weights is not None:
            losses = self.per_token(logits, targets)
            return (losses * weights.to(losses.dtype)).sum()
        scores, ids = upcast(logits).flatten(0, 1), targets.flatten()  # (tokens, vocabulary), (tokens,)
        smoothing = self.label_smoothing
        loss = F.cross_entropy(scores, ids, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
        if self.z_loss:
            loss = loss + self.z_loss * (scores.logsumexp(-1).square() * (ids != IGNORED)).sum()
        return loss

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the losses (batch, seq) of logits (batch, seq, vocabulary); 0 where the target is ignored."""
        scores, ids = upcast(logits).flatten(0, 1), targets.flatten()
        smoothing = self.label_smoothing
        losses = F.cross_entropy(scores, ids, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
        if self.z_loss:
            losses = losses + self.z_loss * scores.logsumexp(-1).square() * (ids != IGNORED)
        return losses.view(targets.shape)

    def of_chunk(
        self,
        scores: torch.Tensor,
        targets: torch.Tensor,
        vocabulary: Vocabulary,
        weights: torch.Tensor | None,
        values: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        per_token: bool,
        with_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss sum of a chunk of tokens and its gradient: see `TokenLoss`."""
        log_probs, log_sum = log_softmax(scores, vocabulary.group, bool(self.z_loss))
        index, is_real = targets - vocabulary.first, targets != IGNORED
        is_local = is_real & (index >= 0) & (index < scores.shape[-1])
        index = index.clamp(0, scores.shape[-1] - 1)[:, None]  # (chunk, 1)
        smoothing, size = self.label_smoothing, vocabulary.size or scores.shape[-1]
        target_terms = log_probs.gather(1, index)[:, 0].where(is_local, 0)  # (chunk,)
        if smoothing:
            target_terms = (1 - smoothing) * target_terms + smoothing / size * log_probs.sum(-1) * is_real
        z_terms = None if log_sum is None else self.z_loss * log_sum.square() * is_real  # (chunk,)
        if weights is not None:
            target_terms = target_terms * weights
            z_terms = None if z_terms is None else z_terms * weights
        if not per_token:
            target_terms, z_terms = target_terms.sum(), None if z_terms is None else z_terms.sum()
        if vocabulary.group is not None:
            dist.all_reduce(target_terms, group=vocabulary.group)
        loss = -target_terms if z_terms is None else z_terms - target_terms
        if not with_gradient:
            return loss, None
        gradient = log_probs.exp_()
        if log_sum is not None:
            gradient *= 1 + 2 * self.z_loss * log_sum[:, None]
        if torch.compiler.is_compiling():  # elementwise, so that it is fused with the passes around it
            is_target = torch.arange(scores.shape[-1], device=scores.device) == index  # (chunk, vocabulary)
            gradient += (smoothing - 1) * (is_target & is_local[:, None])
        else:
            gradient.scatter_add_(1, index, (smoothing - 1) * is_local[:, None].to(scores.dtype))
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


def upcast(logits: torch.Tensor) -> torch.Tensor:
    """Return float64 logits as they are, and all others in float32: losses need at least that precision."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
