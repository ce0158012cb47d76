"""A limit on the CPU time of code that came with a model, such as its chat template."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from components.config.errors import ConfigError

RENDER_SECONDS = 5.0
"""CPU time that a chat template may take for one conversation; a long one takes milliseconds."""


class CpuLimitError(RuntimeError):
    """Code that ran for longer than it was allowed to."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise CpuLimitError in the body once this process has spent `seconds` of CPU time in it.

    CPU time and not wall time, so that neither a busy nor a suspended machine trips the limit. Signals reach only the
    main thread; in any other one the body runs without a limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _raise)
    # The timer repeats because code such as Jinja's constant folding swallows exceptions and tries again.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def running_template(where: str) -> Iterator[None]:
    """Limit the time of a chat template. Raises ConfigError naming `where` it did not finish."""
    try:
        with cpu_limit(RENDER_SECONDS):
            yield
    except CpuLimitError as error:
        raise ConfigError(
            f"{where}: the chat template did not finish within {RENDER_SECONDS:g} s of CPU time; set "
            "model.tokenizer to one with another chat template"
        ) from error


def _raise(number: int, frame: FrameType | None) -> None:
    raise CpuLimitError("the limit on its CPU time was reached")
