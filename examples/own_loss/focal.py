"""Focal loss (Lin et al. 2017): targets that the model already predicts well count less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from meshbook import ConfigError, FinetuneConfig, training


@dataclass(kw_only=True, slots=True)
class FocalConfig:
    """Section `focal` of the config."""

    gamma: float = 2.0
    """How strongly easy targets are weighted down, at least 1; the loss is (1 - p)^gamma x -log p."""

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ConfigError(f"focal.gamma={self.gamma}: must be at least 1")


@dataclass(kw_only=True, slots=True)
class FocalFinetuneConfig(FinetuneConfig):
    """Config of `recipes/finetune.py` with the section `focal`."""

    focal: FocalConfig = field(default_factory=FocalConfig)


@dataclass(frozen=True, slots=True)
class FocalLoss:
    """(1 - p)^gamma x -log p for each target of probability p: a `TokenLoss` computed from the cross-entropy."""

    gamma: float

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of logits (batch, seq, vocabulary)."""
        losses = self.per_token(logits, targets)  # (batch, seq)
        return (losses if weights is None else losses * weights).sum()

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the losses (batch, seq); 0 where the target is ignored."""
        return self._focus(training.CrossEntropy().per_token(logits, targets))[0]

    def of_chunk(
        self,
        scores: torch.Tensor,
        targets: torch.Tensor,
        vocabulary: training.Vocabulary,
        weights: torch.Tensor | None,
        values: Mapping[str, torch.Tensor],
        *,
        per_token: bool,
        with_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss of a chunk of logits (chunk, this rank's vocabulary), and its gradient by the chain rule."""
        nll, gradient = training.CrossEntropy().of_chunk(
            scores, targets, vocabulary, None, values, per_token=True, with_gradient=with_gradient
        )
        losses, slope = self._focus(nll)  # (chunk,), (chunk,)
        if weights is not None:
            losses, slope = losses * weights, slope * weights
        return losses if per_token else losses.sum(), None if gradient is None else gradient * slope[:, None]

    def _focus(self, nll: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of negative log-probabilities, and their derivatives by them; both of the same shape."""
        p = torch.exp(-nll)
        rest = 1 - p
        return rest**self.gamma * nll, rest**self.gamma + self.gamma * rest ** (self.gamma - 1) * p * nll


class Focal(training.NextToken):
    """Mean focal loss of the target tokens. `NextToken` counts them; evaluation keeps the plain cross-entropy."""

    def __init__(self, cfg: FocalConfig) -> None:
        super().__init__()
        self.token_loss = FocalLoss(cfg.gamma)
