"""Heartbeats of all ranks through the rendezvous store, and the ranks that a hung run waits for.

A thread of every rank periodically posts the rank's status over a separate connection to the store, so that it depends
neither on the main thread nor on collectives. One shared counter records progress of any rank. A beat therefore takes
two store operations regardless of the number of ranks; a rank reads the posts of the others only once it suspects a
hang.
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

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from components.distributed.process.rendezvous import agent_serves_store
from components.distributed.process.store_sync import StoreSync
from components.protocol.role import node_name
from components.resilience.device_progress import FlightRecorder, Pending, Progress, late_devices, pending_collectives

MAX_NAMED_RANKS = 8
"""Maximum number of ranks listed in one message."""
NOT_JOINED = "has not joined a collective that others wait in"
"""Description of a rank whose host has not started a collective."""
NO_BEAT, FIRST_BEAT_SECONDS = -1, 60.0
"""Beat number of a rank that has not posted, and its time limit for the first post: it may still be importing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a run ends as hung."""

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

    def publish_verdict(self, verdict: Verdict) -> Verdict:
        """Publish why the run ends unless another rank already has; return the published verdict."""
        return _from_text(self._sync.set_once("verdict", json.dumps(asdict(verdict))))

    def verdict(self) -> Verdict | None:
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
            beat = posts[rank].beat if rank in posts else NO_BEAT
            if rank not in self._last_change or self._last_change[rank][0] != beat:
                self._last_change[rank] = (beat, now)

    def silent(self, seconds: float, posts: dict[int, Post]) -> list[int]:
        """Return the unfinished ranks without a new beat for `seconds`.

        A rank that has never posted may still be starting, and gets at least FIRST_BEAT_SECONDS.
        """
        now = time.monotonic()
        return [
            rank
            for rank, (beat, since) in self._last_change.items()
            if now - since >= (max(seconds, FIRST_BEAT_SECONDS) if beat == NO_BEAT else seconds)
            and not (rank in posts and posts[rank].finished)
        ]


def late_ranks(posts: dict[int, Post]) -> list[int]:
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


def blame(silent: list[int], posts: dict[int, Post]) -> Verdict:
    """Return the ranks that a hung run waits for: silent ones, else late ones, else the location of every rank.

    Ranks are late on their devices, if NCCL's flight recorder shows it, or by the collectives that hosts have started.
    """
    if silent:
        form = "{who} is missing (last seen {post.phase})"
        return Verdict(_describe_ranks(silent, posts, form), _hosts(silent, posts))
    pending = pending_collectives({rank: post.devices for rank, post in posts.items()})
    late = {rank: _lateness(rank, each) for rank, each in late_devices(pending).items()}
    if not late:
        late = dict.fromkeys(late_ranks(posts), NOT_JOINED)
    if late:
        form = "{who} {detail}: it is {post.phase}, at {post.location}"
        return Verdict(_describe_ranks(late, posts, form, late), _hosts(late, posts))
    positions = _describe_ranks(sorted(posts), posts, "{who} is {post.phase}, at {post.location}")
    stuck = [_describe_stuck(each) for each in pending]
    if stuck:
        return Verdict(f"no rank is behind the others, but {'; '.join(stuck[:MAX_NAMED_RANKS])}: {positions}")
    return Verdict(f"every rank posts heartbeats and none is behind the others: {positions}")


def _lateness(rank: int, pending: Pending) -> str:
    if pending.stages[rank] == "not joined":
        return NOT_JOINED
    furthest = "completed" if "completed" in pending.stages.values() else "started"
    return (
        f"has {pending.stages[rank]} collective {pending.number} of process group {pending.group} on its device, "
        f"but not {furthest} it as others have"
    )


def _describe_stuck(pending: Pending) -> str:
    stage, ranks = next(iter(pending.stages.values())), sorted(pending.stages)
    named = ", ".join(map(str, ranks[:MAX_NAMED_RANKS])) + (", ..." if len(ranks) > MAX_NAMED_RANKS else "")
    return (
        f"collective {pending.number} of process group {pending.group} is {stage} on the devices of all its "
        f"{len(ranks)} ranks ({named}) and completes on none: a device or link of theirs is stuck"
    )


def silent_store() -> Verdict:
    """Return the process that is missing when the store does not respond: the one that serves it."""
    host = os.environ.get("MASTER_ADDR", "")
    on_host = f" on host {host}" if host else ""
    reason = "is missing (the rendezvous store, which it serves, does not respond)"
    if agent_serves_store():
        return Verdict(f"torchrun's agent{on_host} {reason}")
    return Verdict(f"rank 0{on_host} {reason}", (host,) if host else ())


def _from_text(text: str) -> Verdict:
    values = json.loads(text)
    return Verdict(values["message"], tuple(values["hosts"]))


def _hosts(ranks: Iterable[int], posts: dict[int, Post]) -> tuple[str, ...]:
    return tuple(sorted({posts[rank].node for rank in ranks if rank in posts}))


def _describe_ranks(
    ranks: Iterable[int], posts: dict[int, Post], form: str, details: Mapping[int, str] | None = None
) -> str:
    ranks = list(ranks)
    entries = []
    for rank in ranks[:MAX_NAMED_RANKS]:
        post = posts.get(rank)
        if post is None:
            entries.append(f"rank {rank} is missing (never seen)")
        else:
            who, detail = f"rank {rank} on host {post.node}", (details or {}).get(rank, "")
            entries.append(form.format(who=who, post=post, detail=detail))
    more = [f"and {len(ranks) - MAX_NAMED_RANKS} ranks more"] if len(ranks) > MAX_NAMED_RANKS else []
    return "; ".join(entries + more)
