"""The contract between an objective and the training step."""

from __future__ import annotations

from typing import Protocol

import torch


class Objective(Protocol):
    """A loss that is a sum over units, divided once by their number in the whole optimizer step.

    The sum and the number are taken over every micro-batch and every rank, so that the same samples give the same loss
    on every mesh. The chunked head computes `label_smoothing` and `z_loss` itself, from some of the logits at a time;
    a head that returns logits is followed by `loss_sum`.
    """

    @property
    def unit(self) -> str:
        """What is counted: token."""

    @property
    def label_smoothing(self) -> float:
        """Share of each target that is spread evenly over the vocabulary."""

    @property
    def z_loss(self) -> float:
        """Factor of the squared log of the softmax's denominator."""

    def count(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the number of units in targets (batch, seq), a float64 scalar on their device."""

    def loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of logits (batch, seq, vocabulary), a scalar in float32 or float64."""
