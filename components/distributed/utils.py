"""Distributed helpers, most of which work in a single process too: seed pages 001 (NeMo) and 002 (OLMo-core).

ranks         get_rank get_global_rank get_local_rank get_fs_local_rank get_world_size
              get_local_world_size get_num_nodes validate_env_vars             (ranks.py)
values        synchronize_value synchronize_flag all_reduce_value broadcast_object
              all_gather all_gather_object reduce_loss                         (collectives.py)
gradients     get_sync_ctx                                                     (gradient_sync.py)
waiting       barrier barrier_and_log _barrier_with_timeout _create_gloo_group (barriers.py)
taking turns  FirstRankPerNode do_n_at_a_time                                  (first_rank.py, turns.py)
start         init_distributed                                                 (process_group.py)
further       dp_eval_sample_shard get_mesh_coordinates
              backend_supports_cpu backend_supports_cuda                       (backends.py)
"""

from __future__ import annotations

import logging
import os
from datetime import datetime, timedelta
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from components.config.errors import ConfigError
from components.distributed.collectives import (
    all_gather,
    all_gather_object,
    all_reduce_value,
    broadcast_object,
    reduce_loss,
    synchronize_flag,
    synchronize_value,
)
from components.distributed.gradient_sync import get_sync_ctx
from components.distributed.process.backends import backend_supports_cpu, backend_supports_cuda, provides
from components.distributed.process.barriers import barrier, barrier_until, create_gloo_group
from components.distributed.process.environment import (
    RankEnvironmentError,
    export_variables,
    read_local_variables,
    read_rank_variables,
)
from components.distributed.process.groups import is_distributed
from components.distributed.process.ordering import FirstRankPerNode, do_n_at_a_time
from components.distributed.process.process_group import (
    RENDEZVOUS_TIMEOUT,
    current_info,
    launch_group,
    start_process_group,
    use_cuda_device,
)
from components.distributed.process.ranks import (
    get_fs_local_rank,
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_num_nodes,
    get_rank,
    get_world_size,
    validate_env_vars,
)
from components.distributed.process.rendezvous import open_store

__all__ = [
    "FirstRankPerNode",
    "_barrier_with_timeout",
    "_create_gloo_group",
    "all_gather",
    "all_gather_object",
    "all_reduce_value",
    "backend_supports_cpu",
    "backend_supports_cuda",
    "barrier",
    "barrier_and_log",
    "broadcast_object",
    "do_n_at_a_time",
    "dp_eval_sample_shard",
    "get_fs_local_rank",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_mesh_coordinates",
    "get_num_nodes",
    "get_rank",
    "get_sync_ctx",
    "get_world_size",
    "init_distributed",
    "is_distributed",
    "logger",
    "reduce_loss",
    "synchronize_flag",
    "synchronize_value",
    "validate_env_vars",
]

logger = logging.getLogger(__name__)

SHARED_FS = "OLMO_SHARED_FS"


def init_distributed(
    backend: str = "nccl",
    timeout: timedelta = timedelta(seconds=1800),
    shared_filesytem: bool = True,
    **kwargs: Any,
) -> None:
    """Initialize the distributed process group and check and set the environment variables (seed page 002).

    With a process group there already, only the variables and the CUDA device are set. Every variable that is
    set here is put back by `destroy_global_state`.

    Args:
        backend: Backend(s) of torch.distributed. nccl stands for cpu:gloo,cuda:nccl.
        timeout: How long one collective may take.
        shared_filesytem: Whether all nodes see the same files, for `get_fs_local_rank`; spelt as on the page,
            `shared_filesystem` is understood as well. Somebody's OLMO_SHARED_FS=0 outweighs the default, False
            outweighs everything.
        kwargs: Further arguments of `init_process_group`, such as rank, world_size and init_method or store.

    Raises:
        RankEnvironmentError: the variables contradict one another, `rank` and `world_size`, or the process
            group.
        ConfigError: there is no CUDA device for `backend`, or the running group does not provide `backend`.
        RendezvousError: ranks did not appear in time.
    """
    shared = kwargs.pop("shared_filesystem", None)
    if shared and not shared_filesytem:
        raise ConfigError("shared_filesystem=True: contradicts shared_filesytem=False; give one of them")
    if is_distributed():
        running = str(dist.get_backend())
        if not provides(running, backend) and dist.get_world_size() > 1:
            raise ConfigError(f"backend={backend}: the process group already runs on {running}")
    elif kwargs:
        _start_as_told(backend, timeout, **kwargs)
    else:
        start_process_group("auto", backend, collective_timeout=timeout)
    _set_variables(shared_filesytem if shared is None else shared, stated=shared is not None)
    validate_env_vars()
    info = current_info()
    if info.device.type == "cuda":
        use_cuda_device(get_local_rank())
    logger.info("rank %d = local rank %d, file system rank %d", info.rank, get_local_rank(), get_fs_local_rank())


def _barrier_with_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> bool:
    """A timeout wrapper for a barrier, beside the main process group (seed page 001).

    Returns True if the barrier completed, False if the timeout occurred first: the same on all ranks. The
    log then names the missing ranks. No process group is made or harmed.
    """
    return barrier_until(timeout, group)


def _create_gloo_group() -> dist.ProcessGroup | None:
    """Create a gloo process group of all ranks, None where there is no process group (seed page 001)."""
    return create_gloo_group()


def barrier_and_log(string: str) -> None:
    """Perform a distributed barrier and then log a message on rank 0 (seed page 001).

    A line before the barrier (at level DEBUG on the other ranks) tells which ranks had arrived if it hangs.
    """
    first = get_rank() == 0
    logger.log(logging.INFO if first else logging.DEBUG, "[%s] rank %d waits for all ranks", string, get_rank())
    barrier()
    if first:
        logger.info("[%s] datetime: %s", string, datetime.now().strftime("%Y-%m-%d %H:%M:%S"))


@runtime_checkable
class _HasStrategy(Protocol):
    """Any config of a parallel layout."""

    strategy: Any


def dp_eval_sample_shard(distributed_config: Any, dp_rank: int, dp_size: int) -> tuple[int, int] | None:
    """Return (dp_rank, dp_size) to shard eval samples across data-parallel ranks, else None (seed page 001).

    Only plain DDP holds the whole model on every rank, so only there can each rank score samples of its own. A
    sharded model gathers its layers in every forward; ranks that score different numbers of samples would wait
    for one another for ever, so all score the same. Shards may differ by one sample: reduce sums and counts,
    not means.

    Args:
        distributed_config: Anything with an attribute `strategy`, such as ParallelismConfig; ddp means DDP.
        dp_rank: This rank's coordinate along the data-parallel axis.
        dp_size: Ranks along the data-parallel axis.

    Raises ConfigError for a config without a strategy, or a rank outside the axis.
    """
    if not isinstance(distributed_config, _HasStrategy) or distributed_config.strategy is None:
        name = type(distributed_config).__name__
        raise ConfigError(f"distributed_config={name}: has no attribute `strategy`; pass the parallelism config")
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"dp_rank={dp_rank}: must lie between 0 and dp_size - 1 = {dp_size - 1}")
    return (dp_rank, dp_size) if str(distributed_config.strategy) == "ddp" and dp_size > 1 else None


def get_mesh_coordinates(mesh: DeviceMesh, rank: int | None = None) -> list[int] | None:
    """Calculate the coordinates of a global rank on a device mesh, None outside it (seed page 002).

    Args:
        rank: Global rank; None: this process.

    Raises ValueError for a mesh that holds the rank more than once.
    """
    rank = get_rank() if rank is None else rank
    coordinates = (mesh.mesh == rank).nonzero().tolist()
    if len(coordinates) > 1:
        raise ValueError(f"rank {rank} is at {coordinates} of the mesh: a mesh must hold each rank once")
    return coordinates[0] if coordinates else None


def _start_as_told(
    backend: str,
    timeout: timedelta,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    store: dist.Store | None = None,
    **options: Any,
) -> None:
    """Start the process group of the ranks the caller tells of, or else the environment."""
    if (rank is None) != (world_size is None):
        raise RankEnvironmentError(f"rank={rank}, world_size={world_size}: give both or none")
    if rank is None or world_size is None:
        variables = read_rank_variables()
    else:
        variables = read_local_variables(None, rank, world_size)
        export_variables({"RANK": str(rank), "WORLD_SIZE": str(world_size)})
    if store is None and init_method not in (None, "env://"):
        store = next(rendezvous(init_method, variables.rank, variables.world_size, timeout=RENDEZVOUS_TIMEOUT))[0]
    if store is None and variables.world_size > 1:
        store = open_store(variables, RENDEZVOUS_TIMEOUT)
    launch_group(variables, store, "auto", backend, (RENDEZVOUS_TIMEOUT, timeout), **options)


def _set_variables(shared_fs: bool, *, stated: bool) -> None:
    """Set the unset variables that tell of this rank; a single process knows better than all of them."""
    known = read_local_variables(None, dist.get_rank(), dist.get_world_size())
    facts = {
        "RANK": known.rank,
        "WORLD_SIZE": known.world_size,
        "LOCAL_RANK": known.local_rank,
        "LOCAL_WORLD_SIZE": known.local_world_size,
        "NUM_NODES": known.num_nodes,
    }
    alone = known.world_size == 1
    unset = {name: str(fact) for name, fact in facts.items() if alone or not os.environ.get(name)}
    export_variables({name: fact for name, fact in unset.items() if fact != "None"})
    if shared_fs and not stated and os.environ.get(SHARED_FS) == "0":
        logger.warning("%s=0 stands against the default shared_filesytem=True: not shared", SHARED_FS)
        shared_fs = False
    if shared_fs and not stated and (known.num_nodes or 1) > 1 and known.rank == 0 and SHARED_FS not in os.environ:
        logger.warning("%d nodes are taken to see the same files; say shared_filesytem=False if not", known.num_nodes)
    export_variables({SHARED_FS: "1" if shared_fs else "0"})
