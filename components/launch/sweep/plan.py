"""Folder of a sweep, and the state of each point.

SWEEP/sweep.json lists the points, SWEEP/points/N.json records the last start of each. The state of a point comes from
the files of its run, and from its cluster if it is a job.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from components.config.compose.sweep_keys import EVAL_LOSS, EarlyStop, Goal
from components.config.stored_run import MetricsLog, RunNumbers, has_rewards, is_number, read_config, short_mesh
from components.launch.backend import Job, JobState
from components.launch.clusters import job_of, jobs_by_id
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
from components.protocol.failures import describe_exit, is_out_of_memory
from components.protocol.run_files import (
    NONFINITE,
    PRIVATE,
    RESULT,
    atomic_write_json,
    own_folder,
    read_json,
    read_result,
    take_lock,
)
from components.protocol.safe_parsing import load_json

PLAN, POINTS, _SWEEP_LOCK = "sweep.json", "points", ".lock"
_LONGEST_NAME = 48
"""Maximum length of a point's name, to keep paths short."""
_LOCK_TRIES, _LOCK_PAUSE = 20, 0.05
"""Retries and their interval in seconds: `is_running` in another process holds the lock for a moment."""
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
_REWARDS = ("first_eval_reward", "first_reward", "last_reward", "eval_reward")
"""Keys of result.json that only a run with rewards has."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    number: int
    """Index from 0, in the order of the command line."""
    name: str
    """Name of its run directory in the sweep's folder, such as 2_fsdp2_tp2."""
    values: dict[str, str]
    """Values of the swept keys."""
    overrides: list[str]
    """Overrides of the point's command line, without run.dir."""
    mesh: str | None = None
    """Its mesh; None if the mesh is invalid."""
    processes: int | None = None
    """Its number of processes."""
    runs_here: bool = True
    """Whether its ranks run on this machine, and not as a job."""


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """The Optuna study of a sweep with sweep.trials, whose points are chosen one by one."""

    trials: int
    """Number of points."""
    seed: int
    """sweep.seed."""
    space: dict[str, Any]
    """Swept key -> its listed values, or the fields of its `Range`."""
    fixed: list[str]
    """The other overrides of the command line."""

    def differences(self, other: StudyPlan) -> list[str]:
        """Return the names of what differs from another plan, apart from the number of points."""
        keys = [key for key in {**self.space, **other.space} if self.space.get(key) != other.space.get(key)]
        fixed = [each for each in (*self.fixed, *other.fixed) if (each in self.fixed) != (each in other.fixed)]
        return keys + fixed + (["sweep.seed"] if self.seed != other.seed else [])


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep, as recorded in its folder."""

    directory: Path
    id: str
    """wandb group of its runs."""
    recipe: str
    file: Path
    """The recipe's file."""
    folder: Path
    """Working directory of the command; relative paths in its overrides start there."""
    command: str
    """The command line, as typed."""
    options: list[str]
    """Options passed to every point, such as --config-dir."""
    keys: list[str]
    """Swept keys, in the order of the command line."""
    points: list[Point]
    metric: str = EVAL_LOSS
    """sweep.metric."""
    goal: Goal = Goal.min
    """Whether lower or higher values of the metric are better."""
    study: StudyPlan | None = None
    """Plan of the study; None if all points are given. `points` are then those that it has chosen so far."""
    parallel: int | None = None
    """sweep.parallel."""
    early_stop: EarlyStop | None = None
    """sweep.early_stop."""

    @property
    def waits_for_jobs(self) -> bool:
        """Whether the sweep waits for the jobs of its points, instead of submitting all of them and ending."""
        return self.study is not None or self.parallel is not None or self.early_stop is not None

    def run_dir(self, point: Point) -> Path:
        """Run directory of a point."""
        return self.directory / point.name

    def log(self, point: Point) -> Path:
        """Return the log of the point's launcher and rank 0."""
        return self.directory / f"{point.name}.log"

    def write(self) -> None:
        """Write sweep.json, without `directory`, which is the folder of the file."""
        plan = asdict(self) | {"file": str(self.file), "folder": str(self.folder)}
        del plan["directory"]
        plan["points"] = [{**entry, "run_dir": entry["name"]} for entry in plan["points"]]
        atomic_write_json(self.directory / PLAN, plan)


def read_sweep(directory: Path) -> Sweep:
    """Return the sweep in a folder. Raises ConfigError if there is none."""
    folder = directory.expanduser().absolute()
    try:
        plan = load_json(folder / PLAN)
        plan["points"] = [Point(**_select_fields(Point, entry)) for entry in plan["points"]]
        plan |= {"file": Path(plan["file"]), "folder": Path(plan["folder"])}
        plan["goal"] = Goal(plan.get("goal", Goal.min))
        plan["early_stop"] = EarlyStop(plan["early_stop"]) if plan.get("early_stop") else None
        plan["study"] = StudyPlan(**plan["study"]) if plan.get("study") else None
        return Sweep(directory=folder, **_select_fields(Sweep, plan))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory}: is not the folder of a sweep: no readable {PLAN} ({error}); give outputs/sweeps/..."
        ) from error


@dataclass(frozen=True, slots=True)
class PointRecord:
    """Record of the last start of a point, as observed by the sweep."""

    started: float
    """Seconds since the epoch."""
    status: int | None = None
    """Exit status of the point's launcher, negative for a signal; None if it is running or outlived the sweep."""
    seconds: float | None = None
    """Wall time from start to exit."""
    message: str = ""
    """Last lines of its output."""
    killed_for_memory: bool = False
    """Whether the kernel's OOM killer ended a process in that time."""
    stopped_early: str = ""
    """Why the sweep has requested its stop (sweep.early_stop); empty: it has not."""


def write_record(sweep: Sweep, point: Point, record: PointRecord) -> None:
    """Write SWEEP/points/N.json."""
    values = {**asdict(record), "point": point.name}
    atomic_write_json(own_folder(sweep.directory / POINTS) / f"{point.number}.json", values, PRIVATE)


def read_record(sweep: Sweep, point: Point) -> PointRecord | None:
    """Return the record of a point's last start; None if it was never started."""
    values = read_json(sweep.directory / POINTS / f"{point.number}.json")
    return PointRecord(**_select_fields(PointRecord, values)) if values else None


def point_name(number: int, values: dict[str, str]) -> str:
    """Return the name of a point: its number and values, with characters unsuitable for file names replaced."""
    parts = [re.sub(r"[^\w.+-]+", "-", value.strip("'\""), flags=re.ASCII).strip("-.") for value in values.values()]
    return "_".join([str(number), *filter(None, parts)])[:_LONGEST_NAME].rstrip("-._")


def new_directory(recipe: str, given: str | None) -> tuple[Path, str]:
    """Choose the folder and id of a new sweep, without creating the folder.

    Raises ConfigError if the given folder is not empty.
    """
    if given is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        return Path.cwd() / "outputs" / "sweeps" / recipe / name, name
    path = Path(given).expanduser().absolute()
    if path.is_dir() and any(entry.name != _SWEEP_LOCK for entry in path.iterdir()):
        is_sweep = (path / PLAN).exists()
        advice = f"continue it with scripts/sweep_report.py {given} --retry, or choose" if is_sweep else "choose"
        raise ConfigError(f"run.dir={given}: contains files, but a sweep needs a new folder; {advice} another run.dir")
    return path, f"{path.name}-{secrets.token_hex(2)}"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the sweep's lock, which the kernel releases if this process dies.

    Raises ConfigError if another process holds it, or if the folder cannot be written.
    """
    try:
        descriptor = os.open(directory / _SWEEP_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{directory}: cannot be written: {reason}; fix that, or choose another folder") from error
    try:
        for tries_left in reversed(range(_LOCK_TRIES)):
            if not _is_locked(descriptor):
                break
            if not tries_left:
                raise ConfigError(f"{directory}: this sweep is still running; wait for it to finish, or stop it first")
            time.sleep(_LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)


def is_running(directory: Path) -> bool:
    """Return whether a process is running the sweep."""
    try:
        descriptor = os.open(directory / _SWEEP_LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return _is_locked(descriptor)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Try to take the lock; return whether another process holds it. False if the file system has no locks."""
    try:
        take_lock(descriptor)
    except OSError:
        return True
    return False


def _select_fields(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass, ignoring those of other versions."""
    return {entry.name: values[entry.name] for entry in fields(kind) if entry.name in values}


@dataclass(slots=True)
class SweepRow(RunNumbers):
    """A point with its state and results."""

    point: Point
    state: str
    reason: str = ""
    """Why it is not ok, or its progress; one or more lines."""
    early_values: dict[int, float] = field(default_factory=dict)
    """Losses, or rewards, of the first EARLY_STEPS in its metrics.jsonl, by step."""
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
    def improves(self) -> str:
        """Metric that the run improves: reward, the higher the better, or loss, which means nothing beside rewards."""
        return "reward" if any(self.result.get(name) is not None for name in _REWARDS) else "loss"

    @property
    def last_loss(self) -> float | None:
        """Loss of the last step, or the held-out loss of a run without steps; None in a run with rewards."""
        if self.improves == "reward":
            return None
        last = self.result.get("last_loss")
        return self.result.get("eval_loss") if last is None else last

    def numbers(self) -> dict[str, float]:
        """Return the metrics of result.json and metrics.jsonl by name, without those whose last value is not finite."""
        final = {key: value for key, value in self.result.items() if is_number(value)}
        losses = self.last_logged | dict.fromkeys(self.result.get(NONFINITE) or {}, math.nan) | final
        return {name: value for name, value in losses.items() if math.isfinite(value)}

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
        row.state, row.job = _state_with_job(status, job.state), job
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


def _state_with_job(result: str | None, job: str) -> str:
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
    """Return a run's step, loss or reward, and throughput from the last line of its metrics."""
    lines = _lines(run_dir)
    name = "reward" if has_rewards(lines) else "loss"
    steps = [line for line in lines if name in line]
    if not steps:
        return "no step yet"
    speed = steps[-1].get("tokens_per_second", math.nan)
    return f"step {steps[-1]['step']}, {name} {steps[-1][name]:.4f}, {speed:,.0f} tokens/s"


def _read_metrics(row: SweepRow, run_dir: Path) -> None:
    """Set the early and the last values of a point from its metrics.jsonl."""
    for line in _lines(run_dir):
        if row.improves in line and line["step"] <= EARLY_STEPS:
            row.early_values[line["step"]] = line[row.improves]
        row.last_logged |= {key: value for key, value in line.items() if key != "step" and is_number(value)}


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the objects in a run's metrics; none if the file is missing or cannot be read."""
    try:
        return MetricsLog(run_dir).read()
    except OSError:
        return []
