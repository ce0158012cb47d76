"""Synchronization of ranks through keys of the rendezvous store, without a collective.

A collective that times out leaves its process group unusable, is bound to the timeout of the group, and cannot name
the missing ranks. Keys in a store avoid all three: a timeout breaks nothing, each wait has its own timeout, and the
missing ranks are known. Waiting polls, because a blocking wait holds the store's lock, which NCCL's watchdog needs,
and delays Ctrl-C.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from components.protocol.failures import LostPeer

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.001, 0.25  # bounds of the polling interval: a tenth of the time waited so far
_ACKNOWLEDGE_TIMEOUT = timedelta(seconds=2)  # how long a failing rank stays alive so that its peers can read the error


class PeerFailure(LostPeer):
    """Failure or exit of another rank during a synchronization; the message contains its error."""


class MissingRanks(TimeoutError):
    """Ranks that did not arrive within the timeout; `ranks` are their indices within the group."""

    def __init__(self, ranks: list[int], timeout: timedelta) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(f"rank(s) {names} did not arrive within {timeout.total_seconds():g} s")
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class StoreSync:
    """One synchronization of `size` ranks under its own key prefix, seen from `rank`."""

    store: dist.Store
    rank: int
    size: int

    @classmethod
    def enter(cls, store: dist.Store, name: str, rank: int, size: int) -> StoreSync:
        """Return this rank's next synchronization `name`; the n-th calls of all ranks form one."""
        number = store.add(f"{name}/entries/{rank}", 1)
        return cls(dist.PrefixStore(f"{name}/{number}", store), rank, size)

    def has(self, key: str) -> bool:
        """Return whether any rank has set `key`. Raises PeerFailure if the store is gone."""
        try:
            return self.store.check([key])
        except dist.DistError as error:
            raise PeerFailure("the store of the ranks is gone: the process that serves it has ended") from error

    def read(self, key: str) -> str:
        """Return the value of a key that has been set."""
        return self.store.get(key).decode()

    def set_once(self, key: str, value: str) -> str:
        """Set `key` unless another rank already has, and return its value, which is final."""
        return self.store.compare_set(key, "", value).decode()

    def count(self, key: str, increment: int = 1) -> int:
        """Add to a shared counter and return its new value; an increment of 0 only reads it."""
        return self.store.add(key, increment)

    def poll(self, ready: Callable[[], bool], timeout: timedelta) -> bool:
        """Poll until `ready()` is true; return False if it is not within `timeout`."""
        began = time.monotonic()
        while not ready():
            waited = time.monotonic() - began
            left = timeout.total_seconds() - waited
            if left <= 0:
                return False
            time.sleep(min(max(waited / 10, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS, left))
        return True

    def publish_verdict(self, failure: PeerFailure | TimeoutError | None) -> None:
        """Publish the outcome for all ranks, None for success. The first published outcome is final."""
        kind = "" if failure is None else type(failure).__name__
        self.set_once("verdict", json.dumps([kind, str(failure or "")]))

    def has_verdict(self) -> bool:
        """Return whether an outcome has been published."""
        return self.has("verdict")

    def raise_verdict(self, call: str) -> None:
        """Raise the published failure, if there is one, with a message that begins with `call`."""
        kind, message = json.loads(self.read("verdict"))
        if kind:
            self.acknowledge()
            raise (TimeoutError if kind == "TimeoutError" else PeerFailure)(f"{call}: {message}")

    def await_acknowledgements(self, peers: int) -> None:
        """Wait until `peers` ranks have called `acknowledge`, since this process may serve the store they read."""
        self.poll(lambda: self.count("acknowledged", 0) >= peers, _ACKNOWLEDGE_TIMEOUT)

    def acknowledge(self) -> None:
        """Report that this rank no longer needs the store for this synchronization."""
        self.count("acknowledged")

    def gather(self, value: str, timeout: timedelta) -> list[str]:
        """Return the values of all ranks in rank order.

        Raises:
            MissingRanks: Not all ranks arrived within `timeout`. All ranks, including late ones, then get the same
                list of missing ranks, so that none continues after the others have given up.
        """
        self.store.set(f"value/{self.rank}", value)
        if self.count("arrived") < self.size:
            self.poll(lambda: self.has("outcome"), timeout)
        if not self.has("outcome"):
            missing = [rank for rank in range(self.size) if not self.has(f"value/{rank}")]
            answer = {} if missing else {"values": [self.read(f"value/{rank}") for rank in range(self.size)]}
            self.set_once("outcome", json.dumps(answer or {"missing": missing}))
        outcome = json.loads(self.read("outcome"))
        if "missing" in outcome:
            self.acknowledge()
            self.await_acknowledgements(self.size - len(outcome["missing"]))
            raise MissingRanks(outcome["missing"], timeout)
        return outcome["values"]
