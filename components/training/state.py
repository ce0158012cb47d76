"""Counters of a run, saved with every checkpoint, and the timer of time-based saves."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from components.config.schema.training import TrainingConfig
from components.protocol.failures import StatedFailure
from components.training.metrics import StepMetrics


class NonFiniteGradients(StatedFailure, FloatingPointError):
    """Failure of a run whose gradients were not finite in too many consecutive steps."""


@dataclass(slots=True)
class TrainState:
    """Counters of a run; saved with every checkpoint."""

    step: int = 0
    """Optimizer steps completed."""
    tokens: int = 0
    """Target tokens of the recorded steps; with a score head all tokens of its inputs."""
    skipped: int = 0
    """Steps whose update was skipped because the gradients were not finite."""
    skipped_in_a_row: int = 0
    """Consecutive skipped steps up to the last recorded one."""
    first_loss: float | None = None
    """Loss of the first step."""
    last_loss: float | None = None
    """Loss of the last recorded step."""
    first_eval_loss: float | None = None
    """Held-out loss before the first step; None if it was not evaluated."""
    optimizer: str | None = None
    """Class name of the optimizer, for the model card; None in checkpoints of earlier versions."""
    attention_kernel: str | None = None
    """Attention kernel chosen by measurement, which a resumed run keeps; None: none was measured."""
    best_eval_loss: float | None = None
    """Lowest held-out loss that counted as an improvement; only with training.early_stop_patience."""
    evals_without_improvement: int = 0
    """Consecutive scheduled evaluations without an improvement; only with training.early_stop_patience."""
    counted_eval_step: int = -1
    """Step of the last evaluation that was counted; a resumed run evaluates the same step again."""

    def count_eval(self, eval_loss: float | None, min_delta: float) -> None:
        """Count an evaluation after the current step towards training.early_stop_patience, once per step."""
        if eval_loss is None or self.step <= self.counted_eval_step:
            return
        self.counted_eval_step = self.step
        if math.isfinite(eval_loss) and (self.best_eval_loss is None or eval_loss < self.best_eval_loss - min_delta):
            self.best_eval_loss, self.evals_without_improvement = eval_loss, 0
        else:
            self.evals_without_improvement += 1

    def begin(self, eval_loss: float | None) -> None:
        """Set `first_eval_loss` if no step was done yet, that is unless the attempt resumed from a checkpoint."""
        if self.step == 0:
            self.first_eval_loss = eval_loss

    def record(self, metrics: StepMetrics) -> None:
        """Add the metrics of a step to the counters."""
        self.tokens += metrics.tokens
        self.skipped += metrics.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics.skipped else 0
        self.last_loss = metrics.loss
        if self.first_loss is None:
            self.first_loss = metrics.loss

    def raise_if_diverged(self, metrics: StepMetrics, policy: TrainingConfig) -> None:
        """Raise NonFiniteGradients if `training.stop_after_skipped` consecutive updates were skipped.

        Every rank raises it at the same step. No checkpoint is saved: its weights would be at most a few good steps
        newer than the last one, and the retention policy could delete a checkpoint from before the divergence for it.

        Args:
            metrics: The step recorded last.
        """
        count = self.skipped_in_a_row
        if not 0 < policy.stop_after_skipped <= count:
            return
        since = metrics.step - count
        raise NonFiniteGradients(
            f"the gradients of {count} steps in a row, up to step {metrics.step}, were not finite, and their updates "
            f"were skipped: the weights are still those of step {since}; inspect the data of these steps, lower "
            "optimizer.lr, or resume from an older checkpoint (run.resume=PATH); the run ends after "
            f"training.stop_after_skipped={policy.stop_after_skipped} such steps (0: never)"
        )

    def raise_if_none_finite(self) -> None:
        """Raise NonFiniteGradients if the run is complete and none of its updates was applied."""
        if self.step and self.skipped >= self.step:
            raise NonFiniteGradients(
                f"the gradients of all {self.step} steps were not finite (last loss: {self.last_loss}), and their "
                "updates were skipped: nothing was trained, and nothing is saved or exported; inspect the data and the "
                "weights of model.path, or lower optimizer.lr"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Rebuild the counters that `to_dict` returned."""
        return cls(**values)


class SaveClock:
    """Timer of time-based saves. Each rank has its own; a save happens once the reduced flag of any rank is set."""

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self.restart()

    def restart(self) -> None:
        """Restart the timer after a save."""
        self._since = time.monotonic()

    def due(self) -> float:
        """Return 1 if `minutes` have passed since the last save, else 0, for the all-reduce of every step.

        With `minutes` 0 the result is always 0.
        """
        return float(0 < self._seconds <= time.monotonic() - self._since)
