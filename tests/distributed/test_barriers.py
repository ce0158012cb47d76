"""Barriers, compared with the published behavior of NeMo AutoModel, OLMo-core and KempnerForge.

Each docstring names the published function and the weakness that the test covers. Tests under `against_published`
also run their check against a re-creation of the published behavior, which must fail.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from components.distributed import init, utils
from components.distributed.process.barriers import BarrierTimeoutError
from components.distributed.process.groups import NotInGroupError
from tests.distributed import published
from tests.distributed.contrast import against_published, both_implementations, signal_event, wait_for_event
from tests.harness import join_world, run_ranks, start_ranks

SECOND = timedelta(seconds=1)


@pytest.mark.parametrize("with_group", [False, True], ids=["world", "group"])
@against_published(
    utils._barrier_with_timeout, published._barrier_with_timeout, symptom="rank 0: still running", published_timeout=2
)
def test_barrier_returns_false_after_its_timeout(rank: int, barrier: Callable[..., bool], with_group: bool) -> None:
    """NeMo AutoModel _barrier_with_timeout: peers wait 30 minutes in new_group, and forever if group= is given."""
    group = dist.new_group([0, 1]) if with_group else None
    if rank == 1:
        wait_for_event("rank 0 has given up")
    assert barrier(timedelta(seconds=0.3), group) is False
    signal_event("rank 0 has given up")
    value = torch.ones(1)
    dist.all_reduce(value)  # the process group still works
    assert value.item() == 2


@against_published(utils._barrier_with_timeout, published._barrier_with_timeout, symptom="assert 6 == 1")
def test_barrier_creates_no_process_groups(rank: int, barrier: Callable[..., bool]) -> None:
    """NeMo AutoModel _barrier_with_timeout: creates a world-sized group per call, with O(world^2) sockets each time."""
    before = dist.distributed_c10d._world.group_count
    assert all(barrier(10 * SECOND) for _ in range(5))
    assert dist.distributed_c10d._world.group_count == before


def test_subgroup_barrier_waits_for_members_only(caplog: pytest.LogCaptureFixture) -> None:
    """Ranks outside the group raise NotInGroupError."""

    def check(rank: int) -> tuple[bool, bool]:
        group = dist.new_group([1, 2])
        if rank == 0:
            with pytest.raises(NotInGroupError, match="rank 0 is not a member"):
                utils._barrier_with_timeout(SECOND, group)
            return True, True
        return utils._barrier_with_timeout(10 * SECOND, group), utils._barrier_with_timeout(10 * SECOND, group)

    assert run_ranks(3, check) == [(True, True)] * 3


def test_single_process_barrier_returns_immediately() -> None:
    """Holds without a process group and in a group of one rank."""
    assert utils._barrier_with_timeout(timedelta(0))
    assert utils._create_gloo_group() is None
    utils.barrier()
    assert run_ranks(1, lambda rank: utils._barrier_with_timeout(timedelta(0))) == [True]


@against_published(
    utils._create_gloo_group,
    published._create_gloo_group,
    symptom="rank 0: still running",
    published_timeout=2,
    init=False,
)
def test_gloo_group_uses_the_timeout_of_the_default_group(rank: int, create: Callable[[], Any]) -> None:
    """NeMo AutoModel _create_gloo_group: uses the default of 30 minutes, whatever the timeout of the run."""
    join_world(SECOND)
    group = create()
    dist.barrier(group)
    if rank == 1:
        wait_for_event("rank 0 has given up")
        return
    with pytest.raises(RuntimeError):
        dist.barrier(group)
    signal_event("rank 0 has given up")


class Lines(logging.Handler):
    """Root handler that stores log lines of level INFO and above."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger().addHandler(self)
        logging.getLogger().setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        signal_event(f"line {len(self.lines)}")


def _published_barrier_and_log(string: str) -> None:
    published.barrier_and_log(string, logging.getLogger("published"))


@against_published(utils.barrier_and_log, _published_barrier_and_log, symptom=r"rank 1: \['\[before")
def test_barrier_and_log_logs_on_rank_zero_only(rank: int, barrier_and_log: Callable[..., None]) -> None:
    """NeMo AutoModel barrier_and_log: logs on every rank, although it documents rank 0 only."""
    log = Lines()
    barrier_and_log("before training")
    assert bool(log.lines) == (rank == 0), f"rank {rank}: {log.lines}"
    if rank == 0:
        assert log.lines[-1].startswith("[before training] datetime: ")


@against_published(
    utils.barrier_and_log, _published_barrier_and_log, symptom="rank 0: still running", published_timeout=2
)
def test_barrier_and_log_logs_before_it_waits(rank: int, barrier_and_log: Callable[..., None]) -> None:
    """NeMo AutoModel barrier_and_log: logs only after the barrier, so a hanging barrier leaves no trace in the log."""
    if rank == 0:
        Lines()
    else:
        wait_for_event("line 1")  # before this rank enters the barrier
    barrier_and_log("before training")


@against_published(init._barrier_with_timeout, published.barrier_with_reason, symptom=r"AssertionError|DID NOT RAISE")
def test_group_still_works_after_a_barrier_timeout(rank: int, barrier: Callable[[float, str], None]) -> None:
    """KempnerForge _barrier_with_timeout: a gloo group is unusable after a timeout. The missing rank is named here."""
    if rank == 1:
        wait_for_event("rank 0 has given up")
    with pytest.raises(RuntimeError, match=r"timed out after 0.3s during mesh") as caught:
        barrier(0.3, "mesh")
    signal_event("rank 0 has given up")
    assert "rank(s) 1 did not arrive" in str(caught.value)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2


@both_implementations
def test_other_barrier_errors_are_not_reported_as_timeouts(implementation: str) -> None:
    """KempnerForge _barrier_with_timeout: reports "timed out" for any RuntimeError."""

    def check(rank: int, barrier: Callable[[float, str], None]) -> None:
        if rank == 1:
            _leave_after_reporting()
        with pytest.raises(RuntimeError) as caught:
            barrier(20.0, "mesh")
        assert "timed out" not in str(caught.value), str(caught.value)
        assert "Barrier failed during mesh" in str(caught.value)

    def _leave_after_reporting() -> None:
        """Report this rank's arrival, then exit without taking part in the collective."""
        from components.distributed.process.barriers import _missing_after

        if implementation == "ours":
            _missing_after(timedelta(seconds=20))
        time.sleep(0.3)
        os._exit(0)

    def expect_survivor() -> None:
        survivor, _ = start_ranks(2, check, init._barrier_with_timeout)
        assert survivor.ok, str(survivor)

    if implementation == "ours":
        expect_survivor()
    else:
        survivor, _ = start_ranks(2, check, published.barrier_with_reason)
        assert "AssertionError: Barrier timed out" in str(survivor)


def test_named_barrier_passes_and_is_a_no_op_in_a_single_process(caplog: pytest.LogCaptureFixture) -> None:
    """BarrierTimeoutError is a RuntimeError, as KempnerForge documents."""

    def check(rank: int) -> None:
        for _ in range(3):
            init._barrier_with_timeout(20.0, reason="DeviceMesh construction")

    run_ranks(3, check)
    init._barrier_with_timeout(0.1, reason="nothing")
    assert issubclass(BarrierTimeoutError, RuntimeError)
    assert logging.getLogger(init.__name__) is init.logger


def test_barrier_waits_for_all_members() -> None:
    """Ranks outside the group raise NotInGroupError."""

    def check(rank: int) -> float:
        group = dist.new_group([0, 2])
        if rank == 1:
            with pytest.raises(NotInGroupError):
                utils.barrier(group)
        else:
            utils.barrier(group)
        began = time.monotonic()
        time.sleep(0.3 * (rank == 1))
        utils.barrier()
        return time.monotonic() - began

    assert min(run_ranks(3, check)) > 0.25
