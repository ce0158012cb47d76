"""Destroying the process group: DeepEP buffers first, queued CUDA work next, without interruption by Ctrl-C."""

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
    """Destroy the process group during cleanup (nemo_automodel/components/distributed/init_utils.py).

    Registered to run at exit; a no-op without a process group. SIGINT is ignored meanwhile, and its handler restored
    afterwards. DeepEP buffers, if any, are freed first, since destroying the group would hang on their pending
    collectives. Queued CUDA work gets DRAIN_TIMEOUT to finish, since it never does after a peer has died. Environment
    variables set by the start-up are restored.
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
    """Call `destroy_global_state`; the name is KempnerForge's (distributed/setup.py)."""
    destroy_global_state()


@contextlib.contextmanager
def _sigint_ignored() -> Iterator[None]:
    """Ignore Ctrl-C in the body, if possible: in the main thread, and with a handler that Python can restore."""
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
    """DeepEP buffer with an explicit `destroy`, which not every version has."""

    def destroy(self) -> None: ...


def _free_deep_ep_buffers() -> None:
    """Free every live buffer of DeepEP's classes (Buffer, ElasticBuffer, ...) if DeepEP was imported.

    DeepEP has no registry of its buffers, so they are found among the objects that the garbage collector tracks.
    """
    classes = inspect.getmembers(sys.modules["deep_ep"], inspect.isclass) if "deep_ep" in sys.modules else ()
    buffer_classes = tuple(value for name, value in classes if name.endswith("Buffer"))
    if not buffer_classes:
        return
    for buffer in [candidate for candidate in gc.get_objects() if issubclass(type(candidate), buffer_classes)]:
        if getattr(buffer, "runtime", buffer) is None:
            continue  # already freed
        try:
            if isinstance(buffer, _Destroyable) and getattr(buffer, "explicitly_destroy", True):
                buffer.destroy()
            else:
                buffer.runtime = None  # drops the last reference: the C++ destructor frees the memory
        except Exception:  # the process group must be destroyed whatever DeepEP raises
            logger.exception("DeepEP could not free a buffer; destroying the process group anyway")


def _drain_device() -> None:
    """Wait for queued CUDA work, for at most DRAIN_TIMEOUT: a collective whose peer has died never finishes."""
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
