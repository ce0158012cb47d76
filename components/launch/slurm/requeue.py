"""Requeue policy of a Slurm job: limits on requeues, on hangs, on corruption, and on attempts without progress.

`conclude` applies the policy at the end of an attempt. The batch script applies it at the start of a requeued one
(`python -m components.launch.slurm.requeue RUN_DIR ATTEMPT`), since Slurm kills and requeues a job by itself if its
node failed or its grace time was too short, without `conclude`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from components.launch.schedulers.job_attempts import (
    JobAttempt,
    Remedies,
    attempts_of_job,
    lack_of_progress,
    requeue_policy,
)
from components.protocol.failures import Kind
from components.protocol.run_files import record_result
from components.terminal import print_text

REMEDIES = Remedies(
    longer_save="cluster.signal_lead_seconds, GraceTime of the partition",
    longer_attempt="raise cluster.time, choose a partition that is preempted less",
)


def reason_to_stop(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job must not be requeued after these attempts, naming the limit; None if it may be."""
    limit = requeue_policy(run_dir).max
    if int(environ.get("SLURM_RESTART_COUNT") or 0) >= limit:
        return f"the limit of {limit} requeues is reached (cluster.requeue.max)"
    return lack_of_progress(run_dir, attempts, REMEDIES)


def reason_not_after_hang(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job whose last attempt hung must not be requeued; None if it may be."""
    limit = requeue_policy(run_dir).hang
    if limit == 0:
        return "a run that hung is not requeued (cluster.requeue.hang=0)"
    if sum(attempt.status == Kind.hung for attempt in attempts[:-1]) >= limit:
        return f"the limit of {limit} requeues after a hang is reached (cluster.requeue.hang)"
    if not attempts or not attempts[-1].progressed:
        return "the attempt published no checkpoint before it hung, so it would likely hang again"
    return reason_to_stop(run_dir, attempts, environ)


def reason_not_after_corruption(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job in whose last attempt a rank computed wrong numbers must not be requeued; None if it may be.

    Unlike after a hang, the attempt need not have published a checkpoint: the requeued job runs on other nodes.
    """
    limit = requeue_policy(run_dir).corruption
    if limit == 0:
        return "a run with a rank that computes wrong numbers is not requeued (cluster.requeue.corruption=0)"
    if sum(attempt.status == Kind.corrupted for attempt in attempts[:-1]) >= limit:
        return f"the limit of {limit} requeues after wrong numbers is reached (cluster.requeue.corruption)"
    return reason_to_stop(run_dir, attempts, environ)


def check_requeue() -> int:
    """Return 1 if a requeued job must end instead of starting its attempt, after recording the reason; else 0."""
    run_dir, attempt = Path(sys.argv[1]), int(sys.argv[2])
    reason = lack_of_progress(run_dir, attempts_of_job(run_dir, attempt)[:-1], REMEDIES)
    if reason is None:
        return 0
    print_text(f"not restarted: {reason}", flush=True)
    record_result(run_dir, {"status": "failed", "error": reason})
    return 1


if __name__ == "__main__":
    sys.exit(check_requeue())
