"""What became of each point: read from the files of its run, and asked of Slurm where it is a job."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from components.config.errors import EXIT_INVALID
from components.config.metrics_log import MetricsLog
from components.config.safe_yaml import load_yaml
from components.launch.files import read_json
from components.launch.memory import is_out_of_memory
from components.launch.rank import EXIT_INTERRUPTED
from components.launch.run_directory import CONFIG, RESULT, job_of
from components.launch.slurm.jobs import GONE, UNKNOWN, in_words, job_states
from components.launch.sweep.plan import Note, Point, Sweep, is_running, read_note
from components.protocol.failures import describe
from components.protocol.run_files import read_regular

STATES = (
    *("ok", "oom", "invalid", "failed", "hung", "timeout", "preempted", "interrupted", "cancelled"),
    *("running", "submitted", "not started"),
)
"""Every word that the column `status` can hold."""
ALIVE = ("running", "submitted")
"""States of points that have not ended."""
NOT_BAD = ("ok", *ALIVE)
"""States of points that need nobody's attention."""

EARLY_STEPS = 50
"""Steps in which rounding has not grown: losses of right meshes agree."""


@dataclass(slots=True)
class Row:
    """A point, and how it stands."""

    point: Point
    state: str
    reason: str = ""
    """Why it is not ok, or how far it is; in one or more lines."""
    result: dict[str, Any] = field(default_factory=dict)
    """Its result.json; empty where there is none yet."""
    config: dict[str, Any] = field(default_factory=dict)
    """Its config.yaml, sections by name."""
    early_losses: dict[int, float] = field(default_factory=dict)
    """Losses in its metrics.jsonl by step, of the first EARLY_STEPS."""
    seconds: float | None = None
    """Wall time of the run itself, or of the point's whole process where the run has not said."""

    @property
    def mesh(self) -> str:
        """Axes larger than 1."""
        mesh = self.result.get("mesh") or self.point.mesh or ""
        return " x ".join(axis for axis in mesh.split(" x ") if axis and not axis.endswith("=1")) or (
            "1" if mesh else ""
        )

    @property
    def processes(self) -> int | None:
        """Number of processes."""
        return self.result.get("processes") or self.point.processes

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens per second over all processes."""
        return self.result.get("tokens_per_second")

    @property
    def tokens_per_second_per_process(self) -> float | None:
        """The same for each process."""
        speed, processes = self.tokens_per_second, self.processes
        return speed / processes if speed is not None and processes else None

    @property
    def peak_memory_gib(self) -> float | None:
        """Highest memory of rank 0."""
        return self._gib("peak_memory_bytes")

    @property
    def peak_reserved_gib(self) -> float | None:
        """Highest memory that torch's allocator reserved on rank 0's GPU; None on CPUs."""
        return self._gib("peak_reserved_bytes")

    @property
    def last_loss(self) -> float | None:
        """Loss of the last step; of a run without steps the held-out loss."""
        last = self.result.get("last_loss")
        return self.result.get("eval_loss") if last is None else last

    def _gib(self, key: str) -> float | None:
        value = self.result.get(key)
        return value / 2**30 if value is not None else None


def read_rows(sweep: Sweep, only: Point | None = None) -> list[Row]:
    """Return a row for each point (or for one only), in the order of the sweep."""
    alive, points = is_running(sweep.directory), [only] if only else sweep.points
    jobs = {point.number: job_of(sweep.run_dir(point)) for point in points}
    results = {point.number: read_json(sweep.run_dir(point) / RESULT) for point in points}
    asked = [job for number, job in jobs.items() if job and results[number].get("status") != "ok"]
    states = {job: in_words(state) for job, state in job_states(asked).items()}
    rows = []
    for point in points:
        job, note = jobs[point.number], read_note(sweep, point)
        row = Row(point, "not started", result=results[point.number], config=_config(sweep.run_dir(point)))
        row.early_losses = _early_losses(sweep.run_dir(point)) if row.result.get("status") == "ok" else {}
        row.seconds = row.result.get("wall_seconds") or (note.seconds if note and not job else None)
        if note is not None:
            _settle(row, note, sweep, alive=alive, job=f"job {job}" if job else "", job_state=states.get(job or ""))
        rows.append(row)
    return rows


def _settle(row: Row, note: Note, sweep: Sweep, *, alive: bool, job: str, job_state: str | None) -> None:
    """Fill in state and reason of a point that was started."""
    status, error = row.result.get("status"), str(row.result.get("error", ""))
    if note.status is None and alive and (status is None or _is_older(sweep.run_dir(row.point) / RESULT, note)):
        row.state, row.reason, row.result = "running", _progress(sweep.run_dir(row.point)), {}
    elif note.status == EXIT_INVALID:
        row.state, row.reason, row.result, row.seconds = "invalid", _problems(note.message), {}, None
    elif job_state is not None and not note.status:  # else it could not be submitted again
        row.state = state_with_job(status, job_state)
        row.reason = error or _of_job(row, job, job_state, sweep)
    elif status is not None:
        row.state, row.reason = status, error
    else:
        row.state, row.reason = _without_result(note)
    if row.state not in STATES:
        row.state, row.reason = "failed", f"result.json has the status {row.state!r}; {row.reason}"


def state_with_job(result: str | None, job: str) -> str:
    """Return the state of a run by the status in its result.json (None: there is none) and the state of its job.

    A result other than ok may be of an attempt that Slurm has put back into the queue. A run that was told to stop
    has saved and does not know why it was told; one that was killed for memory could not write down why.
    """
    if result == "ok":
        return "ok"
    if job in ALIVE:
        return job
    if result is None:
        return {UNKNOWN: "submitted", GONE: "failed", "ended": "failed"}.get(job, job)
    if result == "cancelled" and job not in (UNKNOWN, GONE, "ended"):
        return job  # the batch script knows that it was ended, Slurm knows why
    told_to_stop = result in ("preempted", "interrupted") and job in ("timeout", "cancelled")
    return job if told_to_stop or (result == "failed" and job == "oom") else result


def _of_job(row: Row, job: str, job_state: str, sweep: Sweep) -> str:
    if row.state == "running":
        return f"{job}, {_progress(sweep.run_dir(row.point))}"
    if job_state == UNKNOWN:
        return f"{job}; Slurm cannot be asked here"
    if job_state == GONE:
        return f"{job} left no result, and Slurm knows nothing of it any more"
    return job if row.state == "submitted" else f"{job} ended with the state {job_state} and left no result"


def _without_result(note: Note) -> tuple[str, str]:
    """State and reason of a point whose run has left no result.json."""
    last = note.message.strip().splitlines()[-1:] or [""]
    kind, _, said = last[0].partition(": ")
    if note.status is None:
        return "interrupted", "the sweep ended while this point ran"
    if note.status == 0:
        return "ok", ""
    if note.status == EXIT_INTERRUPTED:
        return "interrupted", last[0]
    if is_out_of_memory(kind.rpartition(".")[2], said):
        return "oom", last[0]
    if note.killed_for_memory:
        return "oom", "a process was killed by the kernel, because memory ran out"
    if note.status < 0:  # what it said last was of something else
        return "failed", describe(note.status)
    return "failed", last[0] or f"ended with status {note.status} and said nothing"


def _problems(message: str) -> str:
    """What a launcher found wrong, without what its ranks may have said before."""
    lines = message.strip().splitlines() or [""]
    heads = [index for index, line in enumerate(lines) if line.endswith(" problems with this run:")]
    return "; ".join(lines[heads[-1] + 1 :] if heads else lines[-1:])


def _is_older(result: Path, note: Note) -> bool:
    """Whether a result is that of a start before the last one."""
    try:
        return result.stat().st_mtime < note.started
    except OSError:
        return True


def _progress(run_dir: Path) -> str:
    """How far a run is, by the last line of its metrics."""
    try:
        steps = [line for line in MetricsLog(run_dir).read() if "loss" in line]
    except OSError:
        return "no step yet"
    if not steps:
        return "no step yet"
    speed = steps[-1].get("tokens_per_second", math.nan)
    return f"step {steps[-1]['step']}, loss {steps[-1]['loss']:.4f}, {speed:,.0f} tokens/s"


def _early_losses(run_dir: Path) -> dict[int, float]:
    try:
        lines = MetricsLog(run_dir).read()
    except OSError:
        return {}
    return {line["step"]: line["loss"] for line in lines if "loss" in line and line["step"] <= EARLY_STEPS}


def _config(run_dir: Path) -> dict[str, Any]:
    try:
        config = load_yaml(read_regular(run_dir / CONFIG).decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}
