"""Start and end of the process group: read the ranks, choose device and backend, rendezvous, initialize; destroy.

Recipes call `start_process_group`. `initialize_distributed` (components.distributed.init) and the two
`init_distributed` (components.distributed.utils and .mesh) are thin wrappers around the same code.

The end frees DeepEP's buffers first and waits for queued CUDA work next, without interruption by Ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from components.distributed.process.environment import (
    RankVariables,
    _set_nccl_env,
    export_variables,
    read_rank_variables,
    restore_variables,
)
from components.distributed.process.groups import backend_supports_cuda, device_backends, index_on_node
from components.distributed.process.rendezvous import (
    LOOPBACK,
    gather_at_start,
    is_loopback,
    open_store,
    rendezvous_host,
)
from components.distributed.process.store_sync import StoreSync
from components.protocol.errors import ConfigError

logger = logging.getLogger(__name__)
_CUDA_BACKEND = "cpu:gloo,cuda:nccl"  # nccl has no collectives for CPU tensors, gloo few for CUDA tensors
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_DRAIN_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class DistInfo:
    """Process group, rank and device of this process (nemo_automodel/components/distributed/init_utils.py)."""

    backend: str
    """The actual backend of the process group, such as gloo or cpu:gloo,cuda:nccl."""
    rank: int
    world_size: int
    device: torch.device
    """Device that this process computes on."""
    is_main: bool
    """Whether this is rank 0."""


def start_process_group(
    device: str = "auto",
    backend: str | None = None,
    *,
    rendezvous_timeout: timedelta = RENDEZVOUS_TIMEOUT,
    collective_timeout: timedelta = _COLLECTIVE_TIMEOUT,
) -> DistInfo:
    """Start the process group of all ranks and return its actual properties; a second call only returns them.

    A single process needs no address and gets a group of one. Ranks of several nodes get the network settings of
    `_set_nccl_env` that are unset in the environment. The CUDA device (local rank modulo the visible devices) is set
    before any communication. The group is destroyed at exit.

    Args:
        device: auto (CUDA if available), cpu or cuda.
        backend: Backend of torch.distributed; None: gloo, and on CUDA nccl for CUDA tensors.
        rendezvous_timeout: Time for all ranks to reach the store.
        collective_timeout: Timeout of one collective, including a checkpoint's barrier.

    Raises:
        RankEnvironmentError: The rank variables or the address of rank 0 are incomplete or contradictory.
        ConfigError: `device` or `backend` needs CUDA, and no CUDA device is visible.
        RendezvousError: Ranks did not arrive in time; the message lists them.
    """
    if dist.is_initialized():
        return current_info(device)
    variables = read_rank_variables()
    if variables.world_size == 1:
        store = None
        _bind_gloo_to_loopback(LOOPBACK)
    else:
        host = rendezvous_host(variables)
        _bind_gloo_to_loopback(host)
        if not is_loopback(host):
            # 3 is torch's default: a timeout ends the process without aborting the communicator, which may hang too.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
            _set_nccl_env()
        store = open_store(variables, rendezvous_timeout)
    return launch_group(variables, store, device, backend, (rendezvous_timeout, collective_timeout))


def launch_group(
    variables: RankVariables,
    store: dist.Store | None,
    device: str,
    backend: str | None,
    timeouts: tuple[timedelta, timedelta],
    **options: Any,
) -> DistInfo:
    """Start the process group of ranks that can reach `store` (None: a single process).

    Args:
        timeouts: Of the rendezvous, and of a collective.
        options: Further arguments of `torch.distributed.init_process_group`.
    """
    use_cuda, backend = _choose_backend(device, backend, variables.world_size)
    if store is None:
        store = dist.HashStore()
    else:
        variables = _fill_in_node_variables(variables, gather_at_start(variables, store, variables.node, timeouts[0]))
    if use_cuda:
        use_cuda_device(variables.local_rank or 0)
    start = StoreSync.enter(store, "default_pg", variables.rank, variables.world_size)  # new keys for each start-up
    dist.init_process_group(
        backend,
        store=start.store,
        rank=variables.rank,
        world_size=variables.world_size,
        timeout=timeouts[1],
        **options,
    )
    start.store.set_timeout(timeouts[1])  # nccl connects at the first collective, which ranks may reach far apart
    atexit.unregister(destroy_global_state)
    atexit.register(destroy_global_state)
    return current_info(device)


def use_cuda_device(local_rank: int) -> None:
    """Set the CUDA device of this process, local rank modulo the visible devices.

    Call it before any communication, which would otherwise create a CUDA context on device 0. If only one device is
    visible to each process (Slurm's --gpus-per-task), that is device 0 for every local rank.
    """
    torch.cuda.set_device(local_rank % torch.cuda.device_count())


def current_info(device: str = "auto") -> DistInfo:
    """Return the actual properties of the running process group. Raises ConfigError for cuda without a device."""
    rank, backend = dist.get_rank(), str(dist.get_backend())
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available() and backend_supports_cuda(backend))
    if device == "cuda":
        _require_cuda("cluster.device=cuda")
    compute_device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    return DistInfo(backend, rank, dist.get_world_size(), compute_device, is_main=rank == 0)


def _choose_backend(device: str, backend: str | None, world_size: int) -> tuple[bool, str]:
    """Return whether this process computes on CUDA, and the backend of its process group.

    Raises ConfigError if `device` is invalid, contradicts `backend`, or needs a CUDA device that is not visible.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"cluster.device={device}: must be auto, cpu or cuda")
    backend_uses_cuda = backend is not None and backend_supports_cuda(backend)
    if device == "cpu" and backend_uses_cuda:
        raise ConfigError(f"cluster.device=cpu: backend={backend} is for CUDA; use backend=gloo")
    if device == "cuda":
        _require_cuda("cluster.device=cuda")
    if backend_uses_cuda and not torch.cuda.is_available():
        if world_size > 1:
            _require_cuda(f"backend={backend}")
        logger.warning("backend=%s: no CUDA device is visible; the single process uses gloo instead", backend)
        return False, "gloo"
    if backend is None:
        use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        return use_cuda, _CUDA_BACKEND if use_cuda else "gloo"
    if device_backends(backend) == {"cuda": "nccl"}:
        backend = _CUDA_BACKEND
    return backend_uses_cuda or device == "cuda", backend


def exchange_text_from_rank_zero(text: str | None) -> str:
    """Return rank 0's text on every rank, before there is a process group; `start_process_group` may follow.

    Rank 0 returns once all ranks have read the text, since it may then exit and end the store.

    Args:
        text: Text of rank 0, possibly empty; ignored on other ranks.

    Raises:
        RankEnvironmentError: The rank variables or the address of rank 0 are incomplete or contradictory.
        RendezvousError, PeerFailure: Ranks did not arrive in time, or rank 0 ended first.
    """
    variables = read_rank_variables()
    if variables.world_size == 1:
        return text or ""
    store = open_store(variables, RENDEZVOUS_TIMEOUT)
    received = gather_at_start(variables, store, (text or "") if variables.rank == 0 else "", RENDEZVOUS_TIMEOUT)[0]
    readers = StoreSync.enter(store, "exchange", variables.rank, variables.world_size)
    readers.count("read")
    if variables.rank == 0:
        readers.poll(lambda: readers.count("read", 0) == variables.world_size, RENDEZVOUS_TIMEOUT)
    return received


def _fill_in_node_variables(variables: RankVariables, nodes: list[str]) -> RankVariables:
    """Complete local rank, local world size and number of nodes from the node of every rank, and export them."""
    rank = variables.rank
    completed = replace(
        variables,
        local_rank=index_on_node(nodes)[rank] if variables.local_rank is None else variables.local_rank,
        local_world_size=variables.local_world_size or nodes.count(nodes[rank]),
        num_nodes=variables.num_nodes or len(set(nodes)),
    )
    if completed != variables:
        names = {"LOCAL_RANK": completed.local_rank, "LOCAL_WORLD_SIZE": completed.local_world_size}
        export_variables({name: str(value) for name, value in {**names, "NUM_NODES": completed.num_nodes}.items()})
    return completed


def _bind_gloo_to_loopback(host: str) -> None:
    """Make gloo listen on the loopback interface only if `host`, the address of the rendezvous, is a loopback one."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if is_loopback(host) and names and not os.environ.get("GLOO_SOCKET_IFNAME"):
        export_variables({"GLOO_SOCKET_IFNAME": names[0]})


def _require_cuda(setting: str) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{setting}: no CUDA device is visible to this process; set cluster.device=cpu (backend gloo)"
        )


def destroy_global_state() -> None:
    """Destroy the process group during cleanup (nemo_automodel/components/distributed/init_utils.py).

    Registered to run at exit; a no-op without a process group. SIGINT is ignored meanwhile, and its handler restored
    afterwards. DeepEP buffers, if any, are freed first, since destroying the group would hang on their pending
    collectives. Queued CUDA work gets _DRAIN_TIMEOUT to finish, since it never does after a peer has died. Environment
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
    """Wait for queued CUDA work, for at most _DRAIN_TIMEOUT: a collective whose peer has died never finishes."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized() and backend_supports_cuda()):
        return
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + _DRAIN_TIMEOUT.total_seconds()
    while not event.query():
        if time.monotonic() > deadline:
            logger.error("CUDA work is still pending after %s: a peer has probably died", _DRAIN_TIMEOUT)
            return
        time.sleep(0.01)
