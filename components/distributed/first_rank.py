"""A section that the first rank of every node runs before the others (seed page 001, NeMo AutoModel)."""

from __future__ import annotations

import logging
from contextlib import ContextDecorator
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Literal

import torch.distributed as dist

from components.distributed.groups import Members, find_members, index_on_node
from components.distributed.store_sync import PeerFailure, StoreSync

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
