"""The one start-up behind every `init_*` of this package: find the ranks, choose the device, start the group.

Recipes call `start_process_group`; `initialize_distributed` (components.distributed.init) and the two
`init_distributed` (components.distributed.utils and .mesh) are thin faces of it.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from components.config.errors import ConfigError
from components.distributed.process.backends import backend_supports_cuda, device_backends
from components.distributed.process.environment import (
    RankVariables,
    export_variables,
    read_rank_variables,
)
from components.distributed.process.groups import index_on_node
from components.distributed.process.network import _set_nccl_env
from components.distributed.process.rendezvous import LOOPBACK, is_loopback, meet, meeting_host, open_store
from components.distributed.process.shutdown import destroy_global_state
from components.distributed.process.store_sync import StoreSync

logger = logging.getLogger(__name__)

CUDA_BACKEND = "cpu:gloo,cuda:nccl"  # nccl alone could not reduce a CPU tensor, gloo alone hardly a CUDA tensor
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class DistInfo:
    """Holds information about the distributed training environment (seed page 000, NeMo AutoModel)."""

    backend: str
    """What the process group really runs on, such as gloo or cpu:gloo,cuda:nccl."""
    rank: int
    world_size: int
    device: torch.device
    """Where this process computes."""
    is_main: bool
    """Whether this is rank 0."""


def start_process_group(
    device: str = "auto",
    backend: str | None = None,
    *,
    rendezvous_timeout: timedelta = RENDEZVOUS_TIMEOUT,
    collective_timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> DistInfo:
    """Start the process group of all ranks, and return what it really is; a second call only returns it.

    One process needs no address and gets a group of one. Ranks of several nodes get the network settings of
    `_set_nccl_env`, where the environment does not have its own. The CUDA device (local rank modulo the visible
    devices) is set before any communication. The group is destroyed at exit.

    Args:
        device: auto (CUDA where there is one), cpu or cuda.
        backend: backend of torch.distributed; None: gloo, with nccl beside it where CUDA is used.
        rendezvous_timeout: how long to wait for all ranks to appear.
        collective_timeout: how long one collective may take, a checkpoint's barrier included.

    Raises:
        RankEnvironmentError: the rank variables or the address of rank 0 are incomplete or contradictory.
        ConfigError: no CUDA device for `device` or `backend`.
        RendezvousError: ranks did not appear in time; names them.
    """
    if dist.is_initialized():
        return current_info(device)
    variables = read_rank_variables()
    if variables.world_size == 1:
        store = None
        _keep_to_loopback(LOOPBACK)
    else:
        host = meeting_host(variables)
        _keep_to_loopback(host)
        if not is_loopback(host):
            # torch's own default: a timeout ends the process without waiting for an abort, which may hang too.
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
    """Start the process group of ranks that are known and can reach `store` (None: there is one process).

    Args:
        timeouts: for the rendezvous and for a collective.
        options: further arguments of `torch.distributed.init_process_group`.
    """
    use_cuda, backend = choose_backend(device, backend, variables.world_size)
    if store is None:
        store = dist.HashStore()
    else:
        variables = _located(variables, meet(variables, store, variables.node, timeouts[0]))
    if use_cuda:
        use_cuda_device(variables.local_rank or 0)
    start = StoreSync.enter(store, "default_pg", variables.rank, variables.world_size)  # a new start, new keys
    dist.init_process_group(
        backend,
        store=start.store,
        rank=variables.rank,
        world_size=variables.world_size,
        timeout=timeouts[1],
        **options,
    )
    start.store.set_timeout(timeouts[1])  # nccl connects at the first collective, by which time ranks may lie apart
    atexit.unregister(destroy_global_state)
    atexit.register(destroy_global_state)
    return current_info(device)


def use_cuda_device(local_rank: int) -> None:
    """Make this process compute on its own CUDA device, before it opens a context on device 0 by communicating.

    Where each process sees only its own device, that is device 0 whatever the local rank.
    """
    torch.cuda.set_device(local_rank % torch.cuda.device_count())


def current_info(device: str = "auto") -> DistInfo:
    """Return the truth about the process group that is running."""
    rank, backend = dist.get_rank(), str(dist.get_backend())
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available() and backend_supports_cuda(backend))
    if device == "cuda":
        _require_cuda("cluster.device=cuda")
    place = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    return DistInfo(backend, rank, dist.get_world_size(), place, is_main=rank == 0)


def choose_backend(device: str, backend: str | None, world_size: int) -> tuple[bool, str]:
    """Return whether this process computes on CUDA, and the backend of its process group.

    Raises ConfigError where the two cannot go together here.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"cluster.device={device}: must be auto, cpu or cuda")
    wants_cuda = backend is not None and backend_supports_cuda(backend)
    if device == "cpu" and wants_cuda:
        raise ConfigError(f"cluster.device=cpu: backend={backend} is for CUDA; use backend=gloo")
    if device == "cuda":
        _require_cuda("cluster.device=cuda")
    if wants_cuda and not torch.cuda.is_available():
        if world_size > 1:
            _require_cuda(f"backend={backend}")
        logger.warning("backend=%s: no CUDA device is visible; a single process runs on gloo instead", backend)
        return False, "gloo"
    if backend is None:
        use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        return use_cuda, CUDA_BACKEND if use_cuda else "gloo"
    if device_backends(backend) == {"cuda": "nccl"}:
        backend = CUDA_BACKEND
    return wants_cuda or device == "cuda", backend


def exchange_text_from_rank_zero(text: str | None) -> str:
    """Return rank 0's text on every rank, before there is a process group; `start_process_group` may follow.

    Rank 0 returns once all ranks have read: it may end at once, and the store with it.

    Args:
        text: what rank 0 says, '' when it has nothing to say; ignored on other ranks.

    Raises:
        RankEnvironmentError: the rank variables or the address of rank 0 are incomplete or contradictory.
        RendezvousError, PeerFailure: ranks did not appear in time, or rank 0 ended without a word.
    """
    variables = read_rank_variables()
    if variables.world_size == 1:
        return text or ""
    store = open_store(variables, RENDEZVOUS_TIMEOUT)
    spoken = meet(variables, store, (text or "") if variables.rank == 0 else "", RENDEZVOUS_TIMEOUT)[0]
    readers = StoreSync.enter(store, "exchange", variables.rank, variables.world_size)
    readers.count("read")
    if variables.rank == 0:
        readers.poll(lambda: readers.count("read", 0) == variables.world_size, RENDEZVOUS_TIMEOUT)
    return spoken


def _located(variables: RankVariables, nodes: list[str]) -> RankVariables:
    """Fill in what the environment left open about this rank's place, and set the variables that tell it.

    `nodes` holds the node of every rank.
    """
    rank = variables.rank
    found = replace(
        variables,
        local_rank=index_on_node(nodes)[rank] if variables.local_rank is None else variables.local_rank,
        local_world_size=variables.local_world_size or nodes.count(nodes[rank]),
        num_nodes=variables.num_nodes or len(set(nodes)),
    )
    if found != variables:
        names = {"LOCAL_RANK": found.local_rank, "LOCAL_WORLD_SIZE": found.local_world_size}
        export_variables({name: str(value) for name, value in {**names, "NUM_NODES": found.num_nodes}.items()})
    return found


def _keep_to_loopback(host: str) -> None:
    """Where the ranks meet on this machine, make gloo listen on its loopback interface only."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if is_loopback(host) and names and not os.environ.get("GLOO_SOCKET_IFNAME"):
        export_variables({"GLOO_SOCKET_IFNAME": names[0]})


def _require_cuda(asked: str) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(f"{asked}: no CUDA device is visible to this process; use cpu (backend gloo)")
