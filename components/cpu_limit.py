"""Limit on the CPU time of code that comes with a model, such as its chat template."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from components.config.errors import ConfigError

RENDER_SECONDS = 5.0
"""Limit on the CPU time of a chat template for one conversation; a long conversation takes milliseconds."""


class CpuLimitError(RuntimeError):
    """Code exceeded its CPU time limit."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise CpuLimitError in the body once this process has spent `seconds` of CPU time in it.

    The limit is on CPU time rather than wall time, so that a busy or suspended machine does not trigger it. Signal
    handlers run in the main thread only; in any other thread the body runs without a limit.
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
    """Limit the CPU time of a chat template. Raises ConfigError, with `where` it was rendered, at the limit."""
    try:
        with cpu_limit(RENDER_SECONDS):
            yield
    except CpuLimitError as error:
        raise ConfigError(
            f"{where}: the chat template did not finish within {RENDER_SECONDS:g} s of CPU time; set "
            "model.tokenizer to a tokenizer with another chat template"
        ) from error


def _raise(number: int, frame: FrameType | None) -> None:
    raise CpuLimitError("the CPU time limit was reached")
