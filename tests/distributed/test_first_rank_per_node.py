"""FirstRankPerNode, compared with the published behavior of NeMo AutoModel.

Each docstring names the published function and the weakness that the test covers. Tests under `against_published`
also run their check against a re-creation of the published behavior, which must fail.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from components.distributed import utils
from components.distributed.process import process_group
from components.distributed.process.groups import NotInGroupError
from components.distributed.process.store_sync import PeerFailure
from tests.distributed import published
from tests.distributed.contrast import against_published, nodes_of_two, signal_event, wait_for_event
from tests.harness import run_ranks, start_ranks

section_check = partial(against_published, utils.FirstRankPerNode, published.FirstRankPerNode)


def _enter(section: Any, body: Callable[[], object]) -> tuple[bool | None, BaseException | None]:
    """Run `body` in a section; return the value of the section (None: not entered) and the exception that it raised."""
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


@section_check(symptom="rank 2 of nodes of two", world_size=4, env=nodes_of_two)
def test_first_rank_of_every_node_enters_first(rank: int, section: Callable[[], Any]) -> None:
    """NeMo AutoModel FirstRankPerNode: only global rank 0 is first, but each node must prepare its node-local files."""
    first, error = _enter(section(), _pass)
    assert error is None
    assert first == (rank % 2 == 0), f"rank {rank} of nodes of two"


@pytest.mark.parametrize("failing", [0, 2])
@section_check(symptom=r"rank 1 entered|repr\(None\)|assert False", world_size=4, env=nodes_of_two)
def test_failure_of_a_first_rank_keeps_other_ranks_out(rank: int, section: Callable[[], Any], failing: int) -> None:
    """NeMo AutoModel FirstRankPerNode: releases the peers although it failed, and loses the exception type."""
    first, error = _enter(section(), _fail if rank == failing else _pass)
    if rank == failing:
        assert isinstance(error, KeyError), repr(error)
        return
    assert rank % 2 == 0 or first is None, f"rank {rank} entered"
    assert isinstance(error, PeerFailure), repr(error)
    assert f"rank {failing} " in str(error)
    assert "KeyError: 'disk full'" in str(error)


@section_check(symptom="SystemExit", world_size=1)
def test_exception_keeps_its_type_in_a_world_of_one(rank: int, section: Callable[[], Any]) -> None:
    """NeMo AutoModel FirstRankPerNode: raises SystemExit in place of the original exception."""
    first, error = _enter(section(), _fail)
    assert first is True
    assert isinstance(error, KeyError), repr(error)


@section_check(symptom="SystemExit|went on|still running", published_timeout=1.5)
def test_failure_of_another_rank_ends_the_next_section(rank: int, section: Callable[[], Any]) -> None:
    """NeMo AutoModel FirstRankPerNode: does not signal the failure of a rank that is not first."""
    _, error = _enter(section(), _fail if rank == 1 else _pass)
    if rank == 1:
        assert isinstance(error, KeyError), repr(error)
        signal_event("rank 1 has failed")
        return
    wait_for_event("rank 1 has failed")
    _, error = _enter(section(), _pass)
    assert isinstance(error, PeerFailure), f"{error!r}: the next section went on"
    assert "rank 1 " in str(error)


@section_check(symptom="rank 1 entered")
def test_slow_first_rank_raises_timeout_error_on_other_ranks(rank: int, section: Callable[..., Any]) -> None:
    """NeMo AutoModel FirstRankPerNode: continues after a timeout, which cannot be set in a `with` statement."""
    _enter(section(), _pass)  # synchronizes the ranks

    def body() -> None:
        with contextlib.suppress(RuntimeError):  # the published rank 1 never gives up
            wait_for_event("rank 1 has given up", seconds=0.8 if rank == 0 else 0.01)

    first, error = _enter(section(timeout=timedelta(seconds=0.3)), body)
    assert first is (True if rank == 0 else None), f"rank {rank} entered"
    assert isinstance(error, TimeoutError)
    assert "did not finish within 0.3 s" in str(error)
    signal_event("rank 1 has given up")


@section_check(symptom="(?i)rank 1: raised.*(did not wait|timeout|timed out)", init=False, published_timeout=5.5)
def test_section_may_run_longer_than_process_group_timeouts(
    rank: int, section: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo AutoModel FirstRankPerNode: documents 10 hours, but waits for the gloo timeout of 30 minutes (here 1 s)."""
    monkeypatch.setattr(published, "GLOO_DEFAULT", timedelta(seconds=1))
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    began = time.monotonic()
    with section() as first:
        if first:
            time.sleep(2.5)
    assert time.monotonic() - began > 2.4, "did not wait for the first rank"


def test_sections_nest_and_decorated_functions_recurse() -> None:
    """NeMo AutoModel FirstRankPerNode: stores the state of an entry on self, so a nested entry overwrites it."""

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


def test_first_ranks_are_chosen_among_the_members_of_a_group() -> None:
    def check(rank: int) -> bool | None:
        group = dist.new_group([1, 2, 3])
        if rank == 0:
            with pytest.raises(NotInGroupError):
                utils.FirstRankPerNode(group).__enter__()
            return None
        with utils.FirstRankPerNode(group) as first:
            return first

    assert run_ranks(4, check, env=nodes_of_two) == [None, True, True, False]


def test_sections_work_without_a_process_group() -> None:
    """NeMo AutoModel documents that FirstRankPerNode works before distributed initialization."""

    def check(rank: int) -> bool:
        with utils.FirstRankPerNode() as first:
            assert not dist.is_initialized()
        return first

    assert run_ranks(3, check, init=False) == [True, False, False]
    with utils.FirstRankPerNode() as first:
        assert first is True
    with pytest.raises(KeyError), utils.FirstRankPerNode():
        raise KeyError("as it is")


def test_other_ranks_enter_after_all_first_ranks_leave() -> None:
    """Checked with timestamps over several sections."""

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


def test_rank_zero_may_exit_right_after_the_section() -> None:
    """Rank 0 hosts the store, so at exit it must wait until the other ranks have read its last messages."""

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
