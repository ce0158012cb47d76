"""Heartbeats of all ranks through the rendezvous store, and the ranks and devices that a hung run waits for.

A thread of every rank periodically posts the rank's status over a separate connection to the store, so that it depends
neither on the main thread nor on collectives. One shared counter records progress of any rank. A beat therefore takes
two store operations regardless of the number of ranks; a rank reads the posts of the others only once it suspects a
hang.

Hosts run ahead of their devices, up to the step's metrics that they wait for. If a device or a link is stuck, all hosts
have enqueued the same collectives, so their counts name no rank. NCCL's flight recorder also counts the collectives of
each process group that devices have completed, and, with TORCH_NCCL_ENABLE_TIMING=1, started.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from components.distributed.process.rendezvous import agent_serves_store
from components.distributed.process.store_sync import StoreSync
from components.protocol.processes import node_name

_MAX_NAMED_RANKS = 8
"""Maximum number of ranks listed in one message."""
_NOT_JOINED = "has not joined a collective that others wait in"
"""Description of a rank whose host has not started a collective."""
_NO_BEAT, _FIRST_BEAT_SECONDS = -1, 60.0
"""Beat number of a rank that has not posted, and its time limit for the first post: it may still be importing."""
_COUNTS = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
"""Sequence numbers in the recorder's status of a process group; -1 if there is none."""
Progress = dict[str, list[int]]
"""Name of a process group -> the sequence numbers of _COUNTS."""


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Hang diagnosis: message and suspected hosts."""

    message: str
    hosts: tuple[str, ...] = ()
    """Hosts of the ranks that the run waits for, sorted; empty if none is known."""


@dataclass(frozen=True, slots=True)
class Post:
    """Status of a rank, posted with every beat."""

    beat: int
    """Number of earlier beats."""
    phase: str
    """Phase of the run, such as `in step 37`."""
    location: str
    """Code location of the main thread."""
    node: str
    """Host that the rank runs on."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Number of collectives started, by name of the process group."""
    finished: bool = False
    """Whether the rank has finished; it posts no more."""
    devices: Progress = field(default_factory=dict)
    """How far the rank's device is in the collectives of each NCCL process group, by name; empty if it is unknown."""


class Heartbeat:
    """Posts of this rank, and access to those of the others."""

    def __init__(self, sync: StoreSync) -> None:
        self.rank = sync.rank
        self.size = sync.size
        self.excluded_group = ""
        """Name of a pipeline's process group, whose counts are ignored: stages send and receive different numbers."""
        self._sync = sync
        self._recorder = FlightRecorder()
        self._beats = 0

    @classmethod
    def join(cls, phase: str = "") -> Heartbeat:
        """Return the heartbeat of this rank in the default process group, after a first beat."""
        store: Any = _get_default_store()  # Any: torch's stub lacks `clone`
        store = store.clone()  # a separate connection, since an operation may hang with the rank that serves the store
        heartbeat = cls(StoreSync.enter(store, "heartbeat", dist.get_rank(), dist.get_world_size()))
        heartbeat.beat(phase, "", progressed=True)
        return heartbeat

    def beat(self, phase: str, location: str, *, progressed: bool, finished: bool = False) -> int:
        """Post the status of this rank, and return the number of beats of all ranks that reported progress."""
        devices = {name: each for name, each in self._recorder.progress().items() if name != self.excluded_group}
        post = Post(self._beats, phase, location, node_name(os.environ), self._collective_counts(), finished, devices)
        self._beats += 1
        self._sync.store.set(f"post/{self.rank}", json.dumps(asdict(post)))
        return self._sync.count("progress_count", int(progressed))

    def posts(self) -> dict[int, Post]:
        """Return the latest post of every rank that has posted, by rank."""
        keys = {rank: f"post/{rank}" for rank in range(self.size)}
        store: Any = self._sync.store
        if store.has_extended_api() and store.check(list(keys.values())):
            texts = dict(zip(keys, store.multi_get(list(keys.values())), strict=True))
        else:
            texts = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
        return {rank: Post(**json.loads(text)) for rank, text in texts.items()}

    def publish_verdict(self, verdict: HangVerdict) -> HangVerdict:
        """Publish why the run ends unless another rank already has; return the published verdict."""
        return _from_text(self._sync.set_once("verdict", json.dumps(asdict(verdict))))

    def verdict(self) -> HangVerdict | None:
        """Return the published reason why the run ends, None if there is none."""
        return _from_text(self._sync.read("verdict")) if self._sync.has("verdict") else None

    def await_others(self, timeout: timedelta) -> None:
        """Wait until all ranks are about to exit, since one of them may serve the store that the others still read."""
        self._sync.acknowledge()
        self._sync.poll(lambda: self._sync.count("acknowledged", 0) >= self.size, timeout)

    def _collective_counts(self) -> dict[str, int]:
        """Return the number of collectives that this rank has started, by name of the process group.

        The members of a group start the same collectives in the same order, so the others wait for a rank that has
        started fewer. torch has no public access to the groups (`_world`) or to their sequence numbers.
        """
        counts = {}
        group: Any
        for group, name in list(_world.pg_names.items()):
            if name != self.excluded_group:
                with contextlib.suppress(RuntimeError):  # a backend without sequence numbers
                    counts[str(name)] = group._get_sequence_number_for_group()
        return counts


class BeatTracker:
    """Time since the last change of each rank's beat, measured with this rank's clock only."""

    def __init__(self) -> None:
        self._last_change: dict[int, tuple[int, float]] = {}
        self._first_update = math.inf

    @property
    def seconds_tracked(self) -> float:
        """Seconds since the first update; negative before it."""
        return time.monotonic() - self._first_update

    def update(self, posts: dict[int, Post], size: int) -> None:
        """Record the posts of `size` ranks as read now."""
        now = time.monotonic()
        self._first_update = min(self._first_update, now)
        for rank in range(size):
            beat = posts[rank].beat if rank in posts else _NO_BEAT
            if rank not in self._last_change or self._last_change[rank][0] != beat:
                self._last_change[rank] = (beat, now)

    def silent(self, seconds: float, posts: dict[int, Post]) -> list[int]:
        """Return the unfinished ranks without a new beat for `seconds`.

        A rank that has never posted may still be starting, and gets at least _FIRST_BEAT_SECONDS.
        """
        now = time.monotonic()
        return [
            rank
            for rank, (beat, since) in self._last_change.items()
            if now - since >= (max(seconds, _FIRST_BEAT_SECONDS) if beat == _NO_BEAT else seconds)
            and not (rank in posts and posts[rank].finished)
        ]


def _late_ranks(posts: dict[int, Post]) -> list[int]:
    """Return the ranks that others wait for in a collective, without those that themselves wait, if any are left.

    Groups in `Post.devices` are left out: their hosts run ahead of the devices, so their counts differ without a cause.
    """
    on_devices = {group for post in posts.values() for group in post.devices}
    counts: dict[str, dict[int, int]] = {}
    for rank, post in posts.items():
        for group, count in post.collectives.items():
            if group not in on_devices:
                counts.setdefault(group, {})[rank] = count
    late, waiting = set(), set()
    for group_counts in counts.values():
        highest = max(group_counts.values())
        behind = {rank for rank, count in group_counts.items() if count < highest}
        late |= behind
        waiting |= set(group_counts) - behind if behind else set()
    return sorted(late - waiting or late)


def blame(silent: list[int], posts: dict[int, Post]) -> HangVerdict:
    """Return the ranks that a hung run waits for: silent ones, else late ones, else the location of every rank.

    Ranks are late on their devices, if NCCL's flight recorder shows it, or by the collectives that hosts have started.
    """
    if silent:
        form = "{who} is missing (last seen {post.phase})"
        return HangVerdict(_describe_ranks(silent, posts, form), _hosts(silent, posts))
    pending = _pending_collectives({rank: post.devices for rank, post in posts.items()})
    late = {rank: _lateness(rank, each) for rank, each in _late_devices(pending).items()}
    if not late:
        late = dict.fromkeys(_late_ranks(posts), _NOT_JOINED)
    if late:
        form = "{who} {detail}: it is {post.phase}, at {post.location}"
        return HangVerdict(_describe_ranks(late, posts, form, late), _hosts(late, posts))
    positions = _describe_ranks(sorted(posts), posts, "{who} is {post.phase}, at {post.location}")
    stuck = [_describe_stuck(each) for each in pending]
    if stuck:
        return HangVerdict(f"no rank is behind the others, but {'; '.join(stuck[:_MAX_NAMED_RANKS])}: {positions}")
    return HangVerdict(f"every rank posts heartbeats and none is behind the others: {positions}")


def _lateness(rank: int, pending: Pending) -> str:
    if pending.stages[rank] == "not joined":
        return _NOT_JOINED
    furthest = "completed" if "completed" in pending.stages.values() else "started"
    return (
        f"has {pending.stages[rank]} collective {pending.number} of process group {pending.group} on its device, "
        f"but not {furthest} it as others have"
    )


def _describe_stuck(pending: Pending) -> str:
    stage, ranks = next(iter(pending.stages.values())), sorted(pending.stages)
    named = ", ".join(map(str, ranks[:_MAX_NAMED_RANKS])) + (", ..." if len(ranks) > _MAX_NAMED_RANKS else "")
    return (
        f"collective {pending.number} of process group {pending.group} is {stage} on the devices of all its "
        f"{len(ranks)} ranks ({named}) and completes on none: a device or link of theirs is stuck"
    )


def silent_store() -> HangVerdict:
    """Return the process that is missing when the store does not respond: the one that serves it."""
    host = os.environ.get("MASTER_ADDR", "")
    on_host = f" on host {host}" if host else ""
    reason = "is missing (the rendezvous store, which it serves, does not respond)"
    if agent_serves_store():
        return HangVerdict(f"torchrun's agent{on_host} {reason}")
    return HangVerdict(f"rank 0{on_host} {reason}", (host,) if host else ())


def _from_text(text: str) -> HangVerdict:
    values = json.loads(text)
    return HangVerdict(values["message"], tuple(values["hosts"]))


def _hosts(ranks: Iterable[int], posts: dict[int, Post]) -> tuple[str, ...]:
    return tuple(sorted({posts[rank].node for rank in ranks if rank in posts}))


def _describe_ranks(
    ranks: Iterable[int], posts: dict[int, Post], form: str, details: Mapping[int, str] | None = None
) -> str:
    ranks = list(ranks)
    entries = []
    for rank in ranks[:_MAX_NAMED_RANKS]:
        post = posts.get(rank)
        if post is None:
            entries.append(f"rank {rank} is missing (never seen)")
        else:
            who, detail = f"rank {rank} on host {post.node}", (details or {}).get(rank, "")
            entries.append(form.format(who=who, post=post, detail=detail))
    more = [f"and {len(ranks) - _MAX_NAMED_RANKS} ranks more"] if len(ranks) > _MAX_NAMED_RANKS else []
    return "; ".join(entries + more)


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
        return {name: [int(counts[count]) for count in _COUNTS] for name, counts in named.items()}


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


def _pending_collectives(by_rank: Mapping[int, Progress], excluded: Iterable[str] = ()) -> list[Pending]:
    """Return the pending collective of each group that has one, by the groups' names.

    Args:
        excluded: Names of groups to leave out.
    """
    by_group: dict[str, dict[int, list[int]]] = {}
    for rank, progress in by_rank.items():
        for group, counts in progress.items():
            if group not in excluded:
                by_group.setdefault(group, {})[rank] = counts
    records = []
    for group, members in sorted(by_group.items()):
        number = 1 + min(completed for _, _, completed in members.values())
        stages = {rank: _stage(counts, number) for rank, counts in members.items()}
        if set(stages.values()) != {"not joined"}:
            records.append(Pending(group, number, stages))
    return records


def _stage(counts: list[int], number: int) -> str:
    enqueued, started, completed = counts
    if completed >= number:
        return "completed"
    if enqueued < number:
        return "not joined"
    return "started" if started >= number else "enqueued"


def _late_devices(pending: Iterable[Pending]) -> dict[int, Pending]:
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
