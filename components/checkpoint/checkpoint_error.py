"""CheckpointError, and the context that raises it on all ranks if one of them fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from components.protocol.failures import StatedFailure

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CheckpointError(StatedFailure, RuntimeError):
    """A checkpoint could not be written or read; raised on every rank with every rank's reason."""


@contextlib.contextmanager
def fail_together(summary: str | Callable[[], str], group: ProcessGroup | None = None) -> Iterator[None]:
    """Run the body on all ranks of `group`; if it raises on any of them, raise CheckpointError on all.

    A CheckpointError from the body must be one that every rank raises: it is passed on without a collective.

    Args:
        summary: Start of the message, such as "checkpoint PATH could not be read", or a function that returns it. The
            function is called on all ranks, after a failure only, and may use collectives.
        group: Process group for the exchange of errors; None: the default group.
    """
    from components.exchange import all_gather_json  # here because it imports torch

    problem: Exception | None = None
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{_text(summary)}: {error}") from error
    except Exception as error:  # raised below, on every rank
        problem = error
    mine = None if problem is None else f"{type(problem).__name__}: {problem}"
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(all_gather_json(mine, group)) if text is not None]
    if failures:
        raise CheckpointError(f"{_text(summary)}: {'; '.join(failures)}") from problem


def _text(summary: str | Callable[[], str]) -> str:
    return summary if isinstance(summary, str) else summary()
