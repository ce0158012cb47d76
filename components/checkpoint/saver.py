"""The saves of a run: synchronous, or in a background thread (checkpoint.async_save)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from components.checkpoint.manifest import CheckpointError, fail_together
from components.checkpoint.mirror import Mirror
from components.checkpoint.save import Mark, Snapshot, take_snapshot, write_snapshot
from components.checkpoint.stored_tensors import base_fingerprint
from components.checkpoint.tensors import Optimizers, Tensors, list_optimizers, model_tensors, optimizer_tensors
from components.config.schema.run import CheckpointConfig
from components.distributed.process.barriers import create_gloo_group
from components.protocol.failures import thread_frames

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 5.0
"""How long a run that ends with an error waits for the checkpoint that is being written."""
_COLLECTIVE_SECONDS = 20.0
"""How much longer it waits if the writing thread is in a collective."""
_PINNED_BYTES = 2**30
"""Bytes of one allocation of pinned memory: few calls, each of which blocks the GPU's launches only briefly."""
_ALIGNMENT = 512
"""Bytes at which a buffer starts in its allocation; as PyTorch's allocator on a GPU."""


class Saver:
    """Saver of a run's checkpoints. Every method is a collective, called by the training thread of all ranks.

    In the background mode, `save` returns once each rank has copied its local state to host memory, into buffers that
    all saves reuse. A thread then writes the copy as `save_checkpoint` would, with collectives in a process group of
    its own, so that they cannot mix with those of training. One checkpoint is written at a time: the next `save` and
    `wait` wait for it. A kill during a save leaves the earlier checkpoints intact.

    An error of the thread is raised on every rank by the next method that waits for it. As a context manager, the saver
    waits at the end; after an error it waits only a few seconds, after an interrupt not at all.
    """

    def __init__(
        self,
        run_dir: Path | str,
        model: nn.Module,
        optimizer: Optimizers,
        policy: CheckpointConfig,
        report: Callable[[str], object] = logger.info,
        average: Tensors | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """Create the process group of the background mode; a collective then.

        Args:
            policy: The mode (`async_save`) and the complete checkpoints to keep.
            report: Called with each line to show, on every rank; in the background mode also by the writing thread.
            average: `WeightAverage.tensors`; None: no average is saved.
            mirror: Copies each checkpoint to checkpoint.remote; None: there are no copies.
        """
        self.buffers = CopyBuffers()
        self.damaged: list[Path] = []
        """Checkpoints that proved damaged when the run resumed; retention neither counts nor removes them."""
        self.longest_write = 0.0
        """Seconds of the longest write of a checkpoint so far, with its copy to checkpoint.remote."""
        self._run_dir, self._model, self._optimizer, self._policy = run_dir, model, optimizer, policy
        self._report, self._average, self._mirror = report, average, mirror
        self._group = create_gloo_group() if policy.async_save else None
        self._writing: _Writing | None = None
        self._allocating: threading.Thread | None = None
        if policy.every or policy.every_minutes or policy.last:
            self._first_step = list_optimizers(optimizer)[-1].register_step_post_hook(self._after_first_step)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._allocating is not None:
            self._allocating.join()
        if error is None:
            self.wait()
        elif self._writing is not None:
            self._writing.abandon(_GRACE_SECONDS if isinstance(error, Exception) else 0)

    def save(self, step: int, extra: dict[str, Any], mark: Mark | None = None, *, last: bool = False) -> Path | None:
        """Save the current state, between two optimizer steps; other arguments and errors as in `save_checkpoint`.

        Return the checkpoint's folder; None if it is written in the background.

        Args:
            last: Training ends here: write synchronously and without a copy.

        Raises:
            CheckpointError: On every rank, also if the previous checkpoint could not be written. With `last`, this
                checkpoint is written before that error is raised.
        """
        began = time.perf_counter()
        if last or not self._policy.async_save:
            try:
                self.wait()
            except CheckpointError:
                self._save_now(step, extra, mark, last)
                raise
            return self._save_now(step, extra, mark, last)
        self.wait()
        waited = time.perf_counter() - began
        snapshot = self._snapshot(step, extra, mark)
        if self._allocating is not None:
            self._allocating.join()
        with fail_together(f"the state of step {step} could not be copied to host memory"):
            snapshot = replace(snapshot, tensors=self.buffers.fill(snapshot.tensors))
        self._writing = _Writing(step, lambda: self._write(snapshot, self._group))
        paused = f"saving step {step} in the background, training paused for {time.perf_counter() - began:.2f} s"
        self._report(f"{paused}, {waited:.2f} s of it for the previous checkpoint" if waited > 0.1 else paused)
        return None

    def copy(self, path: Path) -> None:
        """Copy a published checkpoint to the mirror unless it is there, such as one that an earlier attempt left.

        Raises CheckpointError on every rank.
        """
        if self._mirror is not None:
            self._copy(self._mirror, path, None, last=True)

    def wait(self) -> Path | None:
        """Wait for the checkpoint that is being written; return its folder, or None if there was nothing to wait for.

        Raises:
            CheckpointError: On every rank, once, if it could not be written.
        """
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()

    def _after_first_step(self, *_: object) -> None:
        """Reject optimizer state that cannot be saved, which exists now, rather than at the first save.

        In the background mode, also allocate the host buffers in a thread during the second step, so that the first
        save does not have to.
        """
        self._first_step.remove()
        tensors = model_tensors(self._model)
        tensors |= optimizer_tensors(self._optimizer, tensors) | (self._average or {})
        if not (self._policy.async_save and (self._policy.every or self._policy.every_minutes)):
            return
        self._allocating = _thread("buffers for checkpoints", lambda: self.buffers.allocate(tensors))
        self._allocating.start()

    def _save_now(self, step: int, extra: dict[str, Any], mark: Mark | None, last: bool) -> Path:
        return self._write(self._snapshot(step, extra, mark), None, last)

    def _snapshot(self, step: int, extra: dict[str, Any], mark: Mark | None) -> Snapshot:
        return take_snapshot(step, self._model, self._optimizer, extra, mark, self.base_fingerprint, self._average)

    @cached_property
    def base_fingerprint(self) -> str | None:
        """The fingerprint of the base weights under adapters, which do not change; a collective at first."""
        return base_fingerprint(self._model)

    def _write(self, snapshot: Snapshot, group: dist.ProcessGroup | None, last: bool = False) -> Path:
        began, after = time.perf_counter(), 0 if self._mirror is None else self._mirror.newest_serial
        path = write_snapshot(self._run_dir, snapshot, self._policy, group, after, self.damaged)
        self._report(f"saved {path}")
        if self._mirror is not None:
            self._copy(self._mirror, path, group, last)
        self.longest_write = max(self.longest_write, time.perf_counter() - began)
        return path

    def _copy(self, mirror: Mirror, path: Path, group: dist.ProcessGroup | None, last: bool) -> None:
        """Copy a checkpoint to the mirror. A failure ends the run only if no later save can make up for it."""
        began = time.perf_counter()
        try:
            url = mirror.upload(path, group)
        except CheckpointError as error:
            if last:
                raise
            self._report(f"{error}; training continues, and the next save is copied again")
        else:
            self._report(f"copied to {url} in {time.perf_counter() - began:.1f} s")
        finally:
            if (repeats := mirror.repeats()) is not None:
                logger.warning(repeats)


class CopyBuffers:
    """Host memory for one copy of a rank's tensors, allocated once and reused by every save."""

    def __init__(self) -> None:
        self.copies: Tensors = {}

    def allocate(self, tensors: Tensors) -> None:
        """Allocate buffers for a copy of `tensors`, and zero them: the first write to new pages is slow."""
        shards = {name: _local(tensor) for name, tensor in tensors.items()}
        missing = {name: shard for name, shard in shards.items() if not self._fits(name, shard)}
        pinned = {name: shard for name, shard in missing.items() if shard.is_cuda}
        empty = _buffers_in_few_allocations(pinned, pin_memory=True) | {
            name: torch.empty(shard.shape, dtype=shard.dtype) for name, shard in missing.items() if name not in pinned
        }
        for buffer in empty.values():
            buffer.zero_()
        self.copies = {name: self._copy(name, tensor, empty.get(name)) for name, tensor in tensors.items()}

    @torch.no_grad()
    def fill(self, tensors: Tensors) -> Tensors:
        """Copy `tensors` into the buffers and return these; the next call overwrites them.

        GPU tensors are copied to pinned memory asynchronously, with one synchronization at the end.
        """
        self.allocate(tensors)
        shards = [_local(tensor) for tensor in tensors.values()]
        torch._foreach_copy_([_local(copy) for copy in self.copies.values()], shards, non_blocking=True)
        for device in {shard.device for shard in shards if shard.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return self.copies

    def _fits(self, name: str, shard: torch.Tensor) -> bool:
        existing = self.copies.get(name)
        return existing is not None and existing.dtype == shard.dtype and _local(existing).shape == shard.shape

    def _copy(self, name: str, tensor: torch.Tensor, empty: torch.Tensor | None) -> torch.Tensor:
        existing = self.copies.get(name)
        if empty is None and existing is not None and _spec(existing) is _spec(tensor):
            return existing
        buffer = _local(self.copies[name]) if empty is None else empty
        # Not DTensor.from_local, which would move the buffer to the GPU of the mesh.
        return DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer


def _buffers_in_few_allocations(shards: Tensors, pin_memory: bool) -> Tensors:
    """Return buffers like `shards` in host memory, cut from few allocations.

    PyTorch rounds every allocation of pinned memory up to a power of two: one for each tensor would take up to twice
    the memory of the tensors.
    """
    buffers: Tensors = {}
    for allocation, offsets in _pinned_allocations({name: shard.nbytes for name, shard in shards.items()}):
        memory = torch.empty(allocation, dtype=torch.uint8, pin_memory=pin_memory)
        for name, offset in offsets.items():
            shard = shards[name]
            buffers[name] = memory[offset : offset + shard.nbytes].view(shard.dtype).view(shard.shape)
    return buffers


def _pinned_allocations(sizes: Mapping[str, int]) -> list[tuple[int, dict[str, int]]]:
    """Return allocations of powers of two that hold buffers of `sizes` bytes: each its bytes and its buffers' offsets.

    An allocation has at most `_PINNED_BYTES`, unless one buffer is larger. The largest buffers that fit come first.
    """
    left = {
        name: -(-size // _ALIGNMENT) * _ALIGNMENT for name, size in sorted(sizes.items(), key=lambda item: -item[1])
    }
    allocations: list[tuple[int, dict[str, int]]] = []
    while left:
        largest, total = next(iter(left.values())), sum(left.values())
        allocation = max(min(_PINNED_BYTES, _power_of_two(total)), _power_of_two(2 * largest - 1), _ALIGNMENT)
        offsets: dict[str, int] = {}
        end = 0
        for name, size in left.items():
            if end + size <= allocation:
                offsets[name], end = end, end + size
        left = {name: size for name, size in left.items() if name not in offsets}
        allocations.append((allocation, offsets))
    return allocations


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`; 0 for a `number` below 1."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


class _Writing:
    """A checkpoint that a thread is writing."""

    def __init__(self, step: int, write: Callable[[], Path]) -> None:
        self.step = step
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = _thread(f"checkpoint of step {step}", lambda: self._run(write))
        self._thread.start()

    def result(self) -> Path | None:
        """Wait for the thread; return the published folder, or raise the thread's error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._path

    def abandon(self, seconds: float) -> None:
        """Wait at most `seconds` for the thread, and log an error if the checkpoint is lost; the run is failing."""
        self._thread.join(seconds)
        if self._in_collective():
            # Python aborts if a thread returns from a collective while the interpreter shuts down. The peer that this
            # thread waits for has exited or is exiting: its closed connection ends the collective first.
            self._thread.join(_COLLECTIVE_SECONDS)
        if self._thread.is_alive():
            logger.error("the checkpoint of step %s is lost: the run ended while it was being written", self.step)
        elif self._error is not None:
            logger.error("the checkpoint of step %s is lost: %s", self.step, self._error)

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self._path = write()
        except BaseException as error:  # raised by `result`, in the training thread
            self._error = error

    def _in_collective(self) -> bool:
        # torch has no query for this; a thread in a collective has a frame of torch.distributed.distributed_c10d.
        files = (frame.f_code.co_filename for frame in thread_frames(self._thread.ident))
        return dist.distributed_c10d.__file__ in files


def _thread(name: str, function: Callable[[], object]) -> threading.Thread:
    """Return a daemon thread that runs `function` on the current GPU.

    CUDA's current device is set per thread. On the default device, pinning memory or getting the current stream would
    create a context on GPU 0 in every process of the node.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        function()

    return threading.Thread(target=run, name=name, daemon=True)


def _spec(tensor: torch.Tensor) -> object:
    """Return a DTensor's mesh and placements (DTensorSpec), None for a plain tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
