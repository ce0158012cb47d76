"""Python's garbage collection between steps, where all ranks pay for it at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class GarbageOffTheStep:
    """Within the context Python collects no garbage by itself: it is collected after every `every` steps.

    What is there at the start (model, optimizer, modules) is not looked at again. 0: Python decides, as it does
    elsewhere. Without it a rank may stop for a long collection in the middle of a step, and all others wait for it.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0

    def __enter__(self) -> GarbageOffTheStep:
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._every:
            gc.enable()
            gc.unfreeze()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step belongs into this context."""
        yield
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            gc.collect()
