"""Distributed helpers that also work in a single process, with the names of two published modules.

They are NeMo AutoModel's components.distributed.utils and OLMo-core's distributed.utils; most implementations are in
process/.

ranks         get_rank get_global_rank get_local_rank get_fs_local_rank get_world_size
              get_local_world_size get_num_nodes validate_env_vars             (groups.py)
values        synchronize_value synchronize_flag all_reduce_value broadcast_object
              all_gather all_gather_object reduce_loss                         (collectives.py)
gradients     get_sync_ctx                                                     (fsdp.py)
barriers      barrier barrier_and_log _barrier_with_timeout _create_gloo_group (barriers.py)
ordering      FirstRankPerNode do_n_at_a_time                                  (barriers.py)
start-up      init_distributed                                                 (process_group.py)
other         dp_eval_sample_shard get_mesh_coordinates
              backend_supports_cpu backend_supports_cuda                       (groups.py)
"""

from __future__ import annotations

import logging
import os
from datetime import datetime, timedelta
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from components.distributed.collectives import (
    all_gather,
    all_gather_object,
    all_reduce_value,
    broadcast_object,
    reduce_loss,
    synchronize_flag,
    synchronize_value,
)
from components.distributed.fsdp import get_sync_ctx
from components.distributed.process.barriers import (
    FirstRankPerNode,
    barrier,
    barrier_until,
    create_gloo_group,
    do_n_at_a_time,
)
from components.distributed.process.environment import (
    RankEnvironmentError,
    export_variables,
    read_local_variables,
    read_rank_variables,
)
from components.distributed.process.groups import (
    backend_supports_cpu,
    backend_supports_cuda,
    get_fs_local_rank,
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_num_nodes,
    get_rank,
    get_world_size,
    is_distributed,
    provides,
    validate_env_vars,
)
from components.distributed.process.process_group import (
    RENDEZVOUS_TIMEOUT,
    current_info,
    launch_group,
    start_process_group,
    use_cuda_device,
)
from components.distributed.process.rendezvous import open_store
from components.protocol.errors import ConfigError

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
    """Initialize the process group, and check and set the environment variables of ranks.

    Same signature as OLMo-core's distributed.utils.init_distributed. If a process group exists, only the variables and
    the CUDA device are set. `destroy_global_state` restores every variable set here.

    Args:
        backend: Backend(s) of torch.distributed. nccl means cpu:gloo,cuda:nccl.
        timeout: Timeout of a collective.
        shared_filesytem: Whether all nodes share a file system, for `get_fs_local_rank`. Spelled as in OLMo-core;
            `shared_filesystem` is accepted too. OLMO_SHARED_FS=0 overrides the default True, and False overrides
            OLMO_SHARED_FS=1.
        kwargs: Further arguments of `init_process_group`, such as rank, world_size and init_method or store.

    Raises:
        RankEnvironmentError: The variables contradict each other, `rank` and `world_size`, or the process group.
        ConfigError: There is no CUDA device for `backend`, or the running group does not provide `backend`.
        RendezvousError: Not all ranks joined in time.
    """
    shared = kwargs.pop("shared_filesystem", None)
    if shared and not shared_filesytem:
        raise ConfigError("shared_filesystem=True: contradicts shared_filesytem=False; pass only one of them")
    if is_distributed():
        running = str(dist.get_backend())
        if not provides(running, backend) and dist.get_world_size() > 1:
            raise ConfigError(f"backend={backend}: the process group already runs on {running}")
    elif kwargs:
        _start_with_arguments(backend, timeout, **kwargs)
    else:
        start_process_group("auto", backend, collective_timeout=timeout)
    _set_variables(shared_filesytem if shared is None else shared, explicit=shared is not None)
    validate_env_vars()
    info = current_info()
    if info.device.type == "cuda":
        use_cuda_device(get_local_rank())
    logger.info("rank %d = local rank %d, file system rank %d", info.rank, get_local_rank(), get_fs_local_rank())


def _barrier_with_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> bool:
    """Run a barrier with its own timeout, with the signature of NeMo AutoModel's distributed.utils.

    Returns True if the barrier completed, False if it timed out, the same on all ranks; missing ranks are then logged.
    The barrier runs over the rendezvous store, so no process group is created or left broken.
    """
    return barrier_until(timeout, group)


def _create_gloo_group() -> dist.ProcessGroup | None:
    """Create a gloo process group of all ranks; None without a default process group (as in NeMo AutoModel)."""
    return create_gloo_group()


def barrier_and_log(string: str) -> None:
    """Run a barrier, then log a message with the time on rank 0 (as in NeMo AutoModel).

    Each rank logs a line before the barrier (level DEBUG except on rank 0), which shows the ranks that arrived if the
    barrier hangs.
    """
    is_first = get_rank() == 0
    logger.log(logging.INFO if is_first else logging.DEBUG, "[%s] rank %d waits for all ranks", string, get_rank())
    barrier()
    if is_first:
        logger.info("[%s] datetime: %s", string, datetime.now().strftime("%Y-%m-%d %H:%M:%S"))


@runtime_checkable
class _HasStrategy(Protocol):
    """A parallelism config with an attribute `strategy`."""

    strategy: Any


def dp_eval_sample_shard(distributed_config: Any, dp_rank: int, dp_size: int) -> tuple[int, int] | None:
    """Return (dp_rank, dp_size) if eval samples can be sharded over data-parallel ranks, else None.

    Same signature as in NeMo AutoModel's distributed.utils. Only DDP replicates the model, so that ranks can evaluate
    different numbers of samples. Every forward of an FSDP model all-gathers parameters, and ranks with different
    numbers of forwards would hang. Shards may differ by one sample: reduce sums and counts, not means.

    Args:
        distributed_config: Config with an attribute `strategy`, such as ParallelismConfig.
        dp_rank: This rank's coordinate along the data-parallel axis.
        dp_size: Number of ranks along the data-parallel axis.

    Raises ConfigError for a config without a strategy, or a dp_rank out of range.
    """
    if not isinstance(distributed_config, _HasStrategy) or distributed_config.strategy is None:
        name = type(distributed_config).__name__
        raise ConfigError(f"distributed_config={name}: has no attribute `strategy`; pass the parallelism config")
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"dp_rank={dp_rank}: must lie between 0 and dp_size - 1 = {dp_size - 1}")
    return (dp_rank, dp_size) if str(distributed_config.strategy) == "ddp" and dp_size > 1 else None


def get_mesh_coordinates(mesh: DeviceMesh, rank: int | None = None) -> list[int] | None:
    """Return the coordinates of a global rank in a device mesh, None if it is not in the mesh (as in OLMo-core).

    Args:
        rank: Global rank; None: this process.

    Raises ValueError if the mesh contains the rank more than once.
    """
    rank = get_rank() if rank is None else rank
    coordinates = (mesh.mesh == rank).nonzero().tolist()
    if len(coordinates) > 1:
        raise ValueError(f"rank {rank} is at {coordinates} of the mesh: a mesh must contain each rank once")
    return coordinates[0] if coordinates else None


def _start_with_arguments(
    backend: str,
    timeout: timedelta,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    store: dist.Store | None = None,
    **options: Any,
) -> None:
    """Start the process group from explicit arguments; rank and world_size default to the environment variables."""
    if (rank is None) != (world_size is None):
        raise RankEnvironmentError(f"rank={rank}, world_size={world_size}: pass both or neither")
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


def _set_variables(shared_fs: bool, *, explicit: bool) -> None:
    """Export the rank variables that are unset, or all of them in a single process, where set ones may be stale.

    Args:
        shared_fs: Value for OLMO_SHARED_FS.
        explicit: Whether the caller passed `shared_filesystem`, which overrides OLMO_SHARED_FS=0.
    """
    variables = read_local_variables(None, dist.get_rank(), dist.get_world_size())
    values = {
        "RANK": variables.rank,
        "WORLD_SIZE": variables.world_size,
        "LOCAL_RANK": variables.local_rank,
        "LOCAL_WORLD_SIZE": variables.local_world_size,
        "NUM_NODES": variables.num_nodes,
    }
    single = variables.world_size == 1
    unset = {name: str(value) for name, value in values.items() if single or not os.environ.get(name)}
    export_variables({name: value for name, value in unset.items() if value != "None"})
    if shared_fs and not explicit and os.environ.get(SHARED_FS) == "0":
        logger.warning("%s=0 overrides the default shared_filesytem=True", SHARED_FS)
        shared_fs = False
    nodes = variables.num_nodes or 1
    if shared_fs and not explicit and nodes > 1 and variables.rank == 0 and SHARED_FS not in os.environ:
        logger.warning("assuming that the %d nodes share a file system; if not, pass shared_filesytem=False", nodes)
    export_variables({SHARED_FS: "1" if shared_fs else "0"})
