"""Run one check on two implementations: ours must pass it on every rank, the published behavior must fail it.

A check that both pass would prove nothing. The failing ranks must report `symptom`, so that an unrelated bug in the
re-creation of the published code does not count as its weakness.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import RankEnvironment, run_ranks, start_ranks

IMPLEMENTATIONS = ("ours", "published")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
both_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def contrast(
    implementation: str,
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
    """Run `check(rank, functions)` on real ranks for one of the two implementations.

    Args:
        implementation: "ours" or "published".
        symptom: pattern that the reports of the published implementation's ranks must contain.
        published_timeout: seconds after which a hanging published implementation is killed ("still running").
    """
    if implementation == "ours":
        run_ranks(world_size, check, ours, env=env, init=init)
        return
    outcomes = start_ranks(world_size, check, published, env=env, init=init, timeout=published_timeout)
    report = "\n".join(map(str, outcomes))
    assert not all(outcome.ok for outcome in outcomes), "the published behavior passes: the check proves nothing"
    assert re.search(symptom, report), f"the published behavior fails in another way:\n{report}"


def against_published(ours: Any, published: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Turn a check `(rank, functions, *fixtures)` into a test of both implementations.

    Args:
        options: those of `contrast`.
    """

    def decorate(check: Callable[..., Any]) -> Callable[..., None]:
        def test(implementation: str, **fixtures: Any) -> None:
            contrast(implementation, lambda *args: check(*args, **fixtures), ours, published, **options)

        parameters = list(inspect.signature(check).parameters.values())[2:]
        names = [inspect.Parameter("implementation", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters]
        test.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(test, name, getattr(check, name))
        return both_implementations(test)

    return decorate


def signal_event(event: str) -> None:
    """Release the ranks that wait for this event in `wait_for_event`."""
    dist.distributed_c10d._get_default_store().set(f"event/{event}", "")


def wait_for_event(event: str, seconds: float = 30) -> None:
    """Wait until a rank signals this event: orders ranks in time without sleeps that may be too short."""
    dist.distributed_c10d._get_default_store().wait([f"event/{event}"], timedelta(seconds=seconds))


def nodes_of_two(rank: int) -> dict[str, str | None]:
    """Environment that torchrun would set on emulated nodes of two ranks."""
    return {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}


def without(*names: str) -> RankEnvironment:
    """Rank environment without these variables."""
    return lambda rank: dict.fromkeys(names)


def alone(**variables: str) -> RankEnvironment:
    """Environment of a process without launcher variables, plus these variables."""
    return lambda rank: {**dict.fromkeys(LAUNCHER_NAMES), **variables}


def srun(rank: int, **more: str | None) -> dict[str, str | None]:
    """Environment that srun sets for a step of two tasks on one node, without the variables of torchrun."""
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
