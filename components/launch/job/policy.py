"""Whether a job starts again after an attempt: the history of its attempts, and one table of limits for all schedulers.

An attempt makes progress if it publishes a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from components.config.compose.frozen import read_section
from components.config.schema.cluster import ClusterConfig, ClusterKind
from components.config.schema.schedulers import RequeueConfig
from components.protocol.errors import ConfigError
from components.protocol.failures import Failure, Kind
from components.protocol.run_files import (
    CHECKPOINTS,
    FIRST_STEP,
    LOGS,
    attempt_logs,
    checkpoint_step,
    current_config,
    names_in,
    numbers_in,
    read_result,
    read_text,
)

JOB, CHECKPOINTS_BEFORE, RESTARTED = "job", "checkpoints", "restarted"
"""Files in an attempt's logs: the id of its job, the entries of checkpoints/ at its start, and the marker that it
started the ranks again in its job."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A row of the table: how often a job may start again after attempts that ended in one way."""

    event: str
    """How such an attempt ended; completes a sentence."""
    statuses: frozenset[str]
    """Status of such an attempt in result.json."""
    needs_step: bool
    """Whether it is final before the job's first step, since it would happen again."""
    needs_other_nodes: bool = False
    """Whether it is final if the scheduler cannot leave out nodes."""


LIMITS = {
    "hang": Limit("a hang", frozenset({Kind.hung}), needs_step=True),
    "crash": Limit("a crash", frozenset({"failed", "oom"}), needs_step=True),
    "corruption": Limit("wrong numbers", frozenset({Kind.corrupted}), needs_step=False, needs_other_nodes=True),
}
"""Key of cluster.requeue -> its limit. In addition, cluster.requeue.max limits the requeues of a job, and
without_progress and before_first_step the attempts in a row that publish no checkpoint."""


@dataclass(frozen=True, slots=True)
class _Remedies:
    """What a user can change on a scheduler; each text completes a sentence."""

    longer_save: str = "cluster.signal_lead_seconds"
    """How to give a save more time."""
    longer_attempt: str = "ask for nodes that are preempted less"
    """How to get attempts that last until their first step."""
    other_nodes: str = ""
    """How to leave out a node by hand; empty if a requeued job leaves it out."""


_REMEDIES = {
    ClusterKind.slurm: _Remedies(
        longer_save="cluster.signal_lead_seconds, GraceTime of the partition",
        longer_attempt="raise cluster.time, choose a partition that is preempted less",
    ),
    ClusterKind.k8s: _Remedies(
        longer_save="cluster.signal_lead_seconds, the grace period of the pods",
        longer_attempt="set cluster.k8s.priority_class to a class that is preempted less",
        other_nodes="cordon the node, and submit the same command again",
    ),
    ClusterKind.custom: _Remedies(other_nodes="exclude the node, and submit the same command again"),
}


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """One attempt of a job."""

    stepped: bool
    """Whether it finished an optimizer step."""
    progressed: bool
    """Whether it published a checkpoint."""
    status: str
    """Status in its result.json; empty if there is none."""
    restarted: bool = False
    """Whether its ranks were started again in the job, without a requeue."""


def cause_of(failure: Failure | None, killed: bool) -> str | None:
    """Return the key in `LIMITS` of how an attempt ended; None if its failure would happen again.

    Args:
        failure: Its first failure.
        killed: Whether a rank without a report was killed by a signal.
    """
    if failure is None or failure.report is None:
        return "crash" if killed else None
    special = {Kind.hung: "hang", Kind.corrupted: "corruption"}
    return special.get(failure.report.kind, "crash" if failure.report.may_be_transient else None)


def reason_to_end(
    cluster: ClusterConfig | None,
    attempts: Sequence[JobAttempt],
    *,
    after: str | None = None,
    requeues: int | None,
    excludes_nodes: bool = False,
) -> str | None:
    """Return why a job must not start again after these attempts, naming the limit; None if it may.

    Args:
        cluster: Section `cluster` of the run's config; None if it cannot be read, which selects the defaults.
        attempts: The job's attempts, oldest first.
        after: Key in `LIMITS` of how the last attempt ended; None if it was stopped.
        requeues: How often the scheduler has started the job again; None if this start is no requeue.
        excludes_nodes: Whether a requeued job leaves out faulty nodes, whatever `_REMEDIES` says of its scheduler.
    """
    policy = RequeueConfig() if cluster is None else cluster.requeue
    remedies = _REMEDIES.get(ClusterKind.slurm if cluster is None else cluster.kind, _Remedies())
    if excludes_nodes:
        remedies = replace(remedies, other_nodes="")
    return next(_reasons(policy, remedies, attempts, after, requeues), None)


def _reasons(
    policy: RequeueConfig, remedies: _Remedies, attempts: Sequence[JobAttempt], after: str | None, requeues: int | None
) -> Iterator[str]:
    if after is not None:
        row, most = LIMITS[after], {"hang": policy.hang, "crash": policy.crash, "corruption": policy.corruption}[after]
        if row.needs_other_nodes and remedies.other_nodes:
            yield f"the same node would be used again; {remedies.other_nodes}"
        if most == 0:
            yield f"there is no new start after {row.event} (cluster.requeue.{after}=0)"
        if sum(attempt.status in row.statuses for attempt in attempts[:-1]) >= most:
            yield f"the limit of {most} new starts after {row.event} is reached (cluster.requeue.{after})"
        if row.needs_step and not any(attempt.stepped for attempt in attempts):
            yield f"{row.event} before the first step would likely happen again"
    if requeues is not None and requeues >= policy.max:
        yield f"the limit of {policy.max} requeues is reached (cluster.requeue.max)"
    with_steps = without_steps = 0
    for attempt in reversed(attempts):
        if attempt.progressed:
            break
        with_steps, without_steps = with_steps + attempt.stepped, without_steps + (not attempt.stepped)
    if with_steps >= policy.without_progress:
        yield (
            f"{with_steps} attempts in a row took steps and published no newer checkpoint "
            f"(cluster.requeue.without_progress={policy.without_progress}): save more often (checkpoint.every, "
            f"checkpoint.every_minutes), give a save more time ({remedies.longer_save}), or raise the limit"
        )
    if without_steps >= policy.before_first_step:
        yield (
            f"{without_steps} attempts in a row were stopped before their first step "
            f"(cluster.requeue.before_first_step={policy.before_first_step}): {remedies.longer_attempt}, or raise the "
            "limit"
        )


def attempts_of_job(run_dir: Path, attempt: int) -> list[JobAttempt]:
    """Return the attempts of the job that runs attempt number `attempt`, oldest first, up to that one.

    Empty if a batch script of the user's own does not write the files that this needs.
    """
    job = job_of_attempt(run_dir, attempt)
    numbers = [number for number in attempt_numbers(run_dir, job) if number <= attempt]
    if not numbers:
        return []
    starts = [_published(names_in(run_dir / CHECKPOINTS))]
    for number in reversed(numbers):  # an attempt that was killed as it began has no such file
        file = attempt_logs(run_dir, number) / CHECKPOINTS_BEFORE
        starts.insert(0, _published(lines_of(file)) if file.exists() else starts[0])
    return [
        JobAttempt(
            stepped=(logs / FIRST_STEP).exists() or (number == attempt and (run_dir / LOGS / FIRST_STEP).exists()),
            progressed=bool(after - before),
            status=str(read_result(run_dir if number == attempt else logs).get("status", "")),
            restarted=(logs / RESTARTED).exists(),
        )
        for number, before, after in zip(numbers, starts[:-1], starts[1:], strict=True)
        for logs in [attempt_logs(run_dir, number)]
    ]


def job_of_attempt(run_dir: Path, attempt: int) -> str:
    """Return the id of the job that ran an attempt; empty if none has recorded it."""
    return next(iter(lines_of(attempt_logs(run_dir, attempt) / JOB)), "")


def attempt_numbers(run_dir: Path, job: str | None = None) -> list[int]:
    """Return the numbers of the run's attempts, in order; with `job` those of that job."""
    numbers = sorted(numbers_in(run_dir / LOGS, "attempt_"))
    return numbers if job is None else [number for number in numbers if job and job_of_attempt(run_dir, number) == job]


def lines_of(file: Path) -> list[str]:
    """Return the complete lines of a file; none if it does not exist."""
    return read_text(file).split("\n")[:-1]


def cluster_of(run_dir: Path) -> ClusterConfig | None:
    """Return the section `cluster` of a run's config; None if the config cannot be read."""
    try:
        return read_section(current_config(run_dir), "cluster", ClusterConfig)
    except ConfigError:
        return None


def _published(names: Sequence[str]) -> set[str]:
    """Return the names of published checkpoints, without temporary folders."""
    return {name for name in names if checkpoint_step(name) is not None}
