"""Signals that request a save and a stop: recorded until the training loop handles them, collected by a launcher."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""Signals that request a save and an exit with status 0: a preemption or a time limit."""
FORWARDED_SIGNALS = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that a launcher forwards to its processes. Ctrl-C also saves and stops; a second one aborts."""
DUMP_STACKS = signal.SIGUSR1
"""Requests the stacks of all threads of a rank; its launcher sends it when the run hangs."""
DUMP_STACKS_WITHOUT_GIL = signal.SIGQUIT
"""Sent after DUMP_STACKS; a rank that could not take the GIL, and so has not written its stacks, writes them now."""
CTRL_C_MESSAGE = "Ctrl-C: stopping after this step; again to abort"
"""Printed at once on Ctrl-C, by the launcher or by a rank without one."""


class RecordedSignals:
    """Handler that records signals until the training loop installs its own handler and processes the recorded ones."""

    def __init__(self) -> None:
        self.arrived: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.arrived.append(number)


def record_stop_signals() -> None:
    """Record stop signals for the training loop instead of letting them end this process."""
    recorded = RecordedSignals()
    for number in STOP_SIGNALS:
        signal.signal(number, recorded)


@contextmanager
def collected_signals() -> Iterator[deque[int]]:
    """Collect FORWARDED_SIGNALS in the yielded deque instead of letting them end this process."""
    arrived: deque[int] = deque()

    def collect(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, collect) for number in FORWARDED_SIGNALS}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
