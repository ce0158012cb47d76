"""What ranks tell one another of themselves while they run, and which of them a run that stands still waits for.

Every rank beats: from time to time a thread of its own posts where the rank is, through a connection of its own to
the store of the ranks, so that it neither waits for the main thread nor for a collective. One counter over all ranks
tells whether any of them has moved: a beat costs two operations however many ranks there are, and only a rank that
has become suspicious reads what the others posted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from components.distributed.process.rendezvous import agent_serves_store
from components.distributed.process.store_sync import StoreSync
from components.protocol.role import node_name

NAMED = 8
"""How many ranks one message names."""
NEVER, FIRST_BEAT = -1, 60.0
"""The beat of a rank that has not beaten, and the seconds that it has for its first: it may still be importing."""


@dataclass(frozen=True, slots=True)
class Post:
    """What a rank says of itself with every beat."""

    beat: int
    """How many beats there were before."""
    place: str
    """How far it is, such as `in step 37`."""
    line: str
    """The line that its main thread is at."""
    node: str
    """The host it runs on."""
    collectives: dict[str, int] = field(default_factory=dict)
    """How many collectives it has begun, by the name of the process group."""
    left: bool = False
    """Whether it has come to its end."""


class Heartbeat:
    """This rank's beats, and what can be learned from those of the others."""

    def __init__(self, sync: StoreSync) -> None:
        self.rank = sync.rank
        self.size = sync.size
        self.uncounted = ""
        """Name of the group of a pipeline: each stage sends and receives as often as its place wants it."""
        self._sync = sync
        self._beats = 0

    @classmethod
    def join(cls, place: str = "") -> Heartbeat:
        """Return the heartbeat of this process among those of its process group, after a first beat."""
        store: Any = _get_default_store()  # any: what torch's stub of a store leaves out
        store = store.clone()  # its own connection: an operation may hang with the rank that serves the store
        heart = cls(StoreSync.enter(store, "heartbeat", dist.get_rank(), dist.get_world_size()))
        heart.beat(place, "", moved=True)
        return heart

    def beat(self, place: str, line: str, *, moved: bool, left: bool = False) -> int:
        """Post where this rank is, and return how often any rank has moved so far."""
        post = Post(self._beats, place, line, node_name(os.environ), self._begun(), left)
        self._beats += 1
        self._sync.store.set(f"post/{self.rank}", json.dumps(asdict(post)))
        return self._sync.count("moves", int(moved))

    def posts(self) -> dict[int, Post]:
        """Return the last post of every rank that has beaten, by rank."""
        keys = {rank: f"post/{rank}" for rank in range(self.size)}
        store: Any = self._sync.store
        if store.has_extended_api() and store.check(list(keys.values())):
            texts = dict(zip(keys, store.multi_get(list(keys.values())), strict=True))
        else:
            texts = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
        return {rank: Post(**json.loads(text)) for rank, text in texts.items()}

    def settle(self, message: str) -> str:
        """Say why the run ends, unless a rank was faster, and return what all ranks say from then on."""
        return self._sync.set_once("verdict", message)

    def verdict(self) -> str | None:
        """Return why the run ends, where a rank has said so."""
        return self._sync.read("verdict") if self._sync.has("verdict") else None

    def part(self, patience: timedelta) -> None:
        """Wait for the other ranks to come to their end like this one: the first to go may take the store along."""
        self._sync.acknowledge()
        self._sync.poll(lambda: self._sync.count("acknowledged", 0) >= self.size, patience)

    def _begun(self) -> dict[str, int]:
        """Return how many collectives this process has begun, by the name of the process group.

        The members of a group begin the same ones in the same order: who has begun fewer is waited for.
        """
        counts = {}
        group: Any
        for group, name in list(_world.pg_names.items()):
            if name != self.uncounted:
                with contextlib.suppress(RuntimeError):  # a backend that does not count
                    counts[str(name)] = group._get_sequence_number_for_group()
        return counts


class Listener:
    """Since when this rank has heard no beat of each other one. Only times of its own clock are compared."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[int, float]] = {}
        self._began = math.inf

    @property
    def listened(self) -> float:
        """Seconds since the first reading; less than 0 before it."""
        return time.monotonic() - self._began

    def hear(self, posts: dict[int, Post], size: int) -> None:
        """Take a reading of the posts of `size` ranks."""
        now = time.monotonic()
        self._began = min(self._began, now)
        for rank in range(size):
            beat = posts[rank].beat if rank in posts else NEVER
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = (beat, now)

    def silent(self, seconds: float, posts: dict[int, Post]) -> list[int]:
        """Return the ranks of which no beat was heard for so long, but for those that have come to their end.

        A rank that has never beaten may be on its way: it gets FIRST_BEAT at least.
        """
        now = time.monotonic()
        return [
            rank
            for rank, (beat, since) in self._heard.items()
            if now - since >= (max(seconds, FIRST_BEAT) if beat == NEVER else seconds)
            and not (rank in posts and posts[rank].left)
        ]


def late_ranks(posts: dict[int, Post]) -> list[int]:
    """Return the ranks that others wait for in a collective; if possible only those that wait for nobody themselves."""
    counts: dict[str, dict[int, int]] = {}
    for rank, post in posts.items():
        for group, count in post.collectives.items():
            counts.setdefault(group, {})[rank] = count
    late, waiting = set(), set()
    for group_counts in counts.values():
        most = max(group_counts.values())
        behind = {rank for rank, count in group_counts.items() if count < most}
        late |= behind
        waiting |= set(group_counts) - behind if behind else set()
    return sorted(late - waiting or late)


def blame(silent: list[int], posts: dict[int, Post]) -> str:
    """Return in words which ranks a run that stands still waits for."""
    if silent:
        return _each(silent, posts, "{who} is missing (last seen {post.place})")
    if late := late_ranks(posts):
        return _each(
            late, posts, "{who} does not come to a collective of the others: it is {post.place}, at {post.line}"
        )
    standing = _each(sorted(posts), posts, "{who} is {post.place}, at {post.line}")
    return f"every rank beats and none is behind the others: {standing}"


def silent_store() -> str:
    """Return in words who is missing where the store of the ranks does not answer any more."""
    who = "the agent of torchrun" if agent_serves_store() else "rank 0"
    host = os.environ.get("MASTER_ADDR", "")
    return f"{who}{f' on host {host}' if host else ''} is missing (the ranks' store, which it serves, does not answer)"


def _each(ranks: Iterable[int], posts: dict[int, Post], form: str) -> str:
    ranks = list(ranks)
    said = []
    for rank in ranks[:NAMED]:
        post = posts.get(rank)
        if post is None:
            said.append(f"rank {rank} is missing (never seen)")
        else:
            said.append(form.format(who=f"rank {rank} on host {post.node}", post=post))
    more = [f"and {len(ranks) - NAMED} ranks more"] if len(ranks) > NAMED else []
    return "; ".join(said + more)
