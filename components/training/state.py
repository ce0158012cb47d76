"""Counters of a run, saved with every checkpoint, the timer of time-based saves, and the metrics of a step.

Metrics are copied to the host asynchronously and read a fixed number of steps later on every rank.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from components.config.schema.training import TrainingConfig
from components.protocol.failures import StatedFailure

FIELDS = ("loss", "grad_norm", "tokens", "skipped", "preempt", "interrupt", "save", "seconds_at_peak")
"""First elements of a step's vector, in this order; the metrics of the objective follow."""
_REWARD = "reward"
"""Name under which a recipe logs the mean reward of a step's answers (run.log)."""


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
    """Steps whose update was skipped because the gradients were not finite, or because of training.skip_spikes."""
    spikes: int = 0
    """Those of them that were spikes."""
    skipped_in_a_row: int = 0
    """Consecutive skipped steps up to the last recorded one."""
    first_loss: float | None = None
    """Loss of the first step."""
    last_loss: float | None = None
    """Loss of the last recorded step."""
    first_eval_loss: float | None = None
    """Held-out loss before the first step; None if it was not evaluated."""
    first_reward: float | None = None
    """Mean reward of the first step that logged one; None without rewards, as the other rewards."""
    last_reward: float | None = None
    """Mean reward of the last recorded step that logged one."""
    first_eval_reward: float | None = None
    """Held-out reward before the first step."""
    optimizer: str | None = None
    """Class names of the optimizers, for the model card; None before the run begins."""
    attention_kernel: str | None = None
    """Attention kernel chosen by measurement, which a resumed run keeps; None: none was measured."""
    best_eval_loss: float | None = None
    """Lowest held-out loss that counted as an improvement; only with training.early_stop_patience."""
    best_eval_reward: float | None = None
    """Highest held-out reward that counted as one; only with training.early_stop_patience."""
    evals_without_improvement: int = 0
    """Consecutive scheduled evaluations without an improvement; only with training.early_stop_patience."""
    counted_eval_step: int = -1
    """Step of the last evaluation that was counted; a resumed run evaluates the same step again."""

    def count_eval(self, eval_loss: float | None, min_delta: float, eval_reward: float | None = None) -> None:
        """Count an evaluation after the current step towards training.early_stop_patience, once per step.

        A higher reward or, without rewards, a lower loss is an improvement. Without either, the evaluation was stopped,
        and does not count.
        """
        has_reward = eval_reward is not None
        value, best = (eval_reward, self.best_eval_reward) if has_reward else (eval_loss, self.best_eval_loss)
        if value is None or self.step <= self.counted_eval_step:
            return
        self.counted_eval_step = self.step
        sign = 1 if has_reward else -1
        if not math.isfinite(value) or (best is not None and sign * value <= sign * best + min_delta):
            self.evals_without_improvement += 1
            return
        self.evals_without_improvement = 0
        if has_reward:
            self.best_eval_reward = value
        else:
            self.best_eval_loss = value

    def begin(self, eval_loss: float | None, eval_reward: float | None = None) -> None:
        """Set the first held-out numbers if no step was done yet, that is unless the attempt resumed."""
        if self.step == 0:
            self.first_eval_loss, self.first_eval_reward = eval_loss, eval_reward

    def record(self, metrics: StepMetrics) -> None:
        """Add the metrics of a step to the counters."""
        self.tokens += metrics.tokens
        self.skipped += metrics.skipped
        self.spikes += metrics.is_spike
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics.skipped else 0
        self.last_loss = metrics.loss
        if self.first_loss is None:
            self.first_loss = metrics.loss
        if metrics.reward is not None:
            self.last_reward = metrics.reward
            if self.first_reward is None:
                self.first_reward = metrics.reward

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
        spikes = "" if policy.skip_spikes is None else f" or were spikes (training.skip_spikes={policy.skip_spikes:g})"
        raise NonFiniteGradients(
            f"the gradients of {count} steps in a row, up to step {metrics.step}, were not finite{spikes}, and their "
            f"updates were skipped: the weights are still those of step {since}; inspect the data of these steps, "
            "lower optimizer.lr, or resume from an older checkpoint (run.resume=PATH); the run ends after "
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


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Metrics of a step on the device, the same on every rank."""

    vector: torch.Tensor  # (fields,) float64
    names: tuple[str, ...] = FIELDS

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one metric, a scalar on the device."""
        return self.vector[self.names.index(name)]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one optimizer step on the host."""

    step: int
    """Number of the optimizer step, starting at 1."""
    loss: float
    """Mean loss over the units of the global batch: the value whose gradient was applied."""
    grad_norm: float
    """Global norm of the gradients before clipping."""
    tokens: int
    """Target tokens of the step, summed over all ranks; of a score head all tokens of its inputs."""
    seconds: float
    """Host time of the step, including data loading; in steady state equal to the device time."""
    skipped: bool
    """The update was skipped because the gradients were not finite, or because the step is a spike."""
    preempt: bool
    """Some rank received a preemption signal (SIGTERM, SIGUSR2, SIGHUP)."""
    interrupt: bool
    """Some rank was interrupted (Ctrl-C)."""
    must_save: bool
    """A time-based save is due on some rank; the same on every rank."""
    seconds_at_peak: float = 0.0
    """Time the step would take at the devices' peak FLOP/s; divided by `seconds` it is the MFU. 0: unknown."""
    is_spike: bool = False
    """The update was skipped because of training.skip_spikes."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the objective and values logged by the recipe, by name, without the reward."""
    reward: float | None = None
    """Mean reward of the step's answers, which the recipe logged; None if it logged none. A metric of the objective
    with the name `reward` is among the others."""

    @property
    def must_stop(self) -> bool:
        """Whether any rank has a stop request; the same on every rank."""
        return self.preempt or self.interrupt


class HostCopy:
    """Copy of a tensor on the host, made on construction; from a GPU asynchronously, to pinned memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            copy = tensor.clone()  # the recipe may change a logged tensor in place before it is read
        self._tensor = copy

    def read(self) -> torch.Tensor:
        """Wait for the copy and return the tensor on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


class StepReader:
    """Queue that returns a step's metrics on the host `lag` steps later.

    The copy to pinned memory starts immediately and is read one or more steps later, when it has long completed, so
    the host does not wait. The lag is fixed rather than "when ready", so that all ranks read the same metrics at the
    same step and stop together.
    """

    def __init__(self, lag: int = 1) -> None:
        self.lag = lag
        self._waited = 0.0  # seconds spent in `flush`; part of the next step's time, like the wait in `push`
        self._pending: deque[_Pending] = deque()
        self._logged: dict[str, HostCopy | float] = {}

    def log(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Add values to the step that is pushed next; device scalars are copied asynchronously like its metrics."""
        for name, value in values.items():
            self._logged[name] = HostCopy(value.detach()) if isinstance(value, torch.Tensor) else float(value)

    def push(self, step: int, numbers: StepNumbers, began: float, drain: bool = False) -> list[StepMetrics]:
        """Start the copy of a step's metrics, and return those of step `step - lag` if there is one.

        Raises ValueError if a logged value has the name of one of the step's metrics, which it would replace.

        Args:
            began: `time.perf_counter()` at the start of the step.
            drain: Wait for the device and return this step's metrics too, after those still pending. Used before an
                evaluation or a save.
        """
        metrics = [name for name in numbers.names if name not in FIELDS]
        if taken := [name for name in metrics if name in self._logged]:
            raise ValueError(
                f"run.log(step, {taken[0]}=...): {taken[0]} is a metric of the objective or the model; choose another "
                f"name than {', '.join(metrics)}"
            )
        copy, logged = HostCopy(numbers.vector), self._logged
        arrived = [self._pop()] if 0 < self.lag == len(self._pending) else []  # the host may wait here
        seconds = time.perf_counter() - began + self._waited
        self._pending.append(_Pending(step, copy, numbers.names, logged, seconds))
        self._waited, self._logged = 0.0, {}
        return [*arrived, *self.flush()] if drain or not self.lag else arrived

    def flush(self) -> list[StepMetrics]:
        """Wait for the device and return the metrics of all pending steps."""
        began = time.perf_counter()
        arrived = [self._pop() for _ in range(len(self._pending))]
        self._waited += time.perf_counter() - began
        return arrived

    def _pop(self) -> StepMetrics:
        pending = self._pending.popleft()
        values = dict(zip(pending.names, pending.copy.read().tolist(), strict=True))
        logged = {
            name: float(value.read()) if isinstance(value, HostCopy) else value
            for name, value in pending.logged.items()
        }
        reward = logged.pop(_REWARD, None)
        return StepMetrics(
            step=pending.step,
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            tokens=int(values["tokens"]),
            seconds=pending.seconds,
            skipped=values["skipped"] > 0,
            preempt=values["preempt"] > 0,
            interrupt=values["interrupt"] > 0,
            must_save=values["save"] > 0,
            seconds_at_peak=values["seconds_at_peak"],
            is_spike=values["skipped"] > 1,
            others={name: values[name] for name in pending.names if name not in FIELDS} | logged,
            reward=reward,
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step whose metrics have not been read yet."""

    step: int
    copy: HostCopy
    names: tuple[str, ...]
    logged: Mapping[str, HostCopy | float]
    seconds: float
