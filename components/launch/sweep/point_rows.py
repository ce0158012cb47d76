"""State of each point, from the files of its run, and from its cluster if it is a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.config.stored_run import MetricsLog, RunNumbers, is_number, read_config, short_mesh
from components.launch.backend import Job, JobState
from components.launch.clusters import job_of, jobs_by_id
from components.launch.sweep.plan import Point, PointRecord, Sweep, is_running, read_record
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID
from components.protocol.failures import describe_exit, is_out_of_memory
from components.protocol.run_files import NONFINITE, RESULT, read_result

STOPPED_EARLY = "stopped early"
"""State of a point that the sweep stopped because others are better (sweep.early_stop)."""
STATES = (
    *("ok", STOPPED_EARLY, "oom", "invalid", "failed", "hung", "corrupted", "timeout", "preempted", "interrupted"),
    *("cancelled", "running", "submitted", "not started"),
)
"""All values of the column `status`."""
ALIVE = ("running", "submitted")
"""States of points that have not ended."""
NOT_BAD = ("ok", STOPPED_EARLY, *ALIVE)
"""States of points that need no attention."""
NOT_ENDED = (*ALIVE, "preempted", "interrupted", "not started")
"""States of points that a study continues."""

EARLY_STEPS = 50
"""Number of initial steps within which rounding differences stay small: losses of correct meshes agree."""


@dataclass(slots=True)
class SweepRow(RunNumbers):
    """A point with its state and results."""

    point: Point
    state: str
    reason: str = ""
    """Why it is not ok, or its progress; one or more lines."""
    early_losses: dict[int, float] = field(default_factory=dict)
    """Losses of the first EARLY_STEPS in its metrics.jsonl, by step."""
    last_logged: dict[str, float] = field(default_factory=dict)
    """Last value of each metric in its metrics.jsonl."""
    seconds: float | None = None
    """Wall time of the run, or of its launcher if the run did not record it."""
    job: Job | None = None
    """Its job; None if it has none, or if its result is final."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended for good. While its scheduler does not answer, a result may be that of an attempt that
        has been requeued since."""
        return self.state not in ALIVE and (self.job is None or self.job.over)

    @property
    def mesh(self) -> str:
        """Mesh axes larger than 1; "1" if there are none, "" if the mesh is unknown."""
        return short_mesh(self.result.get("mesh") or self.point.mesh or "")

    @property
    def processes(self) -> int | None:
        """Number of processes."""
        return self.result.get("processes") or self.point.processes

    @property
    def tokens_per_second_per_process(self) -> float | None:
        """Target tokens per second and process."""
        speed, processes = self.tokens_per_second, self.processes
        return speed / processes if speed is not None and processes else None

    @property
    def planned_memory_gib(self) -> float | None:
        """Estimated peak memory of the fullest rank; None without cluster.gpu."""
        value = self._planned("peak_memory_bytes")
        return None if value is None else value / 2**30

    @property
    def planned_step_seconds(self) -> float | None:
        """Estimated seconds per optimizer step; None without cluster.gpu."""
        return self._planned("step_seconds")

    @property
    def last_loss(self) -> float | None:
        """Loss of the last step, or the held-out loss of a run without steps."""
        last = self.result.get("last_loss")
        return self.result.get("eval_loss") if last is None else last

    def numbers(self) -> dict[str, float]:
        """Return the metrics of result.json and metrics.jsonl by name, without those whose last value is not finite."""
        final = {key: value for key, value in self.result.items() if is_number(value)}
        found = self.last_logged | dict.fromkeys(self.result.get(NONFINITE) or {}, math.nan) | final
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def number(self, metric: str) -> float | None:
        """Return the last value of a metric; None if the point has none, or if it is not finite."""
        return self.numbers().get(metric)

    def _planned(self, key: str) -> float | None:
        planned = self.result.get("planned")
        return planned.get(key) if isinstance(planned, dict) else None


def read_points(sweep: Sweep, only: Sequence[Point] | None = None) -> list[SweepRow]:
    """Return one row per point, in the order of the sweep; or only those of the points `only`."""
    alive, points = is_running(sweep.directory), sweep.points if only is None else only
    ids = {point.number: job_of(sweep.run_dir(point)) for point in points}
    results = {point.number: read_result(sweep.run_dir(point)) for point in points}
    unsettled = [job for number, job in ids.items() if job and results[number].get("status") != "ok"]
    jobs = jobs_by_id(unsettled)
    rows = []
    for point in points:
        job, record = ids[point.number], read_record(sweep, point)
        row = SweepRow(point, "not started", result=results[point.number], config=read_config(sweep.run_dir(point)))
        row.seconds = row.result.get("wall_seconds") or (record.seconds if record and not job else None)
        if record is not None:
            _settle(row, record, sweep, alive=alive, job=jobs.get(job or ""))
        if row.result.get("status") == "ok" or row.state == STOPPED_EARLY:
            _read_metrics(row, sweep.run_dir(point))
        rows.append(row)
    return rows


def _settle(row: SweepRow, record: PointRecord, sweep: Sweep, *, alive: bool, job: Job | None) -> None:
    """Set state and reason of a point that was started."""
    status, error = row.result.get("status"), str(row.result.get("error", ""))
    if record.status is None and alive and (status is None or _is_older(sweep.run_dir(row.point) / RESULT, record)):
        row.state, row.reason, row.result = "running", _progress(sweep.run_dir(row.point)), {}
    elif record.status == EXIT_INVALID:
        row.state, row.reason, row.result, row.seconds = "invalid", _problems(record.message), {}, None
    elif job is not None and not record.status:  # with a status, this start submitted no job
        row.state, row.job = state_with_job(status, job.state), job
        row.reason = error or _job_reason(row, job, sweep)
    elif status is not None:
        row.state, row.reason = status, error
    else:
        row.state, row.reason = _without_result(record)
    # A deleted job of Kubernetes is gone at once, while its pods save.
    without_result = row.job is not None and status is None and row.state == "failed"
    if record.stopped_early and (without_result or row.state in ("preempted", "interrupted", "cancelled")):
        row.state, row.reason = STOPPED_EARLY, record.stopped_early
    if row.state not in STATES:
        row.state, row.reason = "failed", f"result.json has the status {row.state!r}; {row.reason}"


def state_with_job(result: str | None, job: str) -> str:
    """Return the state of a run from the status in its result.json (None if there is none) and its job's state.

    A result other than ok may be from an attempt that has been requeued since. Only the scheduler reports why a run was
    stopped after it saved, or that it was killed for lack of memory.
    """
    if result == "ok":
        return "ok"
    if job in ALIVE:
        return job
    if result is None:
        guess = {JobState.unknown: "submitted", JobState.gone: "failed", JobState.ended: "failed"}
        return guess.get(JobState(job), job)
    if result == "cancelled" and job not in (JobState.unknown, JobState.gone, JobState.ended):
        return job  # the scheduler's state is more specific
    stopped = result in ("preempted", "interrupted") and job in ("timeout", "cancelled")
    return job if stopped or (result == "failed" and job == "oom") else result


def _job_reason(row: SweepRow, job: Job, sweep: Sweep) -> str:
    name = f"job {job.id}"
    if row.state == "running":
        return f"{name}, {_progress(sweep.run_dir(row.point))}"
    if job.state == JobState.unknown:
        return f"{name}; {job.cluster} cannot be queried from here"
    if job.state == JobState.gone:
        return f"{name} left no result, and {job.cluster} no longer lists it"
    return name if row.state == "submitted" else f"{name} ended with the state {job.state} and left no result"


def _without_result(record: PointRecord) -> tuple[str, str]:
    """Return the state and reason of a point whose run left no result.json."""
    last = record.message.strip().splitlines()[-1:] or [""]
    kind, _, message = last[0].partition(": ")
    if record.status is None:
        return "interrupted", "the sweep ended while this point ran"
    if record.status == 0:
        return "ok", ""
    if record.status == EXIT_INTERRUPTED:
        return "interrupted", last[0]
    if is_out_of_memory(kind.rpartition(".")[2], message):
        return "oom", last[0]
    if record.killed_for_memory:
        return "oom", "the kernel killed a process because memory ran out"
    if record.status < 0:  # its last line is unrelated to the signal
        return "failed", describe_exit(record.status)
    return "failed", last[0] or f"exited with status {record.status} without output"


def _problems(message: str) -> str:
    """Return the problems reported at the end of a launcher's output."""
    lines = message.strip().splitlines() or [""]
    heads = [index for index, line in enumerate(lines) if line.endswith(" problems with this run:")]
    return "; ".join(lines[heads[-1] + 1 :] if heads else lines[-1:])


def _is_older(result: Path, record: PointRecord) -> bool:
    """Return whether a result.json is from an earlier start than the last one, or missing."""
    try:
        return result.stat().st_mtime < record.started
    except OSError:
        return True


def _progress(run_dir: Path) -> str:
    """Return a run's step, loss and throughput from the last line of its metrics."""
    steps = [line for line in _lines(run_dir) if "loss" in line]
    if not steps:
        return "no step yet"
    speed = steps[-1].get("tokens_per_second", math.nan)
    return f"step {steps[-1]['step']}, loss {steps[-1]['loss']:.4f}, {speed:,.0f} tokens/s"


def _read_metrics(row: SweepRow, run_dir: Path) -> None:
    """Set the early losses and the last values of a point from its metrics.jsonl."""
    for line in _lines(run_dir):
        if "loss" in line and line["step"] <= EARLY_STEPS:
            row.early_losses[line["step"]] = line["loss"]
        row.last_logged |= {key: value for key, value in line.items() if key != "step" and is_number(value)}


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the objects in a run's metrics; none if the file is missing or cannot be read."""
    try:
        return MetricsLog(run_dir).read()
    except OSError:
        return []
