"""Python's garbage collection between steps, at the same time on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class GarbageCollection:
    """Context in which Python's automatic collection is off and garbage is collected after every `every` steps.

    Otherwise a rank may pause for a long collection in the middle of a step while all others wait for it. Objects that
    exist on entry (model, optimizer, modules) are frozen, that is excluded from collections. With `every` 0 nothing
    changes.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0

    def __enter__(self) -> GarbageCollection:
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
        """Count the body as one optimizer step, and collect after it if `every` steps have passed."""
        yield
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            gc.collect()
