"""The end of a process group: in the right order, not interrupted, with nothing stale left behind."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from components.distributed.process.backends import backend_supports_cuda
from components.distributed.process.environment import restore_variables

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT = timedelta(seconds=30)


def destroy_global_state() -> None:
    """Destroy the torch.distributed process group during cleanup (seed page 000, NeMo AutoModel).

    Registered to run at exit. SIGINT is ignored meanwhile and handled as before afterwards. DeepEP's buffers
    are freed before the group, which would otherwise hang on their pending collectives; nothing happens
    where DeepEP
    was never used. Queued CUDA work gets 30 s to finish: after the death of a peer it never would. Variables
    that the start-up set are put back. A no-op without a process group.
    """
    try:
        if dist.is_available() and dist.is_initialized():
            with _sigint_ignored():
                _free_deep_ep_buffers()
                _drain_device()
                dist.destroy_process_group()
    finally:
        restore_variables()


def destroy_distributed() -> None:
    """Clean up distributed process groups (seed page 003, KempnerForge): `destroy_global_state`."""
    destroy_global_state()


@contextlib.contextmanager
def _sigint_ignored() -> Iterator[None]:
    """Ignore Ctrl-C. Only the main thread may, and only a handler that Python set can be put back."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@runtime_checkable
class _Destroyable(Protocol):
    """A DeepEP buffer of a version that can be destroyed."""

    def destroy(self) -> None: ...


def _free_deep_ep_buffers() -> None:
    """Free every buffer of the classes that DeepEP offers, if imported (Buffer, ElasticBuffer, ...)."""
    offered = inspect.getmembers(sys.modules["deep_ep"], inspect.isclass) if "deep_ep" in sys.modules else ()
    kinds = tuple(value for name, value in offered if name.endswith("Buffer"))
    if not kinds:
        return
    for buffer in [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kinds)]:
        if getattr(buffer, "runtime", buffer) is None:
            continue  # its owner has freed it
        try:
            if isinstance(buffer, _Destroyable) and getattr(buffer, "explicitly_destroy", True):
                buffer.destroy()
            else:
                buffer.runtime = None  # the last reference: the destructor of the C++ side frees the memory
        except Exception:  # the group must go down whatever DeepEP says; the log keeps what it said
            logger.exception("DeepEP could not free a buffer; destroying the process group anyway")


def _drain_device() -> None:
    """Let queued CUDA work finish, within bounds: a collective whose peer has died never does."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized() and backend_supports_cuda()):
        return
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + DRAIN_TIMEOUT.total_seconds()
    while not event.query():
        if time.monotonic() > deadline:
            logger.error("CUDA work is still pending after %s: a peer has probably died", DRAIN_TIMEOUT)
            return
        time.sleep(0.01)
