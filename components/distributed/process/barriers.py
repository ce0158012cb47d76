"""Barriers with their own timeouts, and sections that ranks run one after another.

A barrier reports the ranks that did not arrive. A section is run by the first rank of each node before the others
(`FirstRankPerNode`, which follows NeMo AutoModel, nemo_automodel/components/distributed/utils.py), or by n ranks at a
time (`do_n_at_a_time`, which follows OLMo-core, distributed/utils.py).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from components.distributed.process.groups import (
    Members,
    backend_supports_cuda,
    find_members,
    index_on_node,
    is_distributed,
    require_member,
)
from components.distributed.process.store_sync import MissingRanks, PeerFailure, StoreSync

logger = logging.getLogger(__name__)
_DEFAULT_TIMEOUT = timedelta(hours=10)
_T = TypeVar("_T")


class BarrierTimeoutError(RuntimeError):
    """Timeout of a barrier; the message lists the missing ranks."""


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks in the group, for at most the group's timeout (OLMo-core, distributed/utils.py).

    A no-op without a process group. Raises NotInGroupError for a process outside `group`.
    """
    if is_distributed():
        require_member(group)
        dist.barrier(group, device_ids=_device_ids(group))


def _missing_after(timeout: timedelta, group: dist.ProcessGroup | None = None) -> list[int]:
    """Wait for all members of `group`, and return the global ranks that did not arrive within `timeout`.

    All ranks, including late ones, get the same result. The wait goes through the store, so a timeout leaves every
    process group usable.
    """
    members = find_members(group)
    if members is None:
        return []
    try:
        members.sync("barrier").gather("", timeout)
    except MissingRanks as error:
        return [members.ranks[rank] for rank in error.ranks]
    return []


def barrier_until(timeout: timedelta, group: dist.ProcessGroup | None = None) -> bool:
    """Wait for all ranks, and return whether they arrived within `timeout`.

    `_barrier_with_timeout` of NeMo AutoModel (nemo_automodel/components/distributed/utils.py). The result is the same
    on all ranks; False logs the missing ranks. The wait goes through the store, so a timeout leaves the process groups
    usable. After False the work of the missing ranks is not done: a caller must not rely on it.

    Args:
        timeout: Maximum time to wait.
        group: Process group whose members wait; None: all ranks.
    """
    missing = _missing_after(timeout, group)
    if missing:
        logger.error("barrier: rank(s) %s did not arrive within %g s", _names(missing), timeout.total_seconds())
    return not missing


def barrier_within(seconds: float, reason: str) -> None:
    """Run `dist.barrier` with an explicit timeout and a diagnosis.

    `_barrier_with_timeout` of KempnerForge (distributed/setup.py). All ranks first arrive through the store, which
    finds missing ranks without breaking a process group. The barrier that follows tests the network of the training.

    Raises:
        BarrierTimeoutError: Ranks are missing after `seconds`, or the barrier itself took longer.
        RuntimeError: The barrier failed for another reason, which the message states.
    """
    if not is_distributed():
        return
    deadline = time.monotonic() + seconds
    missing = _missing_after(timedelta(seconds=seconds))
    if missing:
        raise BarrierTimeoutError(
            f"Barrier timed out after {seconds:g}s during {reason}: rank(s) {_names(missing)} did not arrive. "
            "Look for their first error; if they run, check that MASTER_ADDR and MASTER_PORT are the same on all ranks"
        )
    left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    try:
        work = dist.barrier(async_op=True, device_ids=_device_ids(None))
        done = work is None or work.wait(timeout=left)
    except RuntimeError as error:
        if "timeout" in str(error).lower() or "timed out" in str(error).lower():
            done = False
        else:
            raise RuntimeError(f"Barrier failed during {reason}: {error}") from error
    if done is False:
        raise BarrierTimeoutError(
            f"Barrier timed out after {seconds:g}s during {reason}: all ranks arrived, but the collective "
            "did not finish. Check the network between the nodes, and NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        )


def create_gloo_group() -> dist.ProcessGroup | None:
    """Create a gloo process group of all ranks, for instance for `monitored_barrier` in a run on nccl.

    `_create_gloo_group` of NeMo AutoModel (nemo_automodel/components/distributed/utils.py). A collective: all ranks
    must call it. The group has the timeout of the default group's store. Return None without a process group. A failure
    raises instead of returning None, since a rank without the group would hang the others.
    """
    if not is_distributed():
        return None
    timeout = _get_default_store().timeout  # type: ignore[attr-defined]  # missing in its stub
    group = dist.new_group(backend="gloo", timeout=timeout)
    return group if isinstance(group, dist.ProcessGroup) else None


def _device_ids(group: dist.ProcessGroup | None) -> list[int] | None:
    """Return this process's CUDA device for `dist.barrier`, which guesses a device if it is the first collective."""
    if torch.cuda.is_available() and backend_supports_cuda(str(dist.get_backend(group))):
        return [torch.cuda.current_device()]
    return None


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


@dataclass(frozen=True, slots=True)
class _Entry:
    """State of one pass of this rank through the section."""

    members: Members
    sync: StoreSync
    is_first: bool  # this rank is the first of its node
    first_ranks: int  # number of first ranks, one per node
    timeout: timedelta


class FirstRankPerNode(ContextDecorator):
    """Context manager in which the first rank of each node runs a section before the other ranks.

        with FirstRankPerNode() as is_first:
            ...  # the first rank of each node prepares a file, which the others then read

    The others wait until the first ranks of *all* nodes have finished, for at most `timeout`, independently of the
    process group's timeout. If a first rank fails, it raises its own exception, and all waiting ranks raise
    PeerFailure without entering the section. If another rank fails, the next section fails on all ranks. A single
    process never waits. Sections may be nested, and the object may be used as a decorator. It also works before
    `init_process_group`, through the rendezvous store. The body should contain no collectives.

    Args:
        group: Process group whose members take part; None: all ranks.
        timeout: Maximum time to wait; None: that of `__enter__`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        self._group = group
        self._timeout = timeout
        self._entries: list[_Entry | None] = []

    def _recreate_cm(self) -> FirstRankPerNode:
        return FirstRankPerNode(
            self._group, self._timeout
        )  # a new object per call: a decorated function may call itself

    def __enter__(self, timeout: timedelta = _DEFAULT_TIMEOUT) -> bool:
        """Wait for this rank's turn.

        Returns:
            Whether this process is the first rank of its node.

        Raises:
            PeerFailure: A first rank failed in this section, or another rank failed in an earlier one.
            TimeoutError: Not all ranks arrived, or the first ranks did not finish, within `timeout`.
        """
        entry = self._arrive(timeout if self._timeout is None else self._timeout)
        if entry is not None and not entry.is_first:
            _await_first_ranks(entry)
        self._entries.append(entry)
        return entry is None or entry.is_first

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> Literal[False]:
        """Release the waiting ranks, or make them fail if this rank failed. Returns False, so exceptions propagate."""
        entry = self._entries.pop()
        if entry is None:
            return False
        if exc_type is not None:
            _report_failure(entry, f"{exc_type.__name__}: {exc_val}")
        elif entry.is_first:
            if entry.sync.count("firsts_done") == entry.first_ranks:
                entry.sync.publish_verdict(None)
            _await_first_ranks(entry)
        return False

    def _arrive(self, timeout: timedelta) -> _Entry | None:
        members = find_members(self._group)
        if members is None:
            return None
        sync = members.sync("first_rank")
        nodes = members.nodes(timeout)
        indices = index_on_node(nodes)
        if _failure_record(members).has_verdict():
            _failure_record(members).raise_verdict("FirstRankPerNode")
        return _Entry(members, sync, indices[members.rank] == 0, indices.count(0), timeout)


def _await_first_ranks(entry: _Entry) -> None:
    if not entry.sync.poll(entry.sync.has_verdict, entry.timeout):
        seconds = f"{entry.timeout.total_seconds():g} s"
        entry.sync.publish_verdict(TimeoutError(f"the first rank of a node did not finish within {seconds}"))
    entry.sync.raise_verdict("FirstRankPerNode")


def _report_failure(entry: _Entry, error: str) -> None:
    members = entry.members
    failure = PeerFailure(f"rank {members.ranks[members.rank]} ({members.node}) failed with {error}")
    logger.error("FirstRankPerNode: %s", failure)
    if entry.is_first:
        entry.sync.publish_verdict(failure)
        entry.sync.await_acknowledgements(entry.sync.size - 1)
    else:
        _failure_record(members).publish_verdict(failure)


def _failure_record(members: Members) -> StoreSync:
    """Return the record of failures of ranks that are not first, for which no rank waits; it fails later sections."""
    return StoreSync(dist.PrefixStore("first_rank/failed", members.store), members.rank, members.size)


def do_n_at_a_time(
    f: Callable[[], _T],
    *,
    n: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
) -> _T:
    """Call `f` once on every rank, on at most `n` ranks at a time, and return this rank's result.

    Every rank returns after all have called `f`. If `f` raises on one rank, that rank raises the exception, all others
    raise PeerFailure, and the ranks whose turn had not come do not call `f`.

    Args:
        f: Function to call on each rank.
        n: Number of concurrent calls; None: the number of nodes, with one rank of each node at a time, regardless of
            how ranks are distributed over nodes.
        process_group: Process group of the ranks; only its members may call. None: all ranks.
        world_size, local_rank: Take turns by rank `local_rank` of `world_size` instead of by the rank in the group.
            With the values of a node, each node has its own turns.

    Raises:
        NotInGroupError: This process is not a member of `process_group`.
        ValueError: `n` or `local_rank` is out of range, or `n` differs between ranks.
        PeerFailure: `f` raised on another rank.
        TimeoutError: The ranks did not arrive, or did not finish, within _DEFAULT_TIMEOUT.
    """
    if n is not None and n < 1:
        raise ValueError(f"n={n}: must be at least 1")
    if (world_size is None) != (local_rank is None):
        raise ValueError(f"world_size={world_size}, local_rank={local_rank}: pass both or neither")
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
        rank = members.ranks[members.rank]
        sync.publish_verdict(PeerFailure(f"rank {rank} failed with {type(error).__name__}: {error}"))
        sync.await_acknowledgements(sync.size - 1)
        raise
    if sync.count("finished") == sync.size:
        sync.publish_verdict(None)
    _wait(sync, sync.has_verdict)
    return result


def _turns(members: Members, n: int | None, world_size: int | None, local_rank: int | None) -> list[int]:
    """Return the turn of each member; members with the same turn call concurrently."""
    requested = [
        json.loads(value)
        for value in members.sync("positions").gather(json.dumps([n, world_size, local_rank]), _DEFAULT_TIMEOUT)
    ]
    nodes = members.nodes(_DEFAULT_TIMEOUT)
    on_node = index_on_node(nodes)
    if len({position[0] for position in requested}) > 1:
        raise ValueError(f"n differs between ranks: {[position[0] for position in requested]}")
    # Neighbors in this order run on different nodes, so that each turn is spread over as many nodes as possible.
    order = sorted(range(members.size), key=lambda rank: (on_node[rank], nodes[rank], rank))
    position_of = {rank: position for position, rank in enumerate(order)}
    turns = []
    for rank, (limit, size, position) in enumerate(requested):
        if size is not None:
            turns.append(position % -(-size // (limit or len(set(nodes)))))
        else:
            turns.append(on_node[rank] if limit is None else position_of[rank] // limit)
    return turns


def _wait(sync: StoreSync, ready: Callable[[], bool]) -> None:
    if not sync.poll(lambda: sync.has_verdict() or ready(), _DEFAULT_TIMEOUT):
        sync.publish_verdict(TimeoutError(f"the ranks did not finish within {_DEFAULT_TIMEOUT}"))
    if sync.has_verdict():
        sync.raise_verdict("do_n_at_a_time")
