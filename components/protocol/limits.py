"""Limits on the CPU time and the memory of code that a user's template runs in this process."""

from __future__ import annotations

import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CpuLimitError(RuntimeError):
    """Code exceeded its CPU time limit."""


@contextmanager
def limited(seconds: float, size: int) -> Iterator[None]:
    """Limit the body to CPU time and memory beyond those of this process: raise CpuLimitError and MemoryError in it.

    The limit is on CPU time rather than wall time, so that a busy or suspended machine does not trigger it. That on
    memory is one on the address space (Linux only), which other threads share; to set it takes 20 us. Signal handlers
    run in the main thread only; in any other thread the body runs without limits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, (soft, hard) = signal.signal(signal.SIGVTALRM, _raise), resource.getrlimit(resource.RLIMIT_AS)
    # The timer repeats because code such as Jinja's constant folding swallows exceptions and tries again.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        if sys.platform == "linux":
            with open("/proc/self/statm", "rb", buffering=0) as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            most = [limit for limit in (soft, hard, used + size) if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min(most), hard))
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        finally:  # also if the signal arrives here
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _raise(number: int, frame: FrameType | None) -> None:
    raise CpuLimitError("the CPU time limit was reached")
