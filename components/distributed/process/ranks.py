"""Who am I among the ranks, and among those of my node: before, during and after the process group."""

from __future__ import annotations

import os

import torch.distributed as dist

from components.distributed.process.environment import (
    RankEnvironmentError,
    RankVariables,
    Source,
    export_variables,
    read_integer,
    read_local_variables,
    read_lone_local_variables,
    read_rank_variables,
)
from components.distributed.process.groups import is_distributed, require_member


def get_rank_safe() -> int:
    """Get the distributed rank safely, even if torch.distributed is not initialized (seed page 000)."""
    return dist.get_rank() if is_distributed() else read_rank_variables().rank


def get_world_size_safe() -> int:
    """Get the number of ranks safely, even if torch.distributed is not initialized (seed page 000)."""
    return dist.get_world_size() if is_distributed() else read_rank_variables().world_size


def get_local_rank_preinit() -> int:
    """Get the local rank from the environment, intended for use before full init (seed page 000).

    LOCAL_RANK counts without RANK and WORLD_SIZE too.
    """
    variables = read_rank_variables()
    return read_lone_local_variables()[0] if variables.source is Source.single else _local_rank(variables)


def get_local_world_size_preinit() -> int:
    """Get the local world size from the environment, intended for use before full init (seed page 000).

    LOCAL_WORLD_SIZE counts without RANK and WORLD_SIZE too.
    """
    variables = read_rank_variables()
    return read_lone_local_variables()[1] if variables.source is Source.single else _local_world_size(variables)


def get_world_info() -> tuple[int, int, int]:
    """Return (rank, local_rank, world_size) from environment variables (seed page 003, KempnerForge).

    Works under torchrun and srun (SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS). In a Slurm step of several
    tasks it also sets RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, for code that reads those;
    destroying the process group takes them back. A process is in a step where SLURM_STEP_ID is set or
    SLURM_PROCID is above 0. A batch shell or `salloc` is no step: there it is the single process that it is.
    """
    variables = read_rank_variables()
    rank, local_rank, world_size = variables.rank, _local_rank(variables), variables.world_size
    if variables.source is Source.srun:
        names = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
        if variables.local_world_size is not None:
            names["LOCAL_WORLD_SIZE"] = variables.local_world_size
        export_variables({name: str(value) for name, value in names.items()})
    return rank, local_rank, world_size


def is_rank_zero() -> bool:
    """Check if the current process is rank 0: the process group's word, else the environment's (page 003)."""
    return get_rank_safe() == 0


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Get the rank within the process group, -1 for a process outside it (seed page 002, OLMo-core).

    Before a process group is initialised, the rank that the environment tells: 0 only on rank 0.
    """
    return dist.get_rank(group) if is_distributed() else read_rank_variables().rank


def get_global_rank(group_rank: int, group: dist.ProcessGroup | None = None) -> int:
    """Translate a rank within a group into its global rank (seed page 002, OLMo-core)."""
    if not is_distributed() or group is None:
        return group_rank
    return dist.get_global_rank(group, group_rank)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Get the world size of the process group; always 1 where none is initialised (seed page 002, OLMo-core).

    Raises NotInGroupError for a process outside `group`, which cannot know.
    """
    if not is_distributed():
        return 1
    require_member(group)
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """Get the local rank within the current node; 0 without a process group (seed page 002, OLMo-core).

    Relies on LOCAL_RANK (or Slurm's SLURM_LOCALID). Raises RankEnvironmentError where neither is set: two
    ranks that both took themselves for the first of their node would write the same file.
    """
    return _local_rank(_running_variables()) if is_distributed() else 0


def get_fs_local_rank(group: dist.ProcessGroup | None = None) -> int:
    """Get the rank among those that see the same file system (seed page 002, OLMo-core).

    FS_LOCAL_RANK where it is set; with OLMO_SHARED_FS=1, all ranks do: the rank in `group`; else those of
    the node: the local rank. Always 0 without a process group. Raises NotInGroupError for a process outside
    `group`.
    """
    if not is_distributed():
        return 0
    require_member(group)
    stated = read_integer("FS_LOCAL_RANK")
    if stated is not None:
        return stated
    return get_rank(group) if os.environ.get("OLMO_SHARED_FS") == "1" else get_local_rank()


def get_local_world_size() -> int:
    """Get the number of ranks on this node; always 1 without a process group (seed page 002, OLMo-core).

    Relies on LOCAL_WORLD_SIZE, NUM_NODES or Slurm. Raises RankEnvironmentError where none is set.
    """
    return _local_world_size(_running_variables()) if is_distributed() else 1


def get_num_nodes() -> int:
    """Get the number of nodes of the default process group; always 1 without one (seed page 002, OLMo-core).

    Relies on NUM_NODES, torchrun's GROUP_WORLD_SIZE, Slurm, or LOCAL_WORLD_SIZE where that divides the
    ranks. Raises RankEnvironmentError where they contradict the number of ranks, or none is set.
    """
    if not is_distributed():
        return 1
    variables = _running_variables()
    if variables.num_nodes is None:
        stated = f"LOCAL_WORLD_SIZE={variables.local_world_size}" if variables.local_world_size else "none of them"
        raise RankEnvironmentError(
            f"the number of nodes is unknown: {variables.world_size} ranks, {stated} set; set NUM_NODES"
        )
    return variables.num_nodes


def validate_env_vars() -> None:
    """Validate distributed environment variables, called by `init_distributed` (seed page 002, OLMo-core).

    Nothing to check without a process group.

    Raises:
        RankEnvironmentError: RANK or WORLD_SIZE differ from the process group, LOCAL_RANK is missing, or
            the number of ranks on this node or of nodes is missing or contradicts the others.
    """
    if not is_distributed():
        return
    problems = [
        f"{name}={stated}: the process group says {actual}; unset {name} or correct it"
        for name, actual in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size()))
        if (stated := read_integer(name)) is not None and stated != actual
    ]
    for check in (get_local_rank, get_local_world_size, get_num_nodes, get_fs_local_rank):
        try:
            check()
        except RankEnvironmentError as error:
            problems += error.problems
    if problems:
        raise RankEnvironmentError(list(dict.fromkeys(problems)))


def _running_variables() -> RankVariables:
    return read_local_variables(None, dist.get_rank(), dist.get_world_size())


def _local_rank(variables: RankVariables) -> int:
    if variables.local_rank is None:
        raise RankEnvironmentError(
            f"LOCAL_RANK is not set on rank {variables.rank} of {variables.world_size}: "
            "start with torchrun or srun, or set it to the number of this process among those of its node"
        )
    return variables.local_rank


def _local_world_size(variables: RankVariables) -> int:
    if variables.local_world_size is None:
        raise RankEnvironmentError(
            f"LOCAL_WORLD_SIZE is not set on rank {variables.rank} of {variables.world_size}: "
            "start with torchrun or srun, or set it (or NUM_NODES, where all nodes have as many processes)"
        )
    return variables.local_world_size
