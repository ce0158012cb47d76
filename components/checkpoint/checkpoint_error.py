"""What goes wrong with checkpoints while a run is running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch.distributed as dist

from components.exchange import all_gather_json


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on every rank with every rank's reason."""


@contextlib.contextmanager
def agreed(what: str | Callable[[], str], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Do something on all ranks; when it failed on any of them, raise CheckpointError on all.

    A CheckpointError from within is one that all ranks have already.

    Args:
        what: The beginning of the sentence, such as "checkpoint PATH could not be read", or a function that returns
            it, called on all ranks when something has failed.
        group: The ranks agree through it; None: through that of all processes.
    """
    problem: Exception | None = None
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{_said(what)}: {error}") from error
    except Exception as error:  # told below, on every rank
        problem = error
    mine = None if problem is None else f"{type(problem).__name__}: {problem}"
    told = [f"rank {rank}: {text}" for rank, text in enumerate(all_gather_json(mine, group)) if text is not None]
    if told:
        raise CheckpointError(f"{_said(what)}: {'; '.join(told)}") from problem


def _said(what: str | Callable[[], str]) -> str:
    return what if isinstance(what, str) else what()
