"""Whether a job may go back into the queue: requeues are bounded, and so are attempts without progress.

An attempt makes progress if it publishes a checkpoint. Checked by `conclude` at the end of an attempt, and by the batch
script at the start of a requeued one (`python -m components.launch.slurm.requeue RUN_DIR ATTEMPT`), since Slurm itself
requeues a job whose node failed or whose grace time was too short, without any end that a script could see.
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
from components.config.schema.slurm import RequeueConfig
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
"""Files that the batch script writes into the logs of an attempt: its job, and what is in checkpoints/ at its start."""

_PUBLISHED = re.compile(r"step_\d+(\.\d+)?")
_HUNG_RANK = re.compile(r"rank \d+ on host (\S+) (?:is missing|does not come)")


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """One attempt of a job."""

    stepped: bool
    """Whether it finished an optimizer step."""
    progressed: bool
    """Whether it published a checkpoint."""
    hung: bool


def reason_to_stop(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job must not be requeued after these attempts, with the limit to raise; None if it may be."""
    most = _policy(run_dir).max
    if int(environ.get("SLURM_RESTART_COUNT") or 0) >= most:
        return f"{most} requeues are the most (cluster.requeue.max)"
    return lack_of_progress(run_dir, attempts)


def lack_of_progress(run_dir: Path, attempts: list[JobAttempt]) -> str | None:
    """Return why a job must not start again after these attempts, with the limit to raise; None if it may."""
    policy, limit = _policy(run_dir), "cluster.requeue"
    stepped = waited = 0
    for attempt in reversed(attempts):
        if attempt.progressed:
            break
        stepped, waited = stepped + attempt.stepped, waited + (not attempt.stepped)
    if stepped >= policy.without_progress:
        return (
            f"{stepped} attempts in a row took steps and published no newer checkpoint "
            f"({limit}.without_progress={policy.without_progress}): save more often (checkpoint.every, "
            "checkpoint.every_minutes), give a save more time (cluster.signal_lead_seconds, GraceTime of the "
            "partition), or raise the limit"
        )
    if waited >= policy.before_first_step:
        return (
            f"{waited} attempts in a row were stopped before their first step "
            f"({limit}.before_first_step={policy.before_first_step}): raise cluster.time, choose a partition that is "
            "preempted less, or raise the limit"
        )
    return None


def reason_not_after_hang(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job whose last attempt hung must not be requeued; None if it may be."""
    most = _policy(run_dir).hang
    if most == 0:
        return "a run that hung is not requeued (cluster.requeue.hang=0)"
    if sum(attempt.hung for attempt in attempts[:-1]) >= most:
        return f"{most} requeues after a hang are the most (cluster.requeue.hang)"
    if not attempts or not attempts[-1].progressed:
        return "an attempt that hangs before it has published a checkpoint would hang again"
    return reason_to_stop(run_dir, attempts, environ)


def attempts_of_job(run_dir: Path, attempt: int) -> list[JobAttempt]:
    """Return the attempts of the job that runs attempt number `attempt`, oldest first, up to that one.

    Empty where a batch script of the user's own does not write the files that this needs.
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
            hung=read_result(run_dir if number == attempt else logs).get("status") == "hung",
        )
        for number, before, after in zip(numbers, starts[:-1], starts[1:], strict=True)
        for logs in [attempt_logs(run_dir, number)]
    ]


def hung_nodes(message: str) -> list[str]:
    """Return the nodes of the ranks that the others waited for, by the message that ended a run that hung."""
    return sorted(set(_HUNG_RANK.findall(message)))


def check_requeue() -> int:
    """Return 1 where a requeued job must end instead of starting its attempt; the reason is then recorded."""
    run_dir, attempt = Path(sys.argv[1]), int(sys.argv[2])
    reason = lack_of_progress(run_dir, attempts_of_job(run_dir, attempt)[:-1])
    if reason is None:
        return 0
    print_text(f"not started again: {reason}", flush=True)
    record_result(run_dir, {"status": "failed", "error": reason})
    return 1


def _policy(run_dir: Path) -> RequeueConfig:
    """The policy of a run; the defaults where its config cannot be read."""
    try:
        return read_section(run_dir / CONFIG, "cluster", ClusterConfig).requeue
    except ConfigError:
        return RequeueConfig()


def _published(names: list[str]) -> set[str]:
    return {name for name in names if _PUBLISHED.fullmatch(name)}


def _lines(file: Path) -> list[str]:
    return file.read_text().split("\n")[:-1] if file.exists() else []


if __name__ == "__main__":
    sys.exit(check_requeue())
