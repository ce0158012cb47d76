"""How far the device of each rank is in the collectives of each process group, by NCCL's flight recorder.

Hosts run ahead of their devices, up to the step's metrics that they wait for. If a device or a link is stuck, all hosts
have enqueued the same collectives, so their counts name no rank. The recorder also counts the collectives that devices
have completed, and, with TORCH_NCCL_ENABLE_TIMING=1, started.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

COUNTS = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
"""Sequence numbers in the recorder's status of a process group; -1 if there is none."""

Progress = dict[str, list[int]]
"""Name of a process group -> the sequence numbers of COUNTS."""


class FlightRecorder:
    """The collectives of this rank in NCCL's flight recorder."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        """The recorder's number of a process group, which differs between ranks, -> the group's name."""
        self._searched: set[str] = set()

    def progress(self) -> Progress:
        """Return the progress of each group with a recorded collective; empty without NCCL or with the recorder off.

        Counts are read without a query of the device, which might block on a device that is stuck. Only the names of
        new groups need the recorded collectives, which query it. A group is left out if these have been overwritten.
        """
        status = _dump(with_collectives=False).get("pg_status", {})
        if status.keys() - self._searched:
            self._searched |= status.keys()
            for entry in _dump(with_collectives=True).get("entries", ()):
                self._names[str(entry["pg_id"])] = str(entry["process_group"][0])
        named = {self._names[number]: counts for number, counts in status.items() if number in self._names}
        return {name: [int(counts[each]) for each in COUNTS] for name, counts in named.items()}


def _dump(*, with_collectives: bool) -> dict[str, Any]:
    # torch has no public function for this, and builds without NCCL lack it.
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return json.loads(dump(includeCollectives=with_collectives, onlyActive=False)) if dump else {}


@dataclass(frozen=True, slots=True)
class Pending:
    """The first collective of a process group that some rank's device has not completed."""

    group: str
    number: int
    """Sequence number in the group."""
    stages: Mapping[int, str]
    """Rank -> how far it is: enqueued, started, completed, or "not joined" if its host has not enqueued it."""

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks at the earliest stage, if others are further."""
        order = ("not joined", "enqueued", "started", "completed")
        earliest = min(self.stages.values(), key=order.index)
        ranks = tuple(sorted(rank for rank, stage in self.stages.items() if stage == earliest))
        return ranks if len(ranks) < len(self.stages) else ()


def pending_collectives(by_rank: Mapping[int, Progress], excluded: Iterable[str] = ()) -> list[Pending]:
    """Return the pending collective of each group that has one, by the groups' names.

    Args:
        excluded: Names of groups to leave out.
    """
    by_group: dict[str, dict[int, list[int]]] = {}
    for rank, progress in by_rank.items():
        for group, counts in progress.items():
            if group not in excluded:
                by_group.setdefault(group, {})[rank] = counts
    found = []
    for group, members in sorted(by_group.items()):
        number = 1 + min(completed for _, _, completed in members.values())
        stages = {rank: _stage(counts, number) for rank, counts in members.items()}
        if set(stages.values()) != {"not joined"}:
            found.append(Pending(group, number, stages))
    return found


def _stage(counts: list[int], number: int) -> str:
    enqueued, started, completed = counts
    if completed >= number:
        return "completed"
    if enqueued < number:
        return "not joined"
    return "started" if started >= number else "enqueued"


def late_devices(pending: Iterable[Pending]) -> dict[int, Pending]:
    """Return the ranks that others wait for, each with a collective that it is behind in.

    Ranks that themselves wait for another rank in some group are left out if any are left.
    """
    late: dict[int, Pending] = {}
    waiting: set[int] = set()
    for each in pending:
        behind = each.behind
        late |= {rank: each for rank in behind if rank not in late}
        waiting |= set(each.stages) - set(behind) if behind else set()
    return {rank: late[rank] for rank in sorted(late.keys() - waiting or late)}
