"""The test harness: its results, its failure reports, and the cleanup of processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, run_ranks, start_ranks


def _rank_environment(rank: int) -> dict[str, str | None]:
    return {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "HOME": None}


def test_results_are_returned_in_rank_order() -> None:
    def body(rank: int, scale: float) -> tuple[int, float, str, bool]:
        value = torch.tensor([scale * rank], dtype=torch.float64)
        dist.all_reduce(value)
        return dist.get_rank(), value.item(), os.environ["LOCAL_RANK"], "HOME" in os.environ

    results = run_ranks(3, body, 2.0, env=_rank_environment)
    assert results == [(0, 6.0, "0", False), (1, 6.0, "1", False), (2, 6.0, "0", False)]


def test_master_port_is_free_for_functions_that_initialize_torch_distributed() -> None:
    def body(rank: int) -> int:
        assert not dist.is_initialized()
        dist.init_process_group("gloo")  # env://
        return dist.get_world_size()

    assert run_ranks(2, body, init=False) == [2, 2]


def test_aborted_rank_is_reported_with_what_native_code_printed() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            os.write(2, b"terminate called: the reason\n")
            os.abort()

    with pytest.raises(RankFailure, match=r"(?s)rank 1: killed by SIGABRT.*terminate called: the reason"):
        run_ranks(2, body)


def test_failed_rank_raises_with_its_traceback_and_peers_are_killed() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            raise LookupError("the reason")
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank\(s\) 0, 1 of 2.*time.sleep|LookupError: the reason") as caught:
        run_ranks(2, body)
    assert time.monotonic() - began < 30
    assert "LookupError: the reason" in str(caught.value)
    assert "still running, killed by the harness" in str(caught.value)


@pytest.mark.slow
def test_every_outcome_of_a_rank_is_reported_and_its_children_are_killed(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            raise SystemExit(3)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 3:
            os._exit(5)
        if rank == 4:
            child = os.fork()
            if child:
                (tmp_path / "child").write_text(str(child))
            time.sleep(600)
        return "fine"

    outcomes = start_ranks(5, body, timeout=5.0, init=False)
    assert [outcome.ok for outcome in outcomes] == [True, False, False, False, False]
    assert outcomes[0].result == "fine"
    assert outcomes[1].exception == "SystemExit: 3"
    assert outcomes[2].signal == "SIGKILL"
    assert outcomes[3].exit_code == 5
    assert "in body" in (outcomes[4].stack or "")
    assert _ended(int((tmp_path / "child").read_text()))


def _ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False
