"""Requeue policy of a Slurm job: limits on requeues, crashes, hangs, corruption and attempts without progress.

`conclude` applies it at the end of an attempt, `attempt_start` at the start of the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from components.launch.schedulers.job_attempts import (
    JobAttempt,
    Remedies,
    lack_of_progress,
    requeue_policy,
)
from components.protocol.failures import Kind
from components.protocol.role import whole_number

CRASHED = ("failed", "oom")
"""Statuses of attempts after which the ranks of a job may be started again."""
REMEDIES = Remedies(
    longer_save="cluster.signal_lead_seconds, GraceTime of the partition",
    longer_attempt="raise cluster.time, choose a partition that is preempted less",
)


def reason_to_stop(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job must not be requeued after these attempts, naming the limit; None if it may be."""
    limit = requeue_policy(run_dir).max
    if (whole_number(environ.get("SLURM_RESTART_COUNT", "")) or 0) >= limit:
        return f"the limit of {limit} requeues is reached (cluster.requeue.max)"
    return lack_of_progress(run_dir, attempts, REMEDIES)


def reason_not_after_hang(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job whose last attempt hung must not be requeued; None if it may be."""
    limit = requeue_policy(run_dir).hang
    if limit == 0:
        return "a run that hung is not requeued (cluster.requeue.hang=0)"
    if sum(attempt.status == Kind.hung for attempt in attempts[:-1]) >= limit:
        return f"the limit of {limit} requeues after a hang is reached (cluster.requeue.hang)"
    if not any(attempt.stepped for attempt in attempts):
        return "the run hung before its first step, so it would likely hang again"
    return reason_to_stop(run_dir, attempts, environ)


def reason_not_after_crash(run_dir: Path, attempts: list[JobAttempt]) -> str | None:
    """Return why the ranks must not be started again after one of them crashed; None if they may be."""
    limit = requeue_policy(run_dir).crash
    if limit == 0:
        return "ranks that crashed are not started again (cluster.requeue.crash=0)"
    if sum(attempt.status in CRASHED for attempt in attempts[:-1]) >= limit:
        return f"the limit of {limit} starts after a crash is reached (cluster.requeue.crash)"
    if not attempts or not attempts[-1].stepped:
        return "the rank crashed before the first step, so it would likely crash again"
    return lack_of_progress(run_dir, attempts, REMEDIES)


def reason_not_after_corruption(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job in whose last attempt a rank computed wrong numbers must not be requeued; None if it may be.

    Unlike after a hang, the attempt need not have taken a step: the requeued job runs on other nodes.
    """
    limit = requeue_policy(run_dir).corruption
    if limit == 0:
        return "a run with a rank that computes wrong numbers is not requeued (cluster.requeue.corruption=0)"
    if sum(attempt.status == Kind.corrupted for attempt in attempts[:-1]) >= limit:
        return f"the limit of {limit} requeues after wrong numbers is reached (cluster.requeue.corruption)"
    return reason_to_stop(run_dir, attempts, environ)
