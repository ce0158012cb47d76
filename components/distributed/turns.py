"""Running a function on a few ranks at a time (seed page 002, OLMo-core)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from components.distributed.first_rank import PATIENCE
from components.distributed.groups import Members, find_members, index_on_node
from components.distributed.store_sync import PeerFailure, StoreSync

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
