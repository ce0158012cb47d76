"""Ranks that wait for one another through the store they met at, without a collective.

A collective that times out leaves its process group unusable, is bound to the group's own timeout, and cannot
say who is missing. Keys in a store have none of that: waiting harms nothing, any timeout holds, and the ranks that
have not come are known by name. Waiting polls, because a blocking wait holds the store's lock against the watchdog
of NCCL and against Ctrl-C.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from components.protocol.failures import LostPeer

SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.25  # seconds between two looks: a tenth of what was waited so far
FAREWELL = timedelta(seconds=2)  # for which a rank that fails stays, so that its peers can read why


class PeerFailure(LostPeer):
    """Another rank failed, or ended, in what all ranks go through together; the message holds its error."""


class MissingRanks(TimeoutError):
    """Some ranks did not come in time. `ranks` are their numbers within the group."""

    def __init__(self, ranks: list[int], timeout: timedelta) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(f"rank(s) {names} did not arrive within {timeout.total_seconds():g} s")
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class StoreSync:
    """One use of one synchronisation by all of `size` ranks: the keys of its own, and this rank's number."""

    store: dist.Store
    rank: int
    size: int

    @classmethod
    def enter(cls, store: dist.Store, name: str, rank: int, size: int) -> StoreSync:
        """Return this rank's next synchronisation `name`: its n-th meets the n-th of all others."""
        number = store.add(f"{name}/entries/{rank}", 1)
        return cls(dist.PrefixStore(f"{name}/{number}", store), rank, size)

    def has(self, key: str) -> bool:
        """Whether any rank has set `key`."""
        try:
            return self.store.check([key])
        except dist.DistError as error:
            raise PeerFailure("the store of the ranks is gone: the process that serves it has ended") from error

    def read(self, key: str) -> str:
        """Return the value of a key that is set."""
        return self.store.get(key).decode()

    def settle(self, key: str, value: str) -> str:
        """Set `key` unless a rank was faster, and return the value that all ranks see from then on."""
        return self.store.compare_set(key, "", value).decode()

    def count(self, key: str, increment: int = 1) -> int:
        """Add to a shared counter and return its new value; increment 0 reads it."""
        return self.store.add(key, increment)

    def poll(self, ready: Callable[[], bool], timeout: timedelta) -> bool:
        """Wait until `ready()`, and return False when it was not so within `timeout`."""
        began = time.monotonic()
        while not ready():
            waited = time.monotonic() - began
            left = timeout.total_seconds() - waited
            if left <= 0:
                return False
            time.sleep(min(max(waited / 10, SHORTEST_PAUSE), LONGEST_PAUSE, left))
        return True

    def settle_verdict(self, failure: PeerFailure | TimeoutError | None) -> None:
        """Say how it ended for all, None: well. The first rank that says it is believed."""
        kind = "" if failure is None else type(failure).__name__
        self.settle("verdict", json.dumps([kind, str(failure or "")]))

    def has_verdict(self) -> bool:
        """Whether it is known how it ended."""
        return self.has("verdict")

    def raise_verdict(self, call: str) -> None:
        """Raise the failure of which the verdict tells, if any; `call` is what the message starts with."""
        kind, message = json.loads(self.read("verdict"))
        if kind:
            self.told()
            raise (TimeoutError if kind == "TimeoutError" else PeerFailure)(f"{call}: {message}")

    def farewell(self, peers: int) -> None:
        """Stay until `peers` ranks have called `told`: the store may end with this process."""
        self.poll(lambda: self.count("told", 0) >= peers, FAREWELL)

    def told(self) -> None:
        """Say that this rank has read why the others fail."""
        self.count("told")

    def gather(self, value: str, timeout: timedelta) -> list[str]:
        """Return the values of all ranks in rank order.

        Raises:
            MissingRanks: not all ranks came within `timeout`. All ranks then get the same list of the
                missing, late ones included, so that none goes on where others have given up.
        """
        self.store.set(f"value/{self.rank}", value)
        if self.count("arrived") < self.size:
            self.poll(lambda: self.has("outcome"), timeout)
        if not self.has("outcome"):
            missing = [rank for rank in range(self.size) if not self.has(f"value/{rank}")]
            found = {} if missing else {"values": [self.read(f"value/{rank}") for rank in range(self.size)]}
            self.settle("outcome", json.dumps(found or {"missing": missing}))
        outcome = json.loads(self.read("outcome"))
        if "missing" in outcome:
            self.told()
            self.farewell(self.size - len(outcome["missing"]))
            raise MissingRanks(outcome["missing"], timeout)
        return outcome["values"]
