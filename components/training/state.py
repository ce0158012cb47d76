"""Counters of a run, saved with every checkpoint, and the time since its last save."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from components.config.schema.training import TrainingConfig
from components.training.metrics import StepMetrics


class NonFiniteGradients(FloatingPointError):
    """The gradients of too many steps in a row were not finite."""


@dataclass(slots=True)
class TrainState:
    """Counters of a run; saved with every checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Target tokens seen in them."""
    skipped: int = 0
    """Steps whose update was skipped because the gradients were not finite."""
    skipped_in_a_row: int = 0
    """How many of them were the last steps of all, one after the other."""
    first_loss: float | None = None
    """Loss of the first step."""
    last_loss: float | None = None
    """Loss of the last step that was read."""
    first_eval_loss: float | None = None
    """Held-out loss before the first step; None: not known."""
    optimizer: str | None = None
    """Class of the optimizer that ran, for the model card; None in checkpoints of earlier versions."""

    def begin(self, eval_loss: float | None) -> None:
        """Take the held-out loss with which an attempt begins: the run's first, unless it goes on; None: unknown."""
        if self.step == 0:
            self.first_eval_loss = eval_loss

    def record(self, metrics: StepMetrics) -> None:
        """Count a step whose numbers have arrived."""
        self.tokens += metrics.tokens
        self.skipped += metrics.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics.skipped else 0
        self.last_loss = metrics.loss
        if self.first_loss is None:
            self.first_loss = metrics.loss

    def refuse_to_diverge(self, metrics: StepMetrics, policy: TrainingConfig) -> None:
        """Raise NonFiniteGradients where `metrics`, recorded last, completes `training.stop_after_skipped` skips.

        Every rank raises it at the same step. Nothing is saved then: the weights are those of the last save or a few
        good steps younger, and a checkpoint of them could push out one from before they went astray.
        """
        count = self.skipped_in_a_row
        if not 0 < policy.stop_after_skipped <= count:
            return
        since = metrics.step - count
        raise NonFiniteGradients(
            f"the gradients of {count} steps in a row, up to step {metrics.step}, were not finite, and none was "
            f"applied: the weights are still those of step {since}; look at the data of these steps, lower "
            "optimizer.lr, or go on from an older checkpoint (run.resume=PATH); "
            f"training.stop_after_skipped={policy.stop_after_skipped} is how many such steps end the run (0: none)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Rebuild the counters that `to_dict` returned."""
        return cls(**values)


class SaveClock:
    """Says when a save is due by time. Each rank has its own: what one of them says holds once all have summed it."""

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self.restart()

    def restart(self) -> None:
        """Count from now on: something was saved."""
        self._since = time.monotonic()

    def due(self) -> float:
        """Return 1 where `minutes` have passed since the last save (never for 0), for the sum that every step does."""
        return float(0 < self._seconds <= time.monotonic() - self._since)
