"""Ranks that run a section one after the other: the first of each node before its others, or n at a time.

`FirstRankPerNode` and `do_n_at_a_time` are names of seed page 001 (NeMo AutoModel).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Literal, TypeVar

import torch.distributed as dist

from components.distributed.process.groups import Members, find_members, index_on_node
from components.distributed.process.store_sync import PeerFailure, StoreSync

logger = logging.getLogger(__name__)

PATIENCE = timedelta(hours=10)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry into the section: who is in it, and what this rank is in it."""

    members: Members
    sync: StoreSync
    is_first: bool
    firsts: int  # number of nodes
    timeout: timedelta


class FirstRankPerNode(ContextDecorator):
    """Context manager to enforce the first rank of each node to process a section before the other ranks.

        with FirstRankPerNode() as is_first:
            ...  # the first rank of the node prepares a file; the others then find it

    The others wait until the first ranks of *all* nodes are through, for at most `timeout`, which no process
    group's timeout shortens. If a first rank fails, its exception is raised as it is on that rank, and as
    PeerFailure on all that wait: none of them enters the section. If another rank fails, the next section fails
    everywhere. In a single process nothing waits. Sections may be nested, and the object may be a decorator.
    Before `init_process_group` the ranks meet at the rendezvous. The scoped code should hold no collective.

    Args:
        group: Process group whose members take part, each node with those it has; None: all ranks.
        timeout: Maximum time to wait; None: what `__enter__` says.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        self._group = group
        self._timeout = timeout
        self._entries: list[_Entry | None] = []

    def _recreate_cm(self) -> FirstRankPerNode:
        return FirstRankPerNode(self._group, self._timeout)  # a decorated function may call itself

    def __enter__(self, timeout: timedelta = PATIENCE) -> bool:
        """Wait for this rank's turn.

        Returns:
            True - if the current process is the first rank of its node, False - otherwise.

        Raises:
            PeerFailure: a rank failed in this section, or after it was first, in the one before.
            TimeoutError: the ranks did not all arrive, or the first ranks did not finish, within `timeout`.
        """
        entry = self._arrive(timeout if self._timeout is None else self._timeout)
        if entry is not None and not entry.is_first:
            _await_firsts(entry)
        self._entries.append(entry)
        return entry is None or entry.is_first

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> Literal[False]:
        """Let the waiting ranks in, or tell them why not. Returns False: an exception goes on its way."""
        entry = self._entries.pop()
        if entry is None:
            return False
        if exc_type is not None:
            _report_failure(entry, f"{exc_type.__name__}: {exc_val}")
        elif entry.is_first:
            if entry.sync.count("firsts_done") == entry.firsts:
                entry.sync.settle_verdict(None)
            _await_firsts(entry)
        return False

    def _arrive(self, timeout: timedelta) -> _Entry | None:
        members = find_members(self._group)
        if members is None:
            return None
        sync = members.sync("first_rank")
        nodes = members.nodes(timeout)
        indices = index_on_node(nodes)
        if _earlier(members).has_verdict():
            _earlier(members).raise_verdict("FirstRankPerNode")
        return _Entry(members, sync, indices[members.rank] == 0, indices.count(0), timeout)


def _await_firsts(entry: _Entry) -> None:
    if not entry.sync.poll(entry.sync.has_verdict, entry.timeout):
        seconds = f"{entry.timeout.total_seconds():g} s"
        entry.sync.settle_verdict(TimeoutError(f"the first rank of a node was not through after {seconds}"))
    entry.sync.raise_verdict("FirstRankPerNode")


def _report_failure(entry: _Entry, error: str) -> None:
    members = entry.members
    failure = PeerFailure(f"rank {members.ranks[members.rank]} ({members.node}) failed with {error}")
    logger.error("FirstRankPerNode: %s", failure)
    if entry.is_first:
        entry.sync.settle_verdict(failure)
        entry.sync.farewell(entry.sync.size - 1)
    else:
        _earlier(members).settle_verdict(failure)


def _earlier(members: Members) -> StoreSync:
    """What the ranks that are not first leave behind when they fail: nobody waits for those."""
    return StoreSync(dist.PrefixStore("first_rank/failed", members.store), members.rank, members.size)


T = TypeVar("T")


def do_n_at_a_time(
    f: Callable[[], T],
    *,
    n: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
) -> T:
    """Call a function `f` in a distributed context from at most `n` ranks at a time, and return its result.

    All ranks call it exactly once, and return when all have. If it raises on one rank, that rank raises the
    exception, every other rank PeerFailure, and the ranks whose turn had not come never call it.

    Args:
        f: The function to call from each rank.
        n: The level of concurrency. Defaults to the number of nodes of the group, in which case one rank
            from each node will call `f` at a time, however the ranks are spread over the nodes.
        process_group: The process group to use; only its members may call.
        world_size, local_rank: Take turns by this position among so many, instead of by the position in the
            group. With those of a node, each node has its own turns.

    Raises:
        NotInGroupError: this process is no member of `process_group`.
        ValueError: n or the position is out of range.
        PeerFailure: `f` raised on another rank.
        TimeoutError: the ranks did not arrive, or did not finish, within 10 hours.
    """
    if n is not None and n < 1:
        raise ValueError(f"n={n}: at least one rank at a time must call the function")
    if (world_size is None) != (local_rank is None):
        raise ValueError(f"world_size={world_size}, local_rank={local_rank}: give both or none")
    if world_size is not None and local_rank is not None and not 0 <= local_rank < world_size:
        raise ValueError(f"local_rank={local_rank}: must lie between 0 and world_size - 1 = {world_size - 1}")
    members = find_members(process_group)
    if members is None:
        return f()
    turns = _turns(members, n, world_size, local_rank)
    sync = members.sync("turns")
    before = sum(turn < turns[members.rank] for turn in turns)
    _wait(sync, lambda: sync.count("finished", 0) >= before)
    try:
        result = f()
    except BaseException as error:
        who = f"rank {members.ranks[members.rank]}"
        sync.settle_verdict(PeerFailure(f"{who} failed with {type(error).__name__}: {error}"))
        sync.farewell(sync.size - 1)
        raise
    if sync.count("finished") == sync.size:
        sync.settle_verdict(None)
    _wait(sync, sync.has_verdict)
    return result


def _turns(members: Members, n: int | None, world_size: int | None, local_rank: int | None) -> list[int]:
    """Return the turn of each member; those of one turn call at the same time."""
    asked = [
        json.loads(value)
        for value in members.sync("positions").gather(json.dumps([n, world_size, local_rank]), PATIENCE)
    ]
    nodes = members.nodes(PATIENCE)
    on_node = index_on_node(nodes)
    if len({position[0] for position in asked}) > 1:
        raise ValueError(f"n differs between ranks: {[position[0] for position in asked]}")
    # Neighbours in this order run on different nodes, so that each turn spreads over as many as it can.
    order = sorted(range(members.size), key=lambda rank: (on_node[rank], nodes[rank], rank))
    place = {rank: position for position, rank in enumerate(order)}
    turns = []
    for rank, (limit, size, position) in enumerate(asked):
        if size is not None:
            turns.append(position % -(-size // (limit or len(set(nodes)))))
        else:
            turns.append(on_node[rank] if limit is None else place[rank] // limit)
    return turns


def _wait(sync: StoreSync, ready: Callable[[], bool]) -> None:
    if not sync.poll(lambda: sync.has_verdict() or ready(), PATIENCE):
        sync.settle_verdict(TimeoutError(f"the ranks did not finish within {PATIENCE}"))
    if sync.has_verdict():
        sync.raise_verdict("do_n_at_a_time")
