"""The numbers of a step, read by the host a fixed number of steps later on every rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

FIELDS = ("loss", "grad_norm", "tokens", "skipped", "preempt", "interrupt", "save", "seconds_at_peak")
"""What a step's vector begins with, in this order; the metrics of its objective follow."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers of a step, still on the device; equal on every rank."""

    vector: torch.Tensor  # (fields,) float64
    names: tuple[str, ...] = FIELDS

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one number, a scalar on the device."""
        return self.vector[self.names.index(name)]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step as the host sees it."""

    step: int
    """Optimizer step, the first is 1."""
    loss: float
    """Mean loss over the units of the whole step: the number that was optimized."""
    grad_norm: float
    """Global norm of the gradients before clipping."""
    tokens: int
    """Target tokens of the step, over all ranks."""
    seconds: float
    """Time that the host took for the step, its data included; in a steady state the device's time too."""
    skipped: bool
    """The update was skipped because the gradients were not finite."""
    preempt: bool
    """A rank was told to save and leave (SIGTERM, SIGUSR2)."""
    interrupt: bool
    """A rank was interrupted (Ctrl-C)."""
    must_save: bool
    """A rank's clock said that a save is due; equal on every rank."""
    seconds_at_peak: float = 0.0
    """Time that all devices would take for the step at their peak; over `seconds` it is the MFU. 0: not known."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the objective, and what the recipe logged of this step, by name."""

    @property
    def must_stop(self) -> bool:
        """Whether any rank was asked to stop; equal on every rank."""
        return self.preempt or self.interrupt


class HostCopy:
    """A copy of a device tensor on its way to the host, started at once and read when the device has long passed it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
            tensor = copy
        self._tensor = tensor

    def read(self) -> torch.Tensor:
        """Return the tensor on the host, waiting for the copy if it is not there yet."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


class StepReader:
    """Hands a step's numbers to the host `lag` steps after it was made.

    The copy to pinned memory starts at once and is read when the device has long passed it, so that the host does not
    wait. The lag is fixed, never "when ready": all ranks learn the same thing at the same step, and stop together.
    """

    def __init__(self, lag: int = 1) -> None:
        self.lag = lag
        self._waited = 0.0  # for steps that were drained: the next step's, as its wait for the one before would be
        self._pending: deque[_Pending] = deque()
        self._logged: dict[str, HostCopy | float] = {}

    def log(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Keep values of the step that is pushed next, to be read with its numbers; scalars of a device do not wait."""
        for name, value in values.items():
            self._logged[name] = HostCopy(value.detach()) if isinstance(value, torch.Tensor) else float(value)

    def push(self, step: int, numbers: StepNumbers, began: float, drain: bool = False) -> list[StepMetrics]:
        """Start the copy of a step's numbers and return what has arrived: step `step - lag`, if there is one.

        Args:
            began: `time.perf_counter()` when the step began.
            drain: Wait for the device and return this step too, before an evaluation or a save. Asked for at every
                step, it hands out every step: a request to stop reaches the loop whatever is due.
        """
        copy, logged = HostCopy(numbers.vector), self._logged
        arrived = [self._pop()] if len(self._pending) == self.lag else []  # here the host waits for the device
        seconds = time.perf_counter() - began + self._waited
        self._pending.append(_Pending(step, copy, numbers.names, logged, seconds))
        self._waited, self._logged = 0.0, {}
        return [*arrived, *self.flush()] if drain else arrived

    def flush(self) -> list[StepMetrics]:
        """Wait for the device and return the metrics of every step not yet read."""
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
            others={name: values[name] for name in pending.names if name not in FIELDS} | logged,
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step whose numbers are on their way."""

    step: int
    copy: HostCopy
    names: tuple[str, ...]
    logged: Mapping[str, HostCopy | float]
    seconds: float
