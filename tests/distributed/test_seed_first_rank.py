"""A section that the first rank of each node runs first (seed page 001): ours against the published behaviour.

Each docstring names the line of SEED_NOTES that it answers, as section.item or section (function).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from components.distributed import utils
from components.distributed.process import process_group
from components.distributed.process.groups import NotInGroupError
from components.distributed.process.store_sync import PeerFailure
from tests.distributed import published
from tests.distributed.contrast import both_sides, contrast, hear, nodes_of_two, tell
from tests.harness import run_ranks, start_ranks


def _enter(section: Any, body: Callable[[], object]) -> tuple[bool | None, BaseException | None]:
    """Go through a section; return what it said (None: never entered) and the exception that came out of it."""
    first = None
    try:
        with section as first:
            body()
    except BaseException as error:
        return first, error
    return first, None


def _pass() -> None: ...


def _fail() -> None:
    raise KeyError("disk full")


@both_sides
def test_every_node_has_a_first_rank(side: str) -> None:
    """SEED_NOTES 2 (FirstRankPerNode), 7 (15), 8.2: on node-local disks each node must prepare its own files."""

    def check(rank: int, section: Callable[[], Any]) -> None:
        first, error = _enter(section(), _pass)
        assert error is None
        assert first == (rank % 2 == 0), f"rank {rank} of nodes of two"

    contrast(
        side,
        check,
        utils.FirstRankPerNode,
        published.FirstRankPerNode,
        symptom="rank 2 of nodes of two",
        world_size=4,
        env=nodes_of_two,
    )


@both_sides
@pytest.mark.parametrize("failing", [0, 2])
def test_a_failing_first_rank_keeps_all_others_out(side: str, failing: int) -> None:
    """SEED_NOTES 2 (FirstRankPerNode), 8.2: peers were released before the failure, and its type was lost."""

    def check(rank: int, section: Callable[[], Any]) -> None:
        first, error = _enter(section(), _fail if rank == failing else _pass)
        if rank == failing:
            assert isinstance(error, KeyError), repr(error)
            return
        assert rank % 2 == 0 or first is None, f"rank {rank} entered"
        assert isinstance(error, PeerFailure), repr(error)
        assert f"rank {failing} " in str(error)
        assert "KeyError: 'disk full'" in str(error)

    contrast(
        side,
        check,
        utils.FirstRankPerNode,
        published.FirstRankPerNode,
        symptom=r"rank 1 entered|repr\(None\)|assert False",
        world_size=4,
        env=nodes_of_two,
    )


@both_sides
def test_an_exception_keeps_its_type_in_a_world_of_one(side: str) -> None:
    """SEED_NOTES 2 (FirstRankPerNode): ValueError surfaced as SystemExit."""

    def check(rank: int, section: Callable[[], Any]) -> None:
        first, error = _enter(section(), _fail)
        assert first is True
        assert isinstance(error, KeyError), repr(error)

    contrast(side, check, utils.FirstRankPerNode, published.FirstRankPerNode, symptom="SystemExit", world_size=1)


@both_sides
def test_a_failing_other_rank_is_heard_of(side: str) -> None:
    """SEED_NOTES 2 (FirstRankPerNode): nothing was signalled when a rank that is not first failed."""

    def check(rank: int, section: Callable[[], Any]) -> None:
        _, error = _enter(section(), _fail if rank == 1 else _pass)
        if rank == 1:
            assert isinstance(error, KeyError), repr(error)
            tell("rank 1 has failed")
            return
        hear("rank 1 has failed")
        _, error = _enter(section(), _pass)
        assert isinstance(error, PeerFailure), f"{error!r}: the next section went on"
        assert "rank 1 " in str(error)

    contrast(
        side,
        check,
        utils.FirstRankPerNode,
        published.FirstRankPerNode,
        symptom="SystemExit|went on|still running",
        published_timeout=1.5,
    )


@both_sides
def test_nobody_continues_anyway_when_the_first_rank_takes_too_long(side: str) -> None:
    """SEED_NOTES 2 (FirstRankPerNode): "Barrier timed out, continuing anyway"; a timeout that `with` can state."""

    def check(rank: int, section: Callable[..., Any]) -> None:
        _enter(section(), _pass)  # so that both ranks are here

        def body() -> None:
            with contextlib.suppress(RuntimeError):  # on the published side rank 1 never gives up
                hear("rank 1 has given up", seconds=0.8 if rank == 0 else 0.01)

        first, error = _enter(section(timeout=timedelta(seconds=0.3)), body)
        assert first is (True if rank == 0 else None), f"rank {rank} entered"
        assert isinstance(error, TimeoutError)
        assert "did not finish within 0.3 s" in str(error)
        tell("rank 1 has given up")

    contrast(side, check, utils.FirstRankPerNode, published.FirstRankPerNode, symptom="rank 1 entered")


@both_sides
def test_the_section_may_outlast_every_process_group_timeout(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEED_NOTES 2 (FirstRankPerNode), 7 (11): 10 hours are promised, 30 minutes were given. Here 1 s."""

    def check(rank: int, section: Callable[[], Any]) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))
        began = time.monotonic()
        with section() as first:
            if first:
                time.sleep(4)
        assert time.monotonic() - began > 3.9, "did not wait for the first rank"

    monkeypatch.setattr(published, "GLOO_DEFAULT", timedelta(seconds=1))
    contrast(
        side,
        check,
        utils.FirstRankPerNode,
        published.FirstRankPerNode,
        symptom="(?i)rank 1: raised.*(did not wait|timeout|timed out)",
        init=False,
        published_timeout=5.5,
    )


def test_sections_nest_and_decorated_functions_recur() -> None:
    """SEED_NOTES 2 (FirstRankPerNode): the state of one entry was kept on self, where the next one overwrote it."""

    def check(rank: int) -> list[int]:
        order: list[int] = []

        @utils.FirstRankPerNode()
        def descend(depth: int) -> None:
            if depth:
                descend(depth - 1)
            order.append(depth)

        descend(2)
        section = utils.FirstRankPerNode()
        with section as outer, section as inner:
            assert outer == inner == (rank == 0)
        return order

    assert run_ranks(2, check) == [[0, 1, 2]] * 2


def test_a_group_has_its_own_first_ranks() -> None:
    """SEED_NOTES 2 (FirstRankPerNode): an explicit group=; the first of each node among its members."""

    def check(rank: int) -> bool | None:
        group = dist.new_group([1, 2, 3])
        if rank == 0:
            with pytest.raises(NotInGroupError):
                utils.FirstRankPerNode(group).__enter__()
            return None
        with utils.FirstRankPerNode(group) as first:
            return first

    assert run_ranks(4, check, env=nodes_of_two) == [None, True, True, False]


def test_sections_work_before_and_without_a_process_group() -> None:
    """Seed page 001: "create / bootstrap"; works without distributed initialisation."""

    def check(rank: int) -> bool:
        with utils.FirstRankPerNode() as first:
            assert not dist.is_initialized()
        return first

    assert run_ranks(3, check, init=False) == [True, False, False]
    with utils.FirstRankPerNode() as first:
        assert first is True
    with pytest.raises(KeyError), utils.FirstRankPerNode():
        raise KeyError("as it is")


def test_first_ranks_run_before_the_others_and_once_per_node() -> None:
    """Seed page 001: what the section is for, over several sections; time is the witness."""

    def check(rank: int) -> list[tuple[bool, float, float]]:
        spans = []
        for _ in range(3):
            with utils.FirstRankPerNode() as first:
                began = time.monotonic()
                time.sleep(0.05 if first else 0)
                spans.append((first, began, time.monotonic()))
        return spans

    for section in zip(*run_ranks(4, check, env=nodes_of_two), strict=True):
        ends = [end for first, _, end in section if first]
        begins = [begin for first, begin, _ in section if not first]
        assert len(ends) == 2
        assert max(ends) <= min(begins)


def test_rank_zero_may_end_as_soon_as_it_is_through() -> None:
    """LAUNCH: rank 0 serves the store. At its exit it lets the others read what it said last."""

    def check(rank: int, start: str) -> bool:
        if start == "ours":
            process_group.start_process_group()
        elif start == "torch's":
            dist.init_process_group("gloo")
        if rank == 1:
            time.sleep(0.2)
        with utils.FirstRankPerNode() as first:
            time.sleep(0.5 * (rank == 0))
        if start == "torch's":
            dist.destroy_process_group()
        atexit._run_exitfuncs()
        if rank == 0:
            os._exit(0)
        return first

    for start in ("ours", "torch's", "none"):
        ended, second, third = start_ranks(3, check, start, init=False)
        assert ended.exit_code == 0
        assert (second.result, third.result) == (False, False), f"{second}\n{third}"
