"""Step metrics, copied to the host asynchronously and read a fixed number of steps later on every rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

FIELDS = ("loss", "grad_norm", "tokens", "skipped", "preempt", "interrupt", "save", "seconds_at_peak")
"""First elements of a step's vector, in this order; the metrics of the objective follow."""


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
    """The update was skipped because the gradients were not finite."""
    preempt: bool
    """Some rank received a preemption signal (SIGTERM, SIGUSR2, SIGHUP)."""
    interrupt: bool
    """Some rank was interrupted (Ctrl-C)."""
    must_save: bool
    """A time-based save is due on some rank; the same on every rank."""
    seconds_at_peak: float = 0.0
    """Time the step would take at the devices' peak FLOP/s; divided by `seconds` it is the MFU. 0: unknown."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the objective and values logged by the recipe, by name."""

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

        Args:
            began: `time.perf_counter()` at the start of the step.
            drain: Wait for the device and return this step's metrics too, after those still pending. Used before an
                evaluation or a save.
        """
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
    """A step whose metrics have not been read yet."""

    step: int
    copy: HostCopy
    names: tuple[str, ...]
    logged: Mapping[str, HostCopy | float]
    seconds: float
