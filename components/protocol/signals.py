"""Signals that request a save and a stop: recorded until the training loop handles them, collected by a launcher.

Also reserves a port of the loopback interface, for the store of ranks that run on this machine.
"""

from __future__ import annotations

import signal
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
"""Signals that request a save and an exit with status 0: a preemption, a time limit or a closed terminal."""
FORWARDED_SIGNALS = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that a launcher forwards to its processes. Ctrl-C also saves and stops; a second one aborts."""
DUMP_STACKS = signal.SIGUSR1
"""Requests the stacks of all threads of a rank; its launcher sends it when the run hangs."""
DUMP_STACKS_WITHOUT_GIL = signal.SIGQUIT
"""Sent after DUMP_STACKS; a rank that could not take the GIL, and so has not written its stacks, writes them now."""
CTRL_C_MESSAGE = "Ctrl-C: stopping after this step or the next; again to abort"
"""Printed at once on Ctrl-C, by the launcher or by a rank without one."""


class RecordedSignals:
    """Handler that records signals until the training loop installs its own handler and processes the recorded ones."""

    def __init__(self) -> None:
        self.arrived: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.arrived.append(number)


def set_handler(number: int, handler: Any) -> Any:
    """Set the handler of a signal and return the previous one; keep SIGHUP ignored under nohup."""
    previous = signal.getsignal(number)
    if number != signal.SIGHUP or previous != signal.SIG_IGN:
        signal.signal(number, handler)
    return previous


def record_stop_signals() -> None:
    """Record stop signals for the training loop instead of letting them end this process."""
    recorded = RecordedSignals()
    for number in STOP_SIGNALS:
        set_handler(number, recorded)


@contextmanager
def collected_signals() -> Iterator[deque[int]]:
    """Collect FORWARDED_SIGNALS in the yielded deque instead of letting them end this process."""
    arrived: deque[int] = deque()

    def collect(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: set_handler(number, collect) for number in FORWARDED_SIGNALS}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reserve_loopback_port() -> socket.socket:
    """Bind a free port of the loopback interface, so that no other process takes it before rank 0 serves the store.

    The socket does not listen, so rank 0 may listen on it or, while this process keeps it open, bind the port again.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
