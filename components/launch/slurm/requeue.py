"""Requeue policy of a job: limits on requeues, on hangs, on corruption, and on attempts without progress.

An attempt makes progress if it publishes a checkpoint. `conclude` applies the policy at the end of an attempt. The
batch script applies it at the start of a requeued one (`python -m components.launch.slurm.requeue RUN_DIR ATTEMPT`),
since Slurm kills and requeues a job by itself if its node failed or its grace time was too short, without `conclude`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.config.compose.frozen import read_section
from components.config.errors import ConfigError
from components.config.schema.cluster import ClusterConfig
from components.config.schema.schedulers.slurm import RequeueConfig
from components.protocol.failures import Kind
from components.protocol.run_files import (
    CHECKPOINTS,
    CONFIG,
    FIRST_STEP,
    LOGS,
    attempt_logs,
    read_result,
    record_result,
)
from components.terminal import print_text

JOB, CHECKPOINTS_BEFORE = "job", "checkpoints"
"""Files that the batch script writes to an attempt's logs: the job id, and the entries of checkpoints/ at the start."""

_PUBLISHED = re.compile(r"step_\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """One attempt of a job."""

    stepped: bool
    """Whether it finished an optimizer step."""
    progressed: bool
    """Whether it published a checkpoint."""
    status: str
    """Status in its result.json; empty if there is none."""


def reason_to_stop(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job must not be requeued after these attempts, naming the limit; None if it may be."""
    limit = _policy(run_dir).max
    if int(environ.get("SLURM_RESTART_COUNT") or 0) >= limit:
        return f"the limit of {limit} requeues is reached (cluster.requeue.max)"
    return lack_of_progress(run_dir, attempts)


def lack_of_progress(run_dir: Path, attempts: list[JobAttempt]) -> str | None:
    """Return why these attempts count as stuck, naming the limit and remedies; None if another one may start."""
    policy, section = _policy(run_dir), "cluster.requeue"
    with_steps = without_steps = 0
    for attempt in reversed(attempts):
        if attempt.progressed:
            break
        with_steps, without_steps = with_steps + attempt.stepped, without_steps + (not attempt.stepped)
    if with_steps >= policy.without_progress:
        return (
            f"{with_steps} attempts in a row took steps and published no newer checkpoint "
            f"({section}.without_progress={policy.without_progress}): save more often (checkpoint.every, "
            "checkpoint.every_minutes), give a save more time (cluster.signal_lead_seconds, GraceTime of the "
            "partition), or raise the limit"
        )
    if without_steps >= policy.before_first_step:
        return (
            f"{without_steps} attempts in a row were stopped before their first step "
            f"({section}.before_first_step={policy.before_first_step}): raise cluster.time, choose a partition that is "
            "preempted less, or raise the limit"
        )
    return None


def reason_not_after_hang(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job whose last attempt hung must not be requeued; None if it may be."""
    limit = _policy(run_dir).hang
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
    limit = _policy(run_dir).corruption
    if limit == 0:
        return "a run with a rank that computes wrong numbers is not requeued (cluster.requeue.corruption=0)"
    if sum(attempt.status == Kind.corrupted for attempt in attempts[:-1]) >= limit:
        return f"the limit of {limit} requeues after wrong numbers is reached (cluster.requeue.corruption)"
    return reason_to_stop(run_dir, attempts, environ)


def attempts_of_job(run_dir: Path, attempt: int) -> list[JobAttempt]:
    """Return the attempts of the job that runs attempt number `attempt`, oldest first, up to that one.

    Empty if the user's own batch script does not write the files that this needs.
    """
    job = _lines(attempt_logs(run_dir, attempt) / JOB)
    numbers = [number for number in range(attempt + 1) if _lines(attempt_logs(run_dir, number) / JOB) == job]
    if not job:
        return []
    starts = [_published(_lines(attempt_logs(run_dir, number) / CHECKPOINTS_BEFORE)) for number in numbers]
    folder = run_dir / CHECKPOINTS
    starts.append(_published([path.name for path in folder.iterdir()] if folder.is_dir() else []))
    return [
        JobAttempt(
            stepped=(logs / FIRST_STEP).exists() or (number == attempt and (run_dir / LOGS / FIRST_STEP).exists()),
            progressed=bool(after - before),
            status=str(read_result(run_dir if number == attempt else logs).get("status", "")),
        )
        for number, before, after in zip(numbers, starts[:-1], starts[1:], strict=True)
        for logs in [attempt_logs(run_dir, number)]
    ]


def check_requeue() -> int:
    """Return 1 if a requeued job must end instead of starting its attempt, after recording the reason; else 0."""
    run_dir, attempt = Path(sys.argv[1]), int(sys.argv[2])
    reason = lack_of_progress(run_dir, attempts_of_job(run_dir, attempt)[:-1])
    if reason is None:
        return 0
    print_text(f"not restarted: {reason}", flush=True)
    record_result(run_dir, {"status": "failed", "error": reason})
    return 1


def _policy(run_dir: Path) -> RequeueConfig:
    """Return the requeue policy in a run's config; the defaults if the config cannot be read."""
    try:
        return read_section(run_dir / CONFIG, "cluster", ClusterConfig).requeue
    except ConfigError:
        return RequeueConfig()


def _published(names: list[str]) -> set[str]:
    """Return the names of published checkpoints, without temporary folders."""
    return {name for name in names if _PUBLISHED.fullmatch(name)}


def _lines(file: Path) -> list[str]:
    """Return the complete lines of a file; none if it does not exist."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


if __name__ == "__main__":
    sys.exit(check_requeue())
