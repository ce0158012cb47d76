"""Running a function on a few ranks at a time (seed page 002): ours against the published behaviour.

Each docstring names the line of SEED_NOTES that it answers, as section.item or section (function).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from components.distributed import utils
from components.distributed.process.groups import NotInGroupError, index_on_node
from components.distributed.process.store_sync import PeerFailure
from tests.distributed import published
from tests.distributed.contrast import both_sides, contrast, nodes_of_two, without
from tests.harness import run_ranks

PATIENCE = timedelta(seconds=20)


def _recorded() -> tuple[float, float]:
    began = time.monotonic()
    time.sleep(0.08)
    return began, time.monotonic()


def _most_at_once(spans: list[tuple[float, float]]) -> int:
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_at_most_n_ranks_at_a_time(n: int) -> None:
    """Seed page 002: at most n, each exactly once, each gets its own result."""

    def check(rank: int) -> tuple[float, float]:
        calls = []
        result = utils.do_n_at_a_time(lambda: (calls.append(1), _recorded())[1], n=n)
        assert len(calls) == 1
        return result

    assert _most_at_once(run_ranks(4, check)) <= n


@both_sides
def test_a_raising_function_ends_the_turns_for_all(side: str) -> None:
    """SEED_NOTES 3 (do_n_at_a_time), 8.10: f raising on one rank left the others in a barrier."""

    def check(rank: int, do_n: Callable[..., Any]) -> None:
        called = []

        def f() -> None:
            called.append(rank)
            if rank == 1:
                raise KeyError("broken")

        with pytest.raises(KeyError if rank == 1 else PeerFailure, match="broken"):
            do_n(f, n=1)
        assert called == ([rank] if rank < 2 else []), "its turn came after the failure"

    contrast(
        side,
        check,
        utils.do_n_at_a_time,
        published.do_n_at_a_time,
        symptom="RuntimeError|still running",
        world_size=3,
        published_timeout=1.5,
    )


@both_sides
def test_a_rank_outside_the_group_is_told_so(side: str) -> None:
    """SEED_NOTES 3 (do_n_at_a_time): f was never called, and None returned."""

    def check(rank: int, do_n: Callable[..., Any]) -> None:
        group = dist.new_group([1])
        try:
            assert do_n(lambda: "result", n=1, process_group=group) == "result", "never called"
        except NotInGroupError:
            assert rank == 0

    contrast(side, check, utils.do_n_at_a_time, published.do_n_at_a_time, symptom="never called")


@both_sides
def test_n_of_zero_is_an_error_with_a_name(side: str) -> None:
    """SEED_NOTES 3 (do_n_at_a_time): n=0 was a ZeroDivisionError."""

    def check(rank: int, do_n: Callable[..., Any]) -> None:
        with pytest.raises(ValueError, match="n=0: must be at least 1"):
            do_n(lambda: None, n=0)

    contrast(side, check, utils.do_n_at_a_time, published.do_n_at_a_time, symptom="ZeroDivisionError")


@both_sides
def test_one_rank_of_each_node_by_default_also_in_a_subgroup(side: str) -> None:
    """SEED_NOTES 3 (do_n_at_a_time): the default n counted all nodes even for a group on one of them."""

    def check(rank: int, do_n: Callable[..., Any]) -> None:
        group = dist.new_group([0, 1])  # both on the first of two nodes
        spans: list[Any] = [None] * 4
        mine = do_n(_recorded, process_group=group) if rank < 2 else None
        dist.all_gather_object(spans, mine)
        assert _most_at_once([span for span in spans if span]) == 1, "two ranks of one node at once"

    contrast(
        side,
        check,
        utils.do_n_at_a_time,
        published.do_n_at_a_time,
        symptom="two ranks of one node at once",
        world_size=4,
        env=nodes_of_two,
    )


@both_sides
def test_one_rank_of_each_node_where_nodes_differ_in_size(side: str) -> None:
    """SEED_NOTES 3 (do_n_at_a_time): "one per node" held only for contiguous equal nodes. Here nodes of 3 and 1."""

    def unequal(rank: int) -> dict[str, str | None]:
        local = {"LOCAL_RANK": str(rank % 3), "LOCAL_WORLD_SIZE": "3" if rank < 3 else "1"}
        return {**local, "NUM_NODES": "2"}

    def check(rank: int, do_n: Callable[..., Any]) -> None:
        first_turn = dist.new_group([0, 3])
        spans: list[Any] = [None] * 4
        dist.all_gather_object(spans, do_n(_recorded))
        assert _most_at_once(spans[:3]) == 1, "two ranks of one node at once"

        def meet() -> bool:
            return rank in (1, 2) or utils._barrier_with_timeout(PATIENCE, first_turn)

        assert do_n(meet), "the second node waited for the first"

    contrast(
        side,
        check,
        utils.do_n_at_a_time,
        published.do_n_at_a_time,
        symptom="two ranks of one node at once",
        world_size=4,
        env=unequal,
    )


def test_turns_by_a_position_of_the_callers_own() -> None:
    """SEED_NOTES 3 (do_n_at_a_time): world_size and local_rank, with ranks and without distributed."""

    def check(rank: int) -> list[Any]:
        spans: list[Any] = [None] * 4
        both_nodes = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]

        def f() -> tuple[float, float]:
            assert utils._barrier_with_timeout(PATIENCE, both_nodes), "one node waited for the other"
            return _recorded()

        mine = utils.do_n_at_a_time(f, n=1, world_size=2, local_rank=rank % 2)  # one by one on each node
        dist.all_gather_object(spans, mine)
        return spans

    spans = run_ranks(4, check, env=nodes_of_two)[0]
    assert _most_at_once(spans[:2]) == _most_at_once(spans[2:]) == 1
    assert utils.do_n_at_a_time(lambda: 5, n=1, world_size=4, local_rank=3) == 5
    assert utils.do_n_at_a_time(lambda: 6) == 6
    for wrong in ({"world_size": 2}, {"world_size": 2, "local_rank": 2}):
        with pytest.raises(ValueError, match=r"local_rank"):
            utils.do_n_at_a_time(lambda: None, **wrong)  # type: ignore[arg-type]


def test_turns_hold_before_the_process_group_exists() -> None:
    """SEED_NOTES 3 (do_n_at_a_time): must run without dist; ranks that the launcher told of still take turns."""
    assert _most_at_once(run_ranks(3, lambda rank: utils.do_n_at_a_time(_recorded, n=1), init=False)) == 1


def test_a_long_function_outlasts_the_collective_timeout() -> None:
    """SEED_NOTES 3 (do_n_at_a_time), 7 (11): turns are no collective."""

    def check(rank: int) -> int:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), dist.group.WORLD)
        return utils.do_n_at_a_time(lambda: (time.sleep(0.7), rank)[1], n=1)

    assert run_ranks(2, check) == [0, 1]


def test_the_index_on_a_node_needs_no_contiguous_ranks() -> None:
    """SEED_NOTES 3 (do_n_at_a_time): srun may deal ranks out to nodes in turn."""
    assert index_on_node(["a", "b", "a", "c", "b", "a"]) == [0, 0, 1, 0, 1, 2]


def test_ranks_without_a_local_rank_are_told_apart_by_their_host() -> None:
    """SEED_NOTES 3 (get_local_rank): LOCAL_RANK unset made every rank the first of its node."""

    def check(rank: int) -> bool:
        with utils.FirstRankPerNode() as first:
            return first

    assert run_ranks(3, check, env=without("LOCAL_RANK", "LOCAL_WORLD_SIZE")) == [True, False, False]
