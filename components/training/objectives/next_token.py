"""Cross-entropy of the next token: pretraining and supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from components.training.loss import count_targets, token_loss_sum

if TYPE_CHECKING:
    from components.config.schema.objective import NextTokenConfig


@dataclass(frozen=True, slots=True)
class NextToken:
    """The sum over target tokens of their cross-entropies.

    With label smoothing (Szegedy et al. 2016) a share of each target is spread evenly over the vocabulary; the z-loss
    (Chowdhery et al. 2022) adds a multiple of the squared log of the softmax's denominator, which keeps logits small.
    Evaluation uses neither.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @classmethod
    def of(cls, cfg: NextTokenConfig) -> NextToken:
        """Return the objective of a config."""
        return cls(cfg.label_smoothing, cfg.z_loss)

    @property
    def unit(self) -> str:
        """What is counted."""
        return "token"

    def count(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the number of targets (batch, seq) that are not ignored, a float64 scalar."""
        return count_targets(targets)

    def loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of logits (batch, seq, vocabulary): see `token_loss_sum`."""
        return token_loss_sum(logits, targets, self.label_smoothing, self.z_loss)
