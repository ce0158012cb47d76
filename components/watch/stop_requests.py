"""Requests to save and stop: signals of this process, and the agreement of all ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from components.protocol.processes import (
    CTRL_C_MESSAGE,
    LAUNCHER_PID,
    STOP_SIGNALS,
    RecordedSignals,
    current_rank,
    set_handler,
)


class StopRequest:
    """Context that handles stop signals, and brings all ranks to the same decision to save and stop.

    SIGTERM, SIGUSR2 and SIGHUP request preemption, the first Ctrl-C an interruption; a second Ctrl-C aborts at once.
    The previous handlers are restored on exit. Training steps sum `flags` over all ranks at their end and pass the
    result to `update`; evaluation and generation call `agreed` before each batch or token.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Prepare the request; `device` is the device of the flags' all-reduce (None: the CPU)."""
        self._device = device or torch.device("cpu")
        self.flags = torch.zeros(3, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        """This rank's (preempt, interrupt, save) requests as 0 or 1; a signal sets its own at any moment."""
        self.status = "ok"
        """ok, or preempted or interrupted once all ranks have agreed; the same on every rank."""
        self._values = self.flags.numpy()  # a handler may run below a torch mode that would intercept tensor operations
        self._interrupted = False
        self._reduction: _FlagReduction | None = None
        self._listener = _SignalListener(self._request)
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for signal_number in (*STOP_SIGNALS, signal.SIGINT):
            previous = self._previous[signal_number] = set_handler(signal_number, self._handle)
            for arrived in (
                previous.arrived if isinstance(previous, RecordedSignals) else ()
            ):  # signals before this context
                if arrived == signal_number:
                    self._handle(signal_number, None)
        self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.stop()
        for signal_number, handler in self._previous.items():
            signal.signal(signal_number, handler)

    @property
    def stopped(self) -> bool:
        """Whether all ranks have agreed to stop; the same on every rank."""
        return self.status != "ok"

    def update(self, steps: Iterable[tuple[bool, bool]]) -> bool:
        """Record the (preempt, interrupt) requests of steps, reduced over all ranks; return whether the run stops."""
        for preempt, interrupt in steps:
            self._record(preempt, interrupt)
        return self.stopped

    def agreed(self, *, wait: bool = False) -> bool:
        """Return whether any rank has a request to stop, the same on every rank. A collective: call it on all ranks.

        On GPUs the result is one call late, so that the host does not wait for the device: each call starts an
        all-reduce, and reads the one started by the previous call.

        Args:
            wait: Wait for the device, for the result of this call.
        """
        if not self.stopped:
            started = _FlagReduction(self.flags, self._device)
            late, self._reduction = self._reduction, started if started.is_late and not wait else None
            if late is not None:
                self._record(*late.read())
            if self._reduction is None or self.stopped:  # if it stops, leave no collective unfinished
                self._record(*started.read())
        return self.stopped

    def _record(self, preempt: bool, interrupt: bool) -> None:
        if not self.stopped and (preempt or interrupt):
            self.status = "preempted" if preempt else "interrupted"

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        self._request(signal_number)
        if signal_number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

    def _request(self, signal_number: int) -> None:
        if signal_number in (*STOP_SIGNALS, signal.SIGINT):
            self._values[int(signal_number == signal.SIGINT)] = 1


class _FlagReduction:
    """All-reduce of (preempt, interrupt), on a GPU asynchronous and followed by a copy to the host."""

    def __init__(self, flags: torch.Tensor, device: torch.device) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._host = vector = flags[:2].to(device if several else "cpu", non_blocking=True, copy=True)
        self.is_late = vector.is_cuda
        """Whether the result is to be read later, since the device has other work before it."""
        if several:
            dist.all_reduce(vector, async_op=True).wait()  # on a GPU the stream waits for the all-reduce, not the host
        if vector.is_cuda:
            self._host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[bool, bool]:
        """Wait for the result, and return whether any rank has a request to preempt, or to interrupt."""
        if self.is_late:
            self._event.synchronize()
        preempt, interrupt = self._host.tolist()
        return preempt > 0, interrupt > 0


class _SignalListener:
    """Thread that calls a function with the number of each signal, and acknowledges Ctrl-C on the terminal, at once.

    Python runs signal handlers only between two bytecodes of the main thread, so they run after the current backward,
    collective or wait for the device. A rank under Meshbook's launcher does not acknowledge, since the launcher does.
    """

    def __init__(self, request: Callable[[int], None]) -> None:
        self._request = request
        self._acknowledges = False
        self._pipe: tuple[int, int] | None = None
        self._previous = -1
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._acknowledges = LAUNCHER_PID not in os.environ and current_rank(os.environ) == 0
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._previous = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and restore the previous wake-up descriptor."""
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._previous)
        os.close(self._pipe[1])
        self._thread.join()
        os.close(self._pipe[0])
        self._pipe = None

    def _listen(self) -> None:
        reader = self._pipe[0] if self._pipe else -1
        while signal_number := os.read(reader, 1):
            self._request(signal_number[0])
            if signal_number[0] == signal.SIGINT and self._acknowledges:
                self._acknowledges = False
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, f"\n{CTRL_C_MESSAGE}\n".encode())
