"""Ranks and groups: rank and world size before and with a process group, members, backends, and random seeds.

Functions named after one of NeMo AutoModel (nemo_automodel/components/distributed/init_utils.py), KempnerForge
(distributed/setup.py) or OLMo-core (distributed/utils.py) follow it, as their docstrings state.
"""

from __future__ import annotations

import hashlib
import os
import random
import zlib
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store, _get_process_group_store

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
from components.distributed.process.rendezvous import keep_store, open_store
from components.distributed.process.store_sync import StoreSync
from components.protocol.errors import ConfigError

_REACH_TIMEOUT = timedelta(minutes=10)  # for connecting to the store before a process group exists
_CPU_ONLY = {"gloo", "mpi"}  # torch lists CUDA for them, but most of their collectives reject CUDA tensors
_LARGEST_SEED = 2**32 - 1  # the limit of numpy.random.seed


class NotInGroupError(ValueError):
    """Call by a rank outside the process group, where only its members may call."""


@dataclass(frozen=True, slots=True)
class Members:
    """Members of a process group, seen from this rank."""

    store: dist.Store
    ranks: tuple[int, ...]  # global ranks in group order
    rank: int  # this process's rank within the group
    node: str

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def sync(self, name: str) -> StoreSync:
        """Return this rank's next synchronization `name` with the other members."""
        return StoreSync.enter(self.store, name, self.rank, self.size)

    def nodes(self, timeout: timedelta) -> list[str]:
        """Return the node of each member in group order. The first call waits until all members have made it.

        Raises:
            MissingRanks: Some members did not call within `timeout`.
        """
        sync = StoreSync(dist.PrefixStore("nodes", self.store), self.rank, self.size)
        return sync.gather(self.node, timeout)


def index_on_node(nodes: list[str]) -> list[int]:
    """Return the index of each member among those of its node, 0 for the first."""
    seen: Counter[str] = Counter()
    indices = []
    for node in nodes:
        indices.append(seen[node])
        seen[node] += 1
    return indices


def is_distributed() -> bool:
    """Return whether a process group is initialized (OLMo-core, distributed/utils.py)."""
    return dist.is_available() and dist.is_initialized()


def require_member(group: dist.ProcessGroup | None) -> None:
    """Raise NotInGroupError if this process is not a member of `group` (None: all ranks)."""
    if group is not None and dist.get_rank(group) < 0:
        raise NotInGroupError(
            f"rank {dist.get_rank()} is not a member of this process group; only its members may make this call"
        )


def find_members(group: dist.ProcessGroup | None) -> Members | None:
    """Return the members of `group` (None: all ranks), or None if this process is its only member.

    Before `init_process_group` the members are the ranks of the environment, connected through the rendezvous store.

    Raises:
        NotInGroupError: This process is not a member of `group`.
        RankEnvironmentError, RendezvousError: No process group exists, and the rendezvous failed.
    """
    if not is_distributed():
        variables = read_rank_variables()
        if variables.world_size == 1:
            return None
        store = dist.PrefixStore("uninitialized", open_store(variables, _REACH_TIMEOUT))
        return Members(store, tuple(range(variables.world_size)), variables.rank, variables.node)
    require_member(group)
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1:
        return None
    keep_store(_get_default_store(), dist.get_rank(), dist.get_world_size())
    variables = read_local_variables(None, dist.get_rank(), dist.get_world_size())
    members = f"{ranks[0]}-{ranks[-1]}-{zlib.crc32(repr(ranks).encode()):08x}"
    store = dist.PrefixStore(f"meshbook/{members}", _get_process_group_store(group or _get_default_group()))
    return Members(store, ranks, dist.get_rank(group), variables.node)


def get_rank_safe() -> int:
    """Get the rank, even if torch.distributed is not initialized (NeMo AutoModel)."""
    return dist.get_rank() if is_distributed() else read_rank_variables().rank


def get_world_size_safe() -> int:
    """Get the number of ranks, even if torch.distributed is not initialized (NeMo AutoModel)."""
    return dist.get_world_size() if is_distributed() else read_rank_variables().world_size


def get_local_rank_preinit() -> int:
    """Get the local rank from the environment, for use before `init_process_group` (NeMo AutoModel).

    LOCAL_RANK is also read if RANK and WORLD_SIZE are not set.
    """
    variables = read_rank_variables()
    return read_lone_local_variables()[0] if variables.source is Source.single else _local_rank(variables)


def get_local_world_size_preinit() -> int:
    """Get the local world size from the environment, for use before `init_process_group` (NeMo AutoModel).

    LOCAL_WORLD_SIZE is also read if RANK and WORLD_SIZE are not set.
    """
    variables = read_rank_variables()
    return read_lone_local_variables()[1] if variables.source is Source.single else _local_world_size(variables)


def get_world_info() -> tuple[int, int, int]:
    """Return (rank, local_rank, world_size) from environment variables (KempnerForge).

    Works under torchrun and srun (SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS). In a Slurm step of several tasks it also
    sets RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, for code that reads those; destroying the process group
    restores them. A process is in a step if SLURM_STEP_ID is set or SLURM_PROCID is above 0. In a batch shell or the
    shell of `salloc` the result is that of a single process.
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
    """Return whether this is rank 0 of the process group, or without one of the environment (KempnerForge)."""
    return get_rank_safe() == 0


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Get the rank within the process group, -1 for a process outside it (OLMo-core).

    Before a process group is initialized, get the rank of the environment, so that only rank 0 gets 0.
    """
    return dist.get_rank(group) if is_distributed() else read_rank_variables().rank


def get_global_rank(group_rank: int, group: dist.ProcessGroup | None = None) -> int:
    """Translate a rank within a group into its global rank (OLMo-core)."""
    if not is_distributed() or group is None:
        return group_rank
    return dist.get_global_rank(group, group_rank)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Get the world size of the process group, 1 if none is initialized (OLMo-core).

    Raises NotInGroupError for a process outside `group`.
    """
    if not is_distributed():
        return 1
    require_member(group)
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """Get the local rank within the current node, 0 without a process group (OLMo-core).

    Reads LOCAL_RANK (or Slurm's SLURM_LOCALID). Raises RankEnvironmentError if neither is set: with a default of 0,
    two ranks of a node would write the same file.
    """
    return _local_rank(_running_variables()) if is_distributed() else 0


def get_fs_local_rank(group: dist.ProcessGroup | None = None) -> int:
    """Get the rank among those with the same file system, 0 without a process group (OLMo-core).

    FS_LOCAL_RANK if it is set. Otherwise the rank in `group` with OLMO_SHARED_FS=1 (all ranks share the file system),
    and the local rank without it. Raises NotInGroupError for a process outside `group`.
    """
    if not is_distributed():
        return 0
    require_member(group)
    value = read_integer("FS_LOCAL_RANK")
    if value is not None:
        return value
    return get_rank(group) if os.environ.get("OLMO_SHARED_FS") == "1" else get_local_rank()


def get_local_world_size() -> int:
    """Get the number of ranks on this node, 1 without a process group (OLMo-core).

    Reads LOCAL_WORLD_SIZE, NUM_NODES or Slurm's variables. Raises RankEnvironmentError if none is set.
    """
    return _local_world_size(_running_variables()) if is_distributed() else 1


def get_num_nodes() -> int:
    """Get the number of nodes of the default process group, 1 without one (OLMo-core).

    Reads NUM_NODES, torchrun's GROUP_WORLD_SIZE, Slurm's variables, or LOCAL_WORLD_SIZE if it divides the world size.
    Raises RankEnvironmentError if none is set, or if they contradict the world size.
    """
    if not is_distributed():
        return 1
    variables = _running_variables()
    if variables.num_nodes is None:
        local = variables.local_world_size or "unset"
        raise RankEnvironmentError(
            f"the number of nodes is unknown with WORLD_SIZE={variables.world_size}, LOCAL_WORLD_SIZE={local}; "
            "set NUM_NODES"
        )
    return variables.num_nodes


def validate_env_vars() -> None:
    """Validate the rank variables against the process group, if there is one (OLMo-core).

    Raises:
        RankEnvironmentError: RANK or WORLD_SIZE differs from the process group, LOCAL_RANK is missing, or the number of
            local ranks or of nodes is missing or contradicts the others.
    """
    if not is_distributed():
        return
    problems = [
        f"{name}={value}: must equal the process group's value, {actual}; unset {name} or correct it"
        for name, actual in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size()))
        if (value := read_integer(name)) is not None and value != actual
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
            "start with torchrun or srun, or set it to the index of this process among those of its node"
        )
    return variables.local_rank


def _local_world_size(variables: RankVariables) -> int:
    if variables.local_world_size is None:
        raise RankEnvironmentError(
            f"LOCAL_WORLD_SIZE is not set on rank {variables.rank} of {variables.world_size}: "
            "start with torchrun or srun, or set it (or NUM_NODES, if every node has the same number of processes)"
        )
    return variables.local_world_size


def device_backends(backend: str) -> dict[str, str]:
    """Return device type -> backend for a name such as nccl or a list such as cpu:gloo,cuda:nccl.

    Raises ValueError for a name that is not registered with torch.
    """
    if backend == dist.Backend.UNDEFINED:  # initialized without a name: torch chooses by the tensor's device
        return dict(dist.Backend.default_device_backend_map)
    if ":" in backend:
        return dict(entry.split(":", 1) for entry in backend.lower().split(","))
    name = backend.lower()
    capability = dist.Backend.backend_capability.get(name)
    if capability is None:
        raise ValueError(f"backend={backend}: must be one of {', '.join(dist.Backend.backend_capability)}")
    return {device: name for device in capability if not (name in _CPU_ONLY and device != "cpu")}


def backend_supports_cuda(backend: str | None = None) -> bool:
    """Return whether a backend supports CUDA tensors (OLMo-core, distributed/utils.py).

    None: the backend of the running process group; without one, return whether CUDA is available.
    """
    if backend is None and not dist.is_initialized():
        return torch.cuda.is_available()
    return "cuda" in device_backends(backend or str(dist.get_backend()))


def backend_supports_cpu(backend: str | None = None) -> bool:
    """Return whether a backend supports CPU tensors (OLMo-core, distributed/utils.py).

    None: the backend of the running process group; without one, return True.
    """
    if backend is None and not dist.is_initialized():
        return True
    return "cpu" in device_backends(backend or str(dist.get_backend()))


def provides(backend: str, requested: str) -> bool:
    """Return whether `backend` has every device-backend pair of `requested`: cpu:gloo,cuda:nccl provides nccl."""
    provided = device_backends(backend)
    return all(provided.get(device) == name for device, name in device_backends(requested).items())


def _set_seed(seed: int, rank: int, pp_rank: int = 0) -> None:
    """Seed torch (CPU and all CUDA devices), `random` and numpy (KempnerForge, distributed/setup.py).

    The seed is the same on all ranks of a pipeline stage and differs between stages. `rank` is unused and kept for
    the published signature; use `stream(seed, rank)` for a stream that differs between ranks.

    Raises ConfigError, before any generator is seeded, if the seed is out of numpy's range.
    """
    effective = seed + pp_rank
    if not 0 <= effective <= _LARGEST_SEED:
        raise ConfigError(f"run.seed={seed}: with pipeline rank {pp_rank} it must lie between 0 and {_LARGEST_SEED}")
    torch.manual_seed(effective)
    torch.cuda.manual_seed_all(effective)
    random.seed(effective)
    np.random.seed(effective)


def stream(seed: int, *coordinates: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator seeded by a hash of `seed` and `coordinates`, so that other coordinates give another stream.

    For randomness that must differ between ranks although `_set_seed` seeds them alike, such as data augmentation per
    dp rank, or dropout on activations sharded over tp.
    """
    digest = hashlib.sha256(repr((seed, *coordinates)).encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:8], "big"))
    return generator
