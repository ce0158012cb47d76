"""The saves of a run: at once, or in the background of its training (checkpoint.async_save)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from components.checkpoint.base_fingerprint import frozen_fingerprint
from components.checkpoint.checkpoint_error import CheckpointError, agreed
from components.checkpoint.save import Mark, Snapshot, take_snapshot, write_snapshot
from components.checkpoint.tensors import Optimizers, Tensors, list_optimizers, model_tensors, optimizer_tensors
from components.config.schema.checkpoint import CheckpointConfig
from components.distributed.process.barriers import create_gloo_group
from components.resilience.frames import thread_frames

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""For which a run that an error ends waits for the checkpoint that is being written."""
COLLECTIVE_SECONDS = 20.0
"""For which it waits besides, where the thread is in a collective."""


class Saver:
    """Saves the state of a run, and says so. Every method is called on all ranks, by the thread that trains.

    In the background, `save` returns as soon as each rank has copied its own part of the state to host memory, into
    buffers that all saves use. A thread writes the copy as `save_checkpoint` would, with collectives in a group of its
    own, so that they cannot mix with those of training. One checkpoint is written at a time: the next save, a last save
    and `wait` wait for it. What is killed meanwhile leaves the checkpoints before it, as ever.

    An error of the thread is raised on every rank by whatever waits for it next. As a context manager it waits at the
    end; a run that an error ends gives the thread a few seconds and goes, and one interrupted goes at once.
    """

    def __init__(
        self,
        run_dir: Path | str,
        model: nn.Module,
        optimizer: Optimizers,
        policy: CheckpointConfig,
        tell: Callable[[str], object] = logger.info,
    ) -> None:
        """Take what is to be saved; a collective in the background mode.

        Args:
            policy: Says whether to save in the background, and which complete checkpoints stay.
            tell: Called with each line for the person, on every rank; in the background mode by the thread too.
        """
        self.buffers = CopyBuffers()
        self._run_dir, self._model, self._optimizer, self._policy, self._tell = run_dir, model, optimizer, policy, tell
        self._group = create_gloo_group() if policy.async_save else None
        self._writing: _Writing | None = None
        self._taking: threading.Thread | None = None
        if policy.async_save and (policy.every or policy.every_minutes):
            self._first_step = list_optimizers(optimizer)[-1].register_step_post_hook(self._take_buffers)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._taking is not None:
            self._taking.join()
        if error is None:
            self.wait()
        elif self._writing is not None:
            self._writing.leave(GRACE_SECONDS if isinstance(error, Exception) else 0)

    def save(self, step: int, extra: dict[str, Any], mark: Mark | None = None, *, last: bool = False) -> None:
        """Save the state as it is now, between two optimizer steps; arguments and errors of `save_checkpoint`.

        Args:
            last: Training ends here, so that there is nothing to go on with: write at once, and without a copy.

        Raises:
            CheckpointError: On every rank: also when the checkpoint before this one could not be written. A last one is
                then saved all the same.
        """
        began = time.perf_counter()
        if last or not self._policy.async_save:
            try:
                self.wait()
            except CheckpointError:
                self._save_now(step, extra, mark)
                raise
            self._save_now(step, extra, mark)
            return
        self.wait()
        waited = time.perf_counter() - began
        snapshot = self._snapshot(step, extra, mark)
        if self._taking is not None:
            self._taking.join()
        with agreed(f"the state of step {step} could not be copied to host memory"):
            snapshot = replace(snapshot, tensors=self.buffers.fill(snapshot.tensors))
        self._writing = _Writing(step, lambda: self._write(snapshot))
        paused = f"saving step {step} in the background, paused for {time.perf_counter() - began:.2f} s"
        self._tell(f"{paused}, {waited:.2f} s of it until the one before was written" if waited > 0.1 else paused)

    def wait(self) -> Path | None:
        """Wait until nothing is being written; return what was published meanwhile, or None.

        Raises:
            CheckpointError: On every rank, once, when it could not be written.
        """
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()

    def _take_buffers(self, *_: object) -> None:
        """Take memory beside the second step: the optimizer has its state now, and the first save shall not wait."""
        self._first_step.remove()
        tensors = model_tensors(self._model)
        tensors |= optimizer_tensors(self._optimizer, tensors)
        self._taking = _thread("buffers for checkpoints", lambda: self.buffers.take(tensors))
        self._taking.start()

    def _save_now(self, step: int, extra: dict[str, Any], mark: Mark | None) -> None:
        path = write_snapshot(self._run_dir, self._snapshot(step, extra, mark), self._policy)
        self._tell(f"saved {path}")

    def _snapshot(self, step: int, extra: dict[str, Any], mark: Mark | None) -> Snapshot:
        return take_snapshot(step, self._model, self._optimizer, extra, mark, self._frozen)

    @cached_property
    def _frozen(self) -> str | None:
        return frozen_fingerprint(self._model)

    def _write(self, snapshot: Snapshot) -> Path:
        path = write_snapshot(self._run_dir, snapshot, self._policy, self._group)
        self._tell(f"saved {path}")
        return path


class CopyBuffers:
    """Room in host memory for one copy of a rank's tensors: taken once, used by every copy."""

    def __init__(self) -> None:
        self.copies: Tensors = {}

    def take(self, tensors: Tensors) -> None:
        """Take the room for a copy of `tensors`; memory that is used for the first time is slow, so it is used here."""
        self.copies = {name: self._room_for(name, tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def fill(self, tensors: Tensors) -> Tensors:
        """Return a copy of `tensors`, valid until the next; pinned memory receives what is on a GPU, all at once."""
        self.take(tensors)
        parts = [_local(tensor) for tensor in tensors.values()]
        torch._foreach_copy_([_local(copy) for copy in self.copies.values()], parts, non_blocking=True)
        for device in {part.device for part in parts if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return self.copies

    def _room_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        part, held = _local(tensor), self.copies.get(name)
        if held is None or held.dtype != part.dtype or _local(held).shape != part.shape:
            room = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda).zero_()
        elif _spec(held) is _spec(tensor):
            return held
        else:
            room = _local(held)
        # DTensor.from_local would move it to the GPU of the mesh.
        return DTensor(room, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else room


class _Writing:
    """A checkpoint being written by a thread."""

    def __init__(self, step: int, write: Callable[[], Path]) -> None:
        self.step = step
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = _thread(f"checkpoint of step {step}", lambda: self._run(write))
        self._thread.start()

    def result(self) -> Path | None:
        """Wait for the end, and return what was published or raise what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._path

    def leave(self, seconds: float) -> None:
        """Wait for so long, and log what became of the checkpoint: an error is ending the run."""
        self._thread.join(seconds)
        if self._in_collective():
            # Python aborts when a thread comes back from a collective while the process exits. The rank that this
            # thread waits for is gone, or leaves about now: its connection closes, and that ends the thread first.
            self._thread.join(COLLECTIVE_SECONDS)
        if self._thread.is_alive():
            logger.error("the checkpoint of step %s was still being written: it is lost", self.step)
        elif self._error is not None:
            logger.error("the checkpoint of step %s is lost: %s", self.step, self._error)

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self._path = write()
        except BaseException as error:  # raised by `result`, in the thread that trains
            self._error = error

    def _in_collective(self) -> bool:
        files = (frame.f_code.co_filename for frame in thread_frames(self._thread.ident))
        return dist.distributed_c10d.__file__ in files


def _thread(name: str, do: Callable[[], object]) -> threading.Thread:
    """Return a thread for which the process does not wait at exit, on the GPU of this one: each has to choose its own.

    On another one it would open a context there, be it to pin memory or to ask for the current stream.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        do()

    return threading.Thread(target=run, name=name, daemon=True)


def _spec(tensor: torch.Tensor) -> object:
    """Return a DTensor's layout, None for a plain tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
