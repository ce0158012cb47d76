"""Starting and ending a distributed run: the names of seed pages 000 (NeMo AutoModel) and 003 (KempnerForge).

    who am I      get_rank_safe get_world_size_safe get_local_rank_preinit get_local_world_size_preinit
                  get_world_info is_rank_zero                       (ranks.py)
    start         initialize_distributed DistInfo                   (process_group.py)
                  _set_nccl_env _detect_ib_interface _set_seed      (network.py, seeding.py)
                  _barrier_with_timeout                             (barriers.py)
    end           destroy_global_state destroy_distributed          (shutdown.py)

`init_distributed` of page 003 builds a mesh and lives in components.distributed.mesh.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from components.distributed.process.backends import provides
from components.distributed.process.barriers import barrier_within
from components.distributed.process.network import _detect_ib_interface, _set_nccl_env
from components.distributed.process.process_group import DistInfo, start_process_group
from components.distributed.process.ranks import (
    get_local_rank_preinit,
    get_local_world_size_preinit,
    get_rank_safe,
    get_world_info,
    get_world_size_safe,
    is_rank_zero,
)
from components.distributed.process.seeding import _set_seed
from components.distributed.process.shutdown import destroy_distributed, destroy_global_state

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
    """Initialize the torch.distributed environment (seed page 000).

    Sets the device from the local rank, starts the process group, registers its cleanup at exit, and
    returns what is really running. A second call changes nothing and returns that too.

    Args:
        backend: The backend for torch.distributed. nccl stands for cpu:gloo,cuda:nccl, so that CPU tensors
            can be reduced as well; a single process without CUDA runs on gloo, and says so.
        timeout_minutes: How long all ranks may take to appear. It does not bound a collective, which may take
            30 minutes; `start_process_group` sets both.

    Raises:
        RankEnvironmentError, ConfigError, RendezvousError: see `start_process_group`.
    """
    info = start_process_group("auto", backend, rendezvous_timeout=timedelta(minutes=timeout_minutes))
    if info.world_size > 1 and not provides(info.backend, backend):
        logger.warning("backend=%s was asked for, but the process group already runs on %s", backend, info.backend)
    return info


def _barrier_with_timeout(seconds: float, reason: str) -> None:
    """`dist.barrier` with an explicit timeout and a diagnosis (seed page 003).

    Raises BarrierTimeoutError, which names the missing ranks, after `seconds`; RuntimeError for any other
    failure.
    """
    barrier_within(seconds, reason)
