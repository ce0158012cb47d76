"""One check, two implementations: ours must pass it on every rank, the published behaviour must fail it.

A check that both pass would prove nothing. `symptom` is what the failing ranks must show, so that a slip in
the re-creation does not count as the published weakness.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import RankEnvironment, run_ranks, start_ranks

SIDES = ("ours", "published")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
both_sides = pytest.mark.parametrize("side", SIDES)


def contrast(
    side: str,
    check: Callable[[int, Any], Any],
    ours: Any,
    published: Any,
    *,
    symptom: str,
    world_size: int = 2,
    env: RankEnvironment | None = None,
    init: bool = True,
    published_timeout: float = 10.0,
) -> None:
    """Run `check(rank, implementation)` on real ranks for one of the two sides.

    Args:
        symptom: pattern that the reports of the published side's ranks must contain.
        published_timeout: seconds after which a hanging published side is ended ("still running").
    """
    if side == "ours":
        run_ranks(world_size, check, ours, env=env, init=init)
        return
    outcomes = start_ranks(world_size, check, published, env=env, init=init, timeout=published_timeout)
    report = "\n".join(map(str, outcomes))
    assert not all(outcome.ok for outcome in outcomes), "the published behaviour passes: the check proves nothing"
    assert re.search(symptom, report), f"the published side fails in another way:\n{report}"


def tell(news: str) -> None:
    """Let other ranks go on that `hear` this."""
    dist.distributed_c10d._get_default_store().set(f"news/{news}", "")


def hear(news: str, seconds: float = 30) -> None:
    """Wait until some rank has told this: what orders ranks in time without a sleep that might be too short."""
    dist.distributed_c10d._get_default_store().wait([f"news/{news}"], timedelta(seconds=seconds))


def nodes_of_two(rank: int) -> dict[str, str | None]:
    """Ranks of emulated nodes of two: what torchrun would tell them."""
    return {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}


def without(*names: str) -> RankEnvironment:
    """Ranks that lack these variables."""
    return lambda rank: dict.fromkeys(names)


def alone(**variables: str) -> RankEnvironment:
    """A process that nobody told a rank, with these variables."""
    return lambda rank: {**dict.fromkeys(LAUNCHER_NAMES), **variables}


def srun(rank: int, **more: str | None) -> dict[str, str | None]:
    """What srun gives to the tasks of a step of two on one node, without anything of torchrun."""
    slurm = {
        "SLURM_JOB_ID": str(40000 + os.getppid()),  # one job per pytest
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_JOB_NODELIST": "n1",
    }
    return {**dict.fromkeys(LAUNCHER_NAMES), **slurm, **more}
