"""Starting and ending a distributed run, with the names of two published modules.

They are NeMo AutoModel's components.distributed.init_utils and KempnerForge's distributed.setup; the implementations
are in process/.

    ranks         get_rank_safe get_world_size_safe get_local_rank_preinit get_local_world_size_preinit
                  get_world_info is_rank_zero                       (groups.py)
    start-up      initialize_distributed DistInfo                   (process_group.py)
                  _set_nccl_env _detect_ib_interface _set_seed      (environment.py, groups.py)
                  _barrier_with_timeout                             (barriers.py)
    shutdown      destroy_global_state destroy_distributed          (process_group.py)

KempnerForge's `init_distributed` also builds the mesh and is in components.distributed.mesh.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from components.distributed.process.barriers import barrier_within
from components.distributed.process.environment import _detect_ib_interface, _set_nccl_env
from components.distributed.process.groups import (
    _set_seed,
    get_local_rank_preinit,
    get_local_world_size_preinit,
    get_rank_safe,
    get_world_info,
    get_world_size_safe,
    is_rank_zero,
    provides,
)
from components.distributed.process.process_group import (
    DistInfo,
    destroy_distributed,
    destroy_global_state,
    start_process_group,
)

__all__ = [
    "DistInfo",
    "_barrier_with_timeout",
    "_detect_ib_interface",
    "_set_nccl_env",
    "_set_seed",
    "destroy_distributed",
    "destroy_global_state",
    "get_local_rank_preinit",
    "get_local_world_size_preinit",
    "get_rank_safe",
    "get_world_info",
    "get_world_size_safe",
    "initialize_distributed",
    "is_rank_zero",
]

logger = logging.getLogger(__name__)


def initialize_distributed(backend: str, timeout_minutes: float = 1) -> DistInfo:
    """Initialize the torch.distributed environment, with the signature of NeMo AutoModel's init_utils.

    Sets the device from the local rank, starts the process group and registers its cleanup at exit. A second call
    changes nothing. Returns the actual backend, rank, world size and device.

    Args:
        backend: Backend of torch.distributed. nccl means cpu:gloo,cuda:nccl, so that CPU tensors can be reduced as
            well; a single process without CUDA runs on gloo and logs a warning.
        timeout_minutes: Timeout of the rendezvous. The timeout of collectives is 30 minutes; `start_process_group`
            sets both.

    Raises:
        RankEnvironmentError, ConfigError, RendezvousError: see `start_process_group`.
    """
    info = start_process_group("auto", backend, rendezvous_timeout=timedelta(minutes=timeout_minutes))
    if info.world_size > 1 and not provides(info.backend, backend):
        logger.warning("backend=%s was requested, but the process group already runs on %s", backend, info.backend)
    return info


def _barrier_with_timeout(seconds: float, reason: str) -> None:
    """Run a barrier with its own timeout, with the signature of KempnerForge's distributed.setup.

    Raises BarrierTimeoutError, which lists the missing ranks, after `seconds`, and RuntimeError for any other failure.
    """
    barrier_within(seconds, reason)
