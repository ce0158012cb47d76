"""Requests to save and stop: signals of this process, and the agreement of all ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from components.protocol.role import LAUNCHER_PID, current_rank
from components.protocol.signals import CTRL_C_MESSAGE, STOP_SIGNALS, RecordedSignals
from components.training.metrics import StepMetrics


class StopRequest:
    """Context that handles stop signals, and brings all ranks to the same decision to save and stop.

    SIGTERM and SIGUSR2 request preemption, the first Ctrl-C an interruption; a second Ctrl-C aborts at once. The
    previous handlers are restored on exit. Training steps reduce the request together with their numbers (`flags`,
    `update`); evaluation and generation call `agreed` before each batch or token.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Prepare the request; `device` is the device of the flags' all-reduce (None: the CPU)."""
        self.preempt = False
        self.interrupt = False
        self.status = "ok"
        """ok, or preempted or interrupted once all ranks have agreed; the same on every rank."""
        self._device = device or torch.device("cpu")
        self._reduction: _FlagReduction | None = None
        self._ctrl_c = _CtrlCResponder()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for signal_number in (*STOP_SIGNALS, signal.SIGINT):
            previous = self._previous[signal_number] = signal.signal(signal_number, self._handle)
            for arrived in (
                previous.arrived if isinstance(previous, RecordedSignals) else ()
            ):  # signals before this context
                if arrived == signal_number:
                    self._handle(signal_number, None)
        self._ctrl_c.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ctrl_c.stop()
        for signal_number, handler in self._previous.items():
            signal.signal(signal_number, handler)

    @property
    def stopped(self) -> bool:
        """Whether all ranks have agreed to stop; the same on every rank."""
        return self.status != "ok"

    def flags(self) -> tuple[float, float]:
        """Return this rank's (preempt, interrupt) as numbers, for the all-reduce of every training step."""
        return float(self.preempt), float(self.interrupt)

    def update(self, steps: Iterable[StepMetrics]) -> bool:
        """Record the requests reduced over all ranks in `steps`; return whether the run stops."""
        for step in steps:
            self._record(step.preempt, step.interrupt)
        return self.stopped

    def agreed(self) -> bool:
        """Return whether any rank has a request to stop, the same on every rank. A collective: call it on all ranks.

        With several ranks the result is one call late, so that the host does not wait for the device: each call starts
        an all-reduce, and reads the one started by the previous call.
        """
        if not self.stopped:
            if dist.is_initialized() and dist.get_world_size() > 1:
                arrived, self._reduction = self._reduction, _FlagReduction(self.flags(), self._device)
                if arrived is not None:
                    self._record(*arrived.read())
            else:
                self._record(self.preempt, self.interrupt)
            if self.stopped and self._reduction is not None:
                self._reduction.read()  # leave no collective unfinished
        return self.stopped

    def _record(self, preempt: bool, interrupt: bool) -> None:
        if not self.stopped and (preempt or interrupt):
            self.status = "preempted" if preempt else "interrupted"

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if signal_number in STOP_SIGNALS:
            self.preempt = True
        elif self.interrupt:
            raise KeyboardInterrupt
        else:
            self.interrupt = True


class _FlagReduction:
    """Asynchronous all-reduce of (preempt, interrupt), followed by a copy to the host."""

    def __init__(self, flags: tuple[float, float], device: torch.device) -> None:
        vector = torch.tensor(flags).to(device, non_blocking=True)
        self._work = dist.all_reduce(vector, async_op=True)
        self._event: torch.cuda.Event | None = None
        self._host = vector
        if vector.is_cuda:
            self._work.wait()  # makes the stream wait for the all-reduce, not the host
            self._host = torch.empty(vector.shape, pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[bool, bool]:
        """Wait for the result, and return whether any rank has a request to preempt, or to interrupt."""
        if self._event is None:
            self._work.wait()
        else:
            self._event.synchronize()
        preempt, interrupt = self._host.tolist()
        return preempt > 0, interrupt > 0


class _CtrlCResponder:
    """Thread that acknowledges Ctrl-C on the terminal at once.

    Python runs signal handlers only between two bytecodes of the main thread, so a handler would print after the
    current backward or collective. A rank under Meshbook's launcher does not respond, since the launcher does.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._previous = -1
        self._thread = threading.Thread(target=self._respond, name="ctrl-c", daemon=True)

    def start(self) -> None:
        """Start the thread, on rank 0 of a run without Meshbook's launcher."""
        if LAUNCHER_PID in os.environ or current_rank(os.environ):
            return
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

    def _respond(self) -> None:
        reader, printed = self._pipe[0] if self._pipe else -1, False
        while signal_number := os.read(reader, 1):
            if signal_number[0] == signal.SIGINT and not printed:
                printed = True
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, f"\n{CTRL_C_MESSAGE}\n".encode())
