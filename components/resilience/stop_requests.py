"""A request to save and leave: the signals of this process, and what all ranks agreed on."""

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

from components.protocol.role import LAUNCHER_PID, own_rank
from components.protocol.signals import CTRL_C_ANSWER, STOP_SIGNALS, KeptSignals
from components.training.metrics import StepMetrics


class StopRequest:
    """A request to save and leave: what this process was asked, and what all ranks have agreed on.

    SIGTERM and SIGUSR2 ask for preemption, the first Ctrl-C for an interruption; a second Ctrl-C aborts at once. The
    handlers of before are put back at the end of the context. Training steps carry the request in their own reduction
    (`flags`, `heed`); evaluation and generation call `agreed` before each batch or token.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is where collectives compute; None: the CPU."""
        self.preempt = False
        self.interrupt = False
        self.status = "ok"
        """ok, or preempted or interrupted once all ranks know of the request; equal on every rank."""
        self._device = device or torch.device("cpu")
        self._reduced: _Reduced | None = None
        self._answer = _Answer()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (*STOP_SIGNALS, signal.SIGINT):
            before = self._before[number] = signal.signal(number, self._handle)
            for arrived in before.arrived if isinstance(before, KeptSignals) else ():  # since the process started
                if arrived == number:
                    self._handle(number, None)
        self._answer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._answer.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def stopped(self) -> bool:
        """Whether all ranks know that the run stops; equal on every rank."""
        return self.status != "ok"

    def flags(self) -> tuple[float, float]:
        """Return (preempt, interrupt) as numbers, for the reduction that every step does anyway."""
        return float(self.preempt), float(self.interrupt)

    def heed(self, steps: Iterable[StepMetrics]) -> bool:
        """Return whether the run stops, by the numbers of its steps or by what was agreed before."""
        for step in steps:
            self._take(step.preempt, step.interrupt)
        return self.stopped

    def agreed(self) -> bool:
        """Return whether any rank was asked to stop, the same on every rank. A collective: call it on all ranks.

        With several ranks the answer is that of the call before, so that no rank waits for the device: each call starts
        a reduction, and reads the one that the call before has started.
        """
        if not self.stopped:
            if dist.is_initialized() and dist.get_world_size() > 1:
                arrived, self._reduced = self._reduced, _Reduced(self.flags(), self._device)
                if arrived is not None:
                    self._take(*arrived.read())
            else:
                self._take(self.preempt, self.interrupt)
            if self.stopped and self._reduced is not None:
                self._reduced.read()  # leave no collective unfinished
        return self.stopped

    def _take(self, preempt: bool, interrupt: bool) -> None:
        if not self.stopped and (preempt or interrupt):
            self.status = "preempted" if preempt else "interrupted"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS:
            self.preempt = True
        elif self.interrupt:
            raise KeyboardInterrupt
        else:
            self.interrupt = True


class _Reduced:
    """The sum of (preempt, interrupt) over all ranks, on its way to the host."""

    def __init__(self, flags: tuple[float, float], device: torch.device) -> None:
        vector = torch.tensor(flags).to(device, non_blocking=True)
        self._work = dist.all_reduce(vector, async_op=True)
        self._event: torch.cuda.Event | None = None
        self._host = vector
        if vector.is_cuda:
            self._work.wait()  # orders the copy behind the reduction on the device; the host goes on
            self._host = torch.empty(vector.shape, pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[bool, bool]:
        """Wait for the sum and return whether any rank was asked to preempt, or to interrupt."""
        if self._event is None:
            self._work.wait()
        else:
            self._event.synchronize()
        preempt, interrupt = self._host.tolist()
        return preempt > 0, interrupt > 0


class _Answer:
    """Answers Ctrl-C at once, from a thread of its own.

    Python runs a handler between two bytecodes of the main thread, and a backward or a collective is one of them. A
    rank whose launcher has the terminal is silent: the launcher answers.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._before = -1
        self._thread = threading.Thread(target=self._listen, name="ctrl-c", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        if LAUNCHER_PID in os.environ or own_rank(os.environ):
            return
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._before)
        os.close(self._pipe[1])
        self._thread.join()
        os.close(self._pipe[0])
        self._pipe = None

    def _listen(self) -> None:
        reader, answered = self._pipe[0] if self._pipe else -1, False
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT and not answered:
                answered = True
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, f"\n{CTRL_C_ANSWER}\n".encode())
