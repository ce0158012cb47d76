"""Members of a process group: their ranks, their nodes, and the store that they share."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store, _get_process_group_store

from components.distributed.process.environment import read_local_variables, read_rank_variables
from components.distributed.process.rendezvous import keep_store, open_store
from components.distributed.process.store_sync import StoreSync

REACH_TIMEOUT = timedelta(minutes=10)  # for connecting to the store before a process group exists


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
        store = dist.PrefixStore("uninitialized", open_store(variables, REACH_TIMEOUT))
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
