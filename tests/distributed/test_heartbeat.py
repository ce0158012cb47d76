"""Real ranks that beat through a store, and one that does not come to a collective of its group."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from components.resilience.heartbeat import BeatTracker, Heartbeat, blame, late_ranks
from tests.harness import run_ranks


def _meet(name: str) -> None:
    """Wait for all three ranks without a collective."""
    store = _get_default_store()
    store.add(name, 1)
    while store.add(name, 0) < 3:
        time.sleep(0.01)


def _late(rank: int) -> tuple[list[int], list[int], str, int, str]:
    """Rank 2 keeps rank 1 waiting in their group, so that rank 1 does not come to the collective of all."""
    heart = Heartbeat.join()
    pair = dist.new_group([1, 2])
    if rank == 1:
        waiting = dist.all_reduce(torch.ones(1), group=pair, async_op=True)
    if rank == 0:
        waiting = dist.all_reduce(torch.ones(1), async_op=True)
    heart.beat("in step 3", f"line of rank {rank}", progressed=rank > 0)  # after that of join
    while len(heart.posts()) < 3 or any(post.beat < 1 for post in heart.posts().values()):
        time.sleep(0.01)
    before, tracker = heart.posts(), BeatTracker()
    tracker.update(before, 3)
    _meet("first")
    time.sleep(0.3)
    if rank != 2:
        heart.beat("in step 3", f"line of rank {rank}", progressed=False)
    while any(heart.posts()[other].beat < 2 for other in (0, 1)):
        time.sleep(0.01)
    now = heart.posts()
    tracker.update(now, 3)
    silent = tracker.silent(0.2, now)
    _meet("second")
    heart.excluded_group = pair.group_name if rank else ""
    moves = heart.beat("in step 3", "", progressed=False)
    assert len(heart.posts()[rank].collectives) == len(now[rank].collectives) - (rank != 0)
    verdict = heart.publish_verdict(f"told by rank {rank}")
    late, told = late_ranks(before), blame([], before)
    agreed = heart.verdict()
    # Now all come, so that the world can end.
    if rank != 0:
        if rank == 2:
            dist.all_reduce(torch.ones(1), group=pair)
        dist.all_reduce(torch.ones(1))
    if rank != 2:
        waiting.wait()
    dist.barrier()
    return silent, late, told, moves, verdict if verdict == agreed else ""


def test_three_ranks_agree_on_who_is_waited_for() -> None:
    results = run_ranks(3, _late)
    for silent, late, told, moves, verdict in results:
        assert silent == [2]
        assert late == [2]
        assert told.startswith("rank 2 on host ")
        assert told.endswith(" has not joined a collective that others wait in: it is in step 3, at line of rank 2")
        assert moves == 3 + 2
        assert verdict == results[0][4]
        assert verdict.startswith("told by rank ")
