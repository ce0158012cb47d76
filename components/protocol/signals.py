"""Signals that ask a run to save and stop: kept until the training loop listens, collected by a launcher."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""Ask a run to save and exit with status 0: a preemption or a time limit."""
FORWARDED_SIGNALS = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that a launcher passes on to what it started. Ctrl-C saves and stops too; a second one aborts."""
CTRL_C_ANSWER = "Ctrl-C: stopping after this step; again to abort"
"""Printed at once on Ctrl-C, by the launcher or by a rank without one."""


class KeptSignals:
    """Handler that records signals until the training loop installs its own and takes over what has arrived."""

    def __init__(self) -> None:
        self.arrived: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.arrived.append(number)


def keep_stop_signals() -> None:
    """Keep requests to save and stop for the training loop, instead of letting them end this process."""
    kept = KeptSignals()
    for number in STOP_SIGNALS:
        signal.signal(number, kept)


@contextmanager
def collected_signals() -> Iterator[deque[int]]:
    """Collect the signals that a launcher forwards, instead of letting them end this process."""
    arrived: deque[int] = deque()

    def collect(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, collect) for number in FORWARDED_SIGNALS}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
