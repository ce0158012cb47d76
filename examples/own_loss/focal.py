"""Focal loss (Lin et al. 2017): targets that the model already predicts well count less."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
class FocalLoss(training.TokenLoss):
    """(1 - p)^gamma x -log p for each target of probability p: computed from the cross-entropy."""

    gamma: float

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the losses (batch, seq); 0 where the target is ignored."""
        return self._focus(training.CrossEntropy().per_token(logits, targets))[0]

    def of_chunk(self, chunk: training.Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss of a chunk of logits, and its gradient by the chain rule."""
        nll, gradient = training.CrossEntropy().of_chunk(replace(chunk, weights=None, per_token=True))
        losses, slope = self._focus(nll)  # (tokens,), (tokens,)
        if chunk.weights is not None:
            losses, slope = losses * chunk.weights, slope * chunk.weights
        return losses if chunk.per_token else losses.sum(), None if gradient is None else gradient * slope[:, None]

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
