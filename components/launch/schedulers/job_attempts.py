"""Attempts of a job, and the limits on attempts without progress, on Slurm and Kubernetes.

An attempt makes progress if it publishes a checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from components.config.compose.frozen import read_section
from components.config.errors import ConfigError
from components.config.schema.cluster import ClusterConfig
from components.config.schema.schedulers.slurm import RequeueConfig
from components.protocol.run_files import (
    CHECKPOINTS,
    FIRST_STEP,
    LOGS,
    attempt_logs,
    current_config,
    names_in,
    read_result,
    read_text,
)

JOB, CHECKPOINTS_BEFORE = "job", "checkpoints"
"""Files in an attempt's logs: the job id, and the entries of checkpoints/ at the start. Slurm's batch script or the
first pod writes them."""

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


@dataclass(frozen=True, slots=True)
class Remedies:
    """What to change if attempts make no progress, in the terms of a scheduler; each completes a sentence."""

    longer_save: str
    """How to give a save more time."""
    longer_attempt: str
    """How to get attempts that last until their first step."""


def lack_of_progress(run_dir: Path, attempts: list[JobAttempt], remedies: Remedies) -> str | None:
    """Return why these attempts count as stuck, naming the limit and remedies; None if another one may start."""
    policy, section = requeue_policy(run_dir), "cluster.requeue"
    with_steps = without_steps = 0
    for attempt in reversed(attempts):
        if attempt.progressed:
            break
        with_steps, without_steps = with_steps + attempt.stepped, without_steps + (not attempt.stepped)
    if with_steps >= policy.without_progress:
        return (
            f"{with_steps} attempts in a row took steps and published no newer checkpoint "
            f"({section}.without_progress={policy.without_progress}): save more often (checkpoint.every, "
            f"checkpoint.every_minutes), give a save more time ({remedies.longer_save}), or raise the limit"
        )
    if without_steps >= policy.before_first_step:
        return (
            f"{without_steps} attempts in a row were stopped before their first step "
            f"({section}.before_first_step={policy.before_first_step}): {remedies.longer_attempt}, or raise the limit"
        )
    return None


def attempts_of_job(run_dir: Path, attempt: int) -> list[JobAttempt]:
    """Return the attempts of the job that runs attempt number `attempt`, oldest first, up to that one.

    Empty if a batch script of the user's own does not write the files that this needs.
    """
    numbers = attempt_numbers(run_dir, attempt)
    if not numbers:
        return []
    starts = [_published(_lines(attempt_logs(run_dir, number) / CHECKPOINTS_BEFORE)) for number in numbers]
    starts.append(_published(names_in(run_dir / CHECKPOINTS)))
    return [
        JobAttempt(
            stepped=(logs / FIRST_STEP).exists() or (number == attempt and (run_dir / LOGS / FIRST_STEP).exists()),
            progressed=bool(after - before),
            status=str(read_result(run_dir if number == attempt else logs).get("status", "")),
        )
        for number, before, after in zip(numbers, starts[:-1], starts[1:], strict=True)
        for logs in [attempt_logs(run_dir, number)]
    ]


def attempt_numbers(run_dir: Path, attempt: int) -> list[int]:
    """Return the numbers of the attempts of the job that runs attempt number `attempt`, up to that one.

    Empty if a batch script of the user's own does not write the attempt's file `job`.
    """
    job = _lines(attempt_logs(run_dir, attempt) / JOB)
    return [number for number in range(attempt + 1) if job and _lines(attempt_logs(run_dir, number) / JOB) == job]


def requeue_policy(run_dir: Path) -> RequeueConfig:
    """Return the requeue policy in a run's config; the defaults if the config cannot be read."""
    cluster = cluster_of(run_dir)
    return RequeueConfig() if cluster is None else cluster.requeue


def cluster_of(run_dir: Path) -> ClusterConfig | None:
    """Return the section `cluster` of a run's config; None if the config cannot be read."""
    try:
        return read_section(current_config(run_dir), "cluster", ClusterConfig)
    except ConfigError:
        return None


def _published(names: list[str]) -> set[str]:
    """Return the names of published checkpoints, without temporary folders."""
    return {name for name in names if _PUBLISHED.fullmatch(name)}


def _lines(file: Path) -> list[str]:
    """Return the complete lines of a file; none if it does not exist."""
    return read_text(file).split("\n")[:-1]
