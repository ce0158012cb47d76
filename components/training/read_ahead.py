"""Batches of a training run, assembled by a thread one optimizer step ahead."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from components.batch import Batch
    from components.data.batches import TrainBatches

CLOSE_SECONDS = 5.0
"""Longest wait for the thread at the end: it assembles at most one batch, but a file system may block it."""


class ReadAhead:
    """Iterator over the micro-batches of the next `steps` optimizer steps; a context manager.

    While the training thread runs a step, another thread reads, collates and pins the micro-batches of the next step,
    and no later ones. Copies to the device remain on the training thread. The cursor of `batches` does not move: the
    caller advances it once a step has been trained, so that a checkpoint continues after that step. An exception of the
    thread is raised, with the thread's traceback, when the step that needs the batch takes it.

    The thread starts with the context, and forks nothing. It is a daemon, because a read that a file system blocks must
    not keep the process alive.
    """

    def __init__(self, batches: TrainBatches, steps: int, device: torch.device) -> None:
        """Read from the cursor of `batches`; batches for a GPU are pinned."""
        self._device = device
        self._upcoming = batches.upcoming(steps)
        self._left = steps
        self._results: SimpleQueue[list[Batch] | BaseException] = SimpleQueue()
        self._wanted = threading.Semaphore(0)
        """Released when a batch is taken: the thread assembles the next one."""
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="read_ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        self._wanted.release()
        self._thread.join(CLOSE_SECONDS)

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> list[Batch]:
        if self._left <= 0:
            raise StopIteration
        result = self._results.get()
        if isinstance(result, BaseException):
            self._results.put(result)  # for later calls, since the thread has ended
            raise result
        self._left -= 1
        self._wanted.release()
        return result

    def _read(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own current device, initially the first
            for batches in self._upcoming:
                self._results.put([each.pinned() for each in batches] if self._device.type == "cuda" else batches)
                self._wanted.acquire()
                if self._closed:
                    return
        except BaseException as error:
            self._results.put(error)
