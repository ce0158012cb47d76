"""Running a function on a few ranks at a time, compared with the published behavior of OLMo-core.

Each docstring names the published function and the weakness that the test covers. Tests under `against_published`
also run their check against a re-creation of the published behavior, which must fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from components.distributed import utils
from components.distributed.process.groups import NotInGroupError, index_on_node
from components.distributed.process.store_sync import PeerFailure
from tests.distributed import published
from tests.distributed.contrast import against_published, nodes_of_two, without
from tests.harness import run_ranks

TIMEOUT = timedelta(seconds=20)
do_n_check = partial(against_published, utils.do_n_at_a_time, published.do_n_at_a_time)


def _timed_span() -> tuple[float, float]:
    began = time.monotonic()
    time.sleep(0.08)
    return began, time.monotonic()


def _max_concurrent(spans: list[tuple[float, float]]) -> int:
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_at_most_n_ranks_run_concurrently(n: int) -> None:
    """Every rank calls the function exactly once and receives its own result."""

    def check(rank: int) -> tuple[float, float]:
        calls = []
        result = utils.do_n_at_a_time(lambda: (calls.append(1), _timed_span())[1], n=n)
        assert len(calls) == 1
        return result

    assert _max_concurrent(run_ranks(4, check)) <= n


@do_n_check(symptom="RuntimeError|still running", world_size=3, published_timeout=1.5)
def test_exception_on_one_rank_is_raised_on_all_ranks(rank: int, do_n: Callable[..., Any]) -> None:
    """OLMo-core do_n_at_a_time: if f raises on one rank, the others stay in a barrier."""
    called = []

    def f() -> None:
        called.append(rank)
        if rank == 1:
            raise KeyError("broken")

    with pytest.raises(KeyError if rank == 1 else PeerFailure, match="broken"):
        do_n(f, n=1)
    assert called == ([rank] if rank < 2 else []), "its turn came after the failure"


@do_n_check(symptom="never called")
def test_rank_outside_the_group_raises(rank: int, do_n: Callable[..., Any]) -> None:
    """OLMo-core do_n_at_a_time: in a group without rank 0, f is never called and None is returned."""
    group = dist.new_group([1])
    try:
        assert do_n(lambda: "result", n=1, process_group=group) == "result", "never called"
    except NotInGroupError:
        assert rank == 0


@do_n_check(symptom="ZeroDivisionError")
def test_n_of_zero_raises_value_error(rank: int, do_n: Callable[..., Any]) -> None:
    """OLMo-core do_n_at_a_time: n=0 raises ZeroDivisionError."""
    with pytest.raises(ValueError, match="n=0: must be at least 1"):
        do_n(lambda: None, n=0)


@do_n_check(symptom="two ranks of one node at once", world_size=4, env=nodes_of_two)
def test_default_is_one_rank_per_node_in_a_subgroup(rank: int, do_n: Callable[..., Any]) -> None:
    """OLMo-core do_n_at_a_time: the default n counts all nodes, even for a group on one node."""
    group = dist.new_group([0, 1])  # both on the first of two nodes
    spans: list[Any] = [None] * 4
    local = do_n(_timed_span, process_group=group) if rank < 2 else None
    dist.all_gather_object(spans, local)
    assert _max_concurrent([span for span in spans if span]) == 1, "two ranks of one node at once"


def _three_ranks_and_one(rank: int) -> dict[str, str | None]:
    """Environment of nodes of three ranks and of one."""
    local = {"LOCAL_RANK": str(rank % 3), "LOCAL_WORLD_SIZE": "3" if rank < 3 else "1"}
    return {**local, "NUM_NODES": "2"}


@do_n_check(symptom="two ranks of one node at once", world_size=4, env=_three_ranks_and_one)
def test_default_is_one_rank_per_node_on_nodes_of_unequal_size(rank: int, do_n: Callable[..., Any]) -> None:
    """OLMo-core do_n_at_a_time: one rank per node only on contiguous nodes of equal size. Here 3 ranks and 1."""
    first_turn = dist.new_group([0, 3])
    spans: list[Any] = [None] * 4
    dist.all_gather_object(spans, do_n(_timed_span))
    assert _max_concurrent(spans[:3]) == 1, "two ranks of one node at once"

    def meets_peer() -> bool:
        return rank in (1, 2) or utils._barrier_with_timeout(TIMEOUT, first_turn)

    assert do_n(meets_peer), "the second node waited for the first"


def test_explicit_world_size_and_local_rank_set_the_order() -> None:
    """Works with a process group and in a single process."""

    def check(rank: int) -> list[Any]:
        spans: list[Any] = [None] * 4
        peers = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]

        def f() -> tuple[float, float]:
            assert utils._barrier_with_timeout(TIMEOUT, peers), "one node waited for the other"
            return _timed_span()

        local = utils.do_n_at_a_time(f, n=1, world_size=2, local_rank=rank % 2)  # one at a time on each node
        dist.all_gather_object(spans, local)
        return spans

    spans = run_ranks(4, check, env=nodes_of_two)[0]
    assert _max_concurrent(spans[:2]) == _max_concurrent(spans[2:]) == 1
    assert utils.do_n_at_a_time(lambda: 5, n=1, world_size=4, local_rank=3) == 5
    assert utils.do_n_at_a_time(lambda: 6) == 6
    for invalid in ({"world_size": 2}, {"world_size": 2, "local_rank": 2}):
        with pytest.raises(ValueError, match=r"local_rank"):
            utils.do_n_at_a_time(lambda: None, **invalid)  # type: ignore[arg-type]


def test_concurrency_limit_holds_before_the_process_group_exists() -> None:
    """Ranks that are only set in the environment are limited, too."""
    assert _max_concurrent(run_ranks(3, lambda rank: utils.do_n_at_a_time(_timed_span, n=1), init=False)) == 1


def test_function_may_run_longer_than_the_collective_timeout() -> None:
    """Ranks wait on the store, not in a collective."""

    def check(rank: int) -> int:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), dist.group.WORLD)
        return utils.do_n_at_a_time(lambda: (time.sleep(0.7), rank)[1], n=1)

    assert run_ranks(2, check) == [0, 1]


def test_index_on_node_supports_non_contiguous_ranks() -> None:
    """srun may distribute ranks over nodes cyclically."""
    assert index_on_node(["a", "b", "a", "c", "b", "a"]) == [0, 0, 1, 0, 1, 2]


def test_ranks_without_local_rank_are_ordered_by_host() -> None:
    """OLMo-core get_local_rank: without LOCAL_RANK, every rank counts as the first of its node."""

    def check(rank: int) -> bool:
        with utils.FirstRankPerNode() as first:
            return first

    assert run_ranks(3, check, env=without("LOCAL_RANK", "LOCAL_WORLD_SIZE")) == [True, False, False]
