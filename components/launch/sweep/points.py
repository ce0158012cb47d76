"""Execution of a sweep's points, each by an ordinary launcher in a child process.

Points that run at the same time (sweep.parallel) get shares of this machine's GPUs and CPU threads.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from components.config.compose.sweep import override_of
from components.config.schema.cluster import Device
from components.config.schema.parallelism import describe_processes
from components.config.schema.recipes import RecipeConfig
from components.launch.clusters import job_of, jobs_by_id, stop
from components.launch.machine import RANKS_PER_CORE, VISIBLE_DEVICES, usable_cores, visible_gpus
from components.launch.rank import die_with
from components.launch.sweep.plan import (
    ALIVE,
    NOT_BAD,
    PLAN,
    STATES,
    Point,
    PointRecord,
    Sweep,
    SweepRow,
    is_running,
    locked,
    read_points,
    read_record,
    write_record,
)
from components.launch.sweep.ranking import MedianRule, first_line, read_curve
from components.launch.sweep.report import report_command, report_now
from components.launch.sweep.study import PointStudy, dimensions_of
from components.protocol.errors import EXIT_INTERRUPTED, ConfigError, raise_all
from components.protocol.processes import CTRL_C_MESSAGE, collected_signals, killed_for_memory, without_ranks
from components.protocol.run_files import PRIVATE, keep_only_folder, open_append
from components.terminal import fit, print_text, terminal_width

_POLL = 0.05
"""Polling interval for the running points, in seconds."""
_LOOK_EVERY = 1.0
"""Interval in seconds at which the metrics of running points are read, with sweep.early_stop."""
_POLL_JOBS = 5.0
"""Polling interval for submitted jobs, in seconds."""
_MAX_INTERRUPTS = 2
"""Interrupts (Ctrl-C) forwarded to a point: the first saves and stops, the second aborts. One more kills it."""
_LAST_LINES = 15
"""Lines of a point's output kept in its record."""
_THREADS = "OMP_NUM_THREADS"


def run_points(sweep: Sweep, points: Sequence[Point]) -> list[int]:
    """Run given points, and return the signals that stopped the sweep.

    Args:
        sweep: The sweep, whose lock this process holds; its sweep.json must exist.
        points: Points to run.
    """
    study, total = None, len(points)
    if sweep.study is not None:
        study = PointStudy(sweep.directory, sweep.study, dimensions_of(sweep.study.space), sweep.goal)
        total = sweep.study.trials  # a retried point keeps its number in the study
    return PointLoop(sweep, iter(points), total, study).run()


def retry(sweep: Sweep, states: Sequence[str], judged: Sweep) -> int:
    """Run the points in any of `states` again, in their run directories, and return the exit status.

    Runs with a checkpoint resume. Raises ConfigError for an unknown state, while the sweep is running, and if its
    recipe or working directory is missing.

    Args:
        sweep: The sweep.
        states: States of the points; empty: all that need attention.
        judged: The sweep with the metric of the table. A study and early stops use the sweep's own.
    """
    may_retry = [state for state in STATES if state not in ALIVE]
    if unknown := [state for state in states if state not in may_retry]:
        raise ConfigError(f"--retry {','.join(unknown)}: no such state; choose from {', '.join(may_retry)}")
    if is_running(sweep.directory):
        raise ConfigError(f"{sweep.directory}: this sweep is still running; wait for it to finish, or stop it first")
    if not sweep.directory.stat().st_mode & 0o077:  # started with run.private=true
        os.umask(0o077)
    selected = states or [state for state in may_retry if state not in NOT_BAD]
    points = [row.point for row in read_points(sweep) if row.state in selected]
    if not points:
        print_text(f"nothing to retry: no point is {' or '.join(selected)}")
        return report_now(judged)
    _check_origin(sweep)
    with locked(sweep.directory):
        stops = run_points(sweep, points)
    return conclude(judged, stops)


def conclude(sweep: Sweep, stops: Sequence[int]) -> int:
    """Print the table of a sweep that has ended or was stopped by signals, and return the exit status."""
    status = report_now(sweep)
    if signal.SIGINT in stops:
        return EXIT_INTERRUPTED
    return 1 if stops else status


def _continue_command(sweep: Sweep) -> str:
    """Return the shell command that continues a stopped sweep: for a study the one that started it."""
    if sweep.study is None:
        return report_command(sweep, "--retry")
    has_folder = any(part.startswith("run.dir=") for part in shlex.split(sweep.command))
    return sweep.command if has_folder else f"{sweep.command} {shlex.quote(f'run.dir={sweep.directory}')}"


def _check_origin(sweep: Sweep) -> None:
    """Raise ConfigError if the recipe or working directory is missing, as on a machine that only shows the report."""
    missing = [("file", sweep.file, "recipe")] if not sweep.file.is_file() else []
    missing += [("folder", sweep.folder, "working directory")] if not sweep.folder.is_dir() else []
    raise_all(
        [
            f"{sweep.directory / PLAN}: {key}={path}: the sweep's {what} does not exist here; retry on the machine "
            f"where it was started, or set {key} in that file to its current path"
            for key, path, what in missing
        ]
    )


@dataclass(slots=True)
class _Active:
    """A point that has been started and has not ended."""

    point: Point
    process: _PointProcess | None
    """Its launcher; None once it has submitted a job."""
    slot: int
    """Number of its share of the machine."""


class PointLoop:
    """Loop that starts points and waits for them, sweep.parallel of them at a time.

    SIGINT, SIGTERM and SIGUSR2 are forwarded to the launchers of running points, whose backends stop their ranks; no
    further point starts. Submitted jobs continue.

    Args:
        sweep: The sweep, whose lock this process holds.
        points: Points to run. The next one is requested when it can start.
        total: Number of points for the console.
        study: Receives the results of the points.
    """

    def __init__(self, sweep: Sweep, points: Iterator[Point], total: int, study: PointStudy | None) -> None:
        self._sweep, self._points, self._study = sweep, points, study
        self._total, self._started = total, 0
        self._parallel = sweep.parallel or (total if _all_at_once(sweep) else 1)
        self._free = deque(range(self._parallel))
        self._active: list[_Active] = []
        self._stops: list[int] = []
        self._next_query = self._next_look = 0.0
        self._rule = None if sweep.early_stop is None else MedianRule(sweep)
        self._losers: set[int] = set()
        """Numbers of the points whose stop was requested, or that are retried after one."""

    def run(self) -> list[int]:
        """Run all points, and return the signals that stopped the sweep."""
        with collected_signals() as arrived:
            try:
                while True:
                    self._forward(arrived)
                    self._collect()
                    if not self._stops:
                        self._start_points()
                        self._stop_losers()
                    if not any(each.process for each in self._active) and (self._stops or not self._active):
                        break
                    time.sleep(_POLL)
            finally:
                for each in self._active:
                    if each.process is not None:
                        each.process.kill()
            self._forward(arrived)
        if self._stops:
            names = " and ".join(signal.Signals(number).name for number in dict.fromkeys(self._stops))
            print_text(f"sweep stopped by {names}; continue it: {_continue_command(self._sweep)}", flush=True)
        return self._stops

    def _start_points(self) -> None:
        while self._free and (point := next(self._points, None)) is not None:
            self._started += 1
            counter = f"[{point.number + 1 if self._study else self._started}/{self._total}]"
            print_text(_start_line(self._sweep, point, counter), end=self._line_end, flush=True)
            slot, process = self._free.popleft(), None
            if not _adopt_job(self._sweep, point):
                record = read_record(self._sweep, point)
                if record is not None and record.stopped_early:  # its old metrics would stop it again at once
                    self._losers.add(point.number)
                process = _PointProcess(self._sweep, point, _share_of(slot, self._parallel, point, os.environ))
            self._active.append(_Active(point, process, slot))

    def _forward(self, arrived: deque[int]) -> None:
        """Forward signals to the launchers."""
        while arrived:
            self._stops.append(arrived.popleft())
            if self._stops[-1] == signal.SIGINT and self._stops.count(signal.SIGINT) == 1:
                print_text(f"\n{CTRL_C_MESSAGE}", file=sys.stderr, flush=True)
            is_last = self._stops.count(signal.SIGINT) > _MAX_INTERRUPTS
            for each in self._active:
                if each.process is not None:
                    each.process.send(signal.SIGKILL if is_last else self._stops[-1])

    def _collect(self) -> None:
        """Remove the points that have ended, and record and print their results."""
        for each in list(self._active):
            if each.process is not None and each.process.has_ended():
                (row,) = read_points(self._sweep, [each.point])
                if row.has_ended or not self._sweep.waits_for_jobs:
                    self._end(each, row)
                else:
                    each.process = None
        jobs = [each for each in self._active if each.process is None]
        if not jobs or time.monotonic() < self._next_query:
            return
        self._next_query = time.monotonic() + _POLL_JOBS
        for each, row in zip(jobs, read_points(self._sweep, [job.point for job in jobs]), strict=True):
            if row.has_ended:
                self._end(each, row)

    def _stop_losers(self) -> None:
        """Request the stop of the points that lose against those that have ended."""
        if self._rule is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_EVERY
        for each in self._active:
            if each.point.number in self._losers or not (reason := self._rule.reason(each.point)):
                continue
            if each.process is not None:
                each.process.stop_early(reason)
            elif not self._stop_job(each.point, reason):
                continue
            self._losers.add(each.point.number)

    def _stop_job(self, point: Point, reason: str) -> bool:
        """Request the stop of a point's job, and return whether its scheduler accepted it. If not, print why once."""
        job = job_of(self._sweep.run_dir(point))
        if job is None:
            return False
        record = read_record(self._sweep, point) or PointRecord(time.time(), status=0)
        write_record(self._sweep, point, replace(record, stopped_early=reason))
        try:
            if stop(job):
                return True
            why = f"the scheduler did not accept the stop of job {job}"
        except ConfigError as error:
            why = str(error)
        if not record.stopped_early:
            ends_line = "" if self._parallel > 1 else "\n"
            print_text(f"{ends_line}{point.name}: not stopped early yet: {why}", flush=True)
        self._next_look = time.monotonic() + _POLL_JOBS
        return False

    def _end(self, active: _Active, row: SweepRow) -> None:
        self._active.remove(active)
        self._free.append(active.slot)
        if self._study is not None:
            self._study.record(row, self._sweep.metric, read_curve(self._sweep, row.point))
        if self._rule is not None:
            self._rule.add(row)
        end = _end_line(row)
        if self._parallel > 1:
            end = f"{row.point.name}: {end}"
        elif sys.stdout.isatty():
            start = _start_line(self._sweep, row.point, f"[{self._total}/{self._total}]") + self._line_end
            end = end if len(start) + len(end) <= terminal_width() else "\n" + fit(f"  {end}")
        print_text(end, flush=True)

    @property
    def _line_end(self) -> str:
        """End of the line of a point that was started; a single point ends it later with its result."""
        return "... " if self._parallel == 1 else "started\n"


def _all_at_once(sweep: Sweep) -> bool:
    """Return whether all points are submitted at once and then watched: those of a cluster, if it is no study."""
    return sweep.waits_for_jobs and sweep.study is None and not any(point.runs_here for point in sweep.points)


def _adopt_job(sweep: Sweep, point: Point) -> bool:
    """Return whether a job of the point has not ended, as in a study that continues, and record its submission."""
    job = None if point.runs_here else job_of(sweep.run_dir(point))
    running = jobs_by_id([job]).get(job) if job else None
    if running is None or running.over:
        return False
    record = read_record(sweep, point) or PointRecord(time.time())
    write_record(sweep, point, replace(record, status=0))
    return True


def _start_line(sweep: Sweep, point: Point, counter: str) -> str:
    """Return the first half of a point's line."""
    width = max(len(each.name) for each in sweep.points)
    count = describe_processes(point.processes) if point.processes else ""
    mesh = SweepRow(point, "running").mesh
    line = f"{counter} {point.name:<{width}}  {count:<12} {mesh:<24} "
    return " ".join(line.split()) + " " if sys.stdout.isatty() and len(line) + 20 > terminal_width() else line


def _end_line(row: SweepRow) -> str:
    """Return the second half of a point's line: state, wall time, throughput and reason."""
    parts = [row.state]
    if row.seconds:
        parts.append(f"{row.seconds:.0f} s")
    if row.tokens_per_second:
        parts.append(f"{row.tokens_per_second:,.0f} tokens/s")
    if row.reason and row.state != "ok":
        parts.append(first_line(row.reason, 100))
    return ", ".join(parts)


class _PointProcess:
    """The launcher of a point in a process group of its own, and the point's record, which it keeps up to date.

    Args:
        sweep: The sweep.
        point: The point to start.
        environment: Variables to set in addition to those of this process.
    """

    def __init__(self, sweep: Sweep, point: Point, environment: Mapping[str, str]) -> None:
        self._sweep, self._point = sweep, point
        self._killed_before = killed_for_memory()
        self.record = PointRecord(time.time())
        write_record(sweep, point, self.record)
        keep_only_folder(sweep.run_dir(point))
        with open_append(sweep.log(point), PRIVATE) as log:
            self._log_start = log.tell()
            sweep_process = os.getpid()
            self._process = subprocess.Popen(
                point_command(sweep, point),
                cwd=sweep.folder,
                env={**without_ranks(os.environ), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C then reaches only this process, which forwards it once
                preexec_fn=lambda: die_with(sweep_process),  # noqa: PLW1509 (other threads are idle ones of BLAS)
            )

    def has_ended(self) -> bool:
        """Return whether the launcher has exited; then its exit status and output are in the record."""
        if self._process.poll() is None:
            return False
        if self.record.status is None:
            self._conclude()
        return True

    def stop_early(self, reason: str) -> None:
        """Record the reason, and request the ordinary stop, which saves a checkpoint."""
        self.record = replace(self.record, stopped_early=reason)
        write_record(self._sweep, self._point, self.record)
        self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """Send a signal to the launcher, whose backend stops its ranks or job."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the launcher's process group; ranks are in other groups and end with their launcher."""
        if self._process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _conclude(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what the launcher may have left in its group
        self.record = replace(
            self.record,
            status=self._process.returncode,
            seconds=round(time.time() - self.record.started, 1),
            message=_tail(self._sweep.log(self._point), self._log_start),
            killed_for_memory=killed_for_memory() > self._killed_before,
        )
        write_record(self._sweep, self._point, self.record)


def point_command(sweep: Sweep, point: Point) -> list[str]:
    """Return the command that runs a point, as an argument list: no shell is involved."""
    run_dir = override_of("run.dir", str(sweep.run_dir(point)))
    return [sys.executable, str(sweep.file), *sweep.options, *point.overrides, run_dir]


def _tail(log: Path, start: int) -> str:
    """Return the last lines of a log from the offset `start`, without blank lines and the run directory line."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    kept = [line for line in lines if line.strip() and not line.startswith("run /")]
    return "\n".join(kept[-_LAST_LINES:])


def share_problems(cfg: RecipeConfig, processes: int, parallel: int) -> list[str]:
    """Return the problems of running that many local points like this one at the same time.

    Args:
        cfg: Config of a point.
        processes: Its number of ranks, with its share of the GPUs.
        parallel: sweep.parallel.
    """
    gpus = visible_gpus(os.environ)
    if parallel == 1:
        return []
    if gpus and cfg.cluster.device != Device.cpu:
        share = gpus // parallel
        if gpus % parallel:
            divisors = ", ".join(str(number) for number in range(1, gpus + 1) if gpus % number == 0)
            return [
                f"sweep.parallel={parallel}: the points share {gpus} visible GPUs, which must be divisible by it; set "
                f"it to one of {divisors}, or change {VISIBLE_DEVICES}"
            ]
        if share < processes <= gpus:  # more than all GPUs are rejected for any run
            return [
                f"sweep.parallel={parallel}: each point has {share} of the {gpus} visible GPUs, but it starts "
                f"{processes} processes, and each needs its own GPU; lower sweep.parallel or cluster.procs_per_node"
            ]
        return []
    limit, total = RANKS_PER_CORE * usable_cores(), parallel * processes
    if total <= limit or processes > limit or cfg.cluster.oversubscribe:
        return []
    return [
        f"sweep.parallel={parallel}: {parallel} points of {processes} processes are {total} on this machine; the limit "
        f"is {RANKS_PER_CORE} per core, {limit} on {usable_cores()} usable cores; lower it, or set "
        "cluster.oversubscribe=true"
    ]


def _share_of(slot: int, parallel: int, point: Point, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit a point to its share; none for a point that runs as a job of its own.

    Args:
        slot: Number of the share, less than `parallel`.
        parallel: Number of shares.
        point: The point.
        environ: Variables of the sweep. OMP_NUM_THREADS is not changed if the user has set it.
    """
    if parallel == 1 or not point.runs_here:
        return {}
    variables = {}
    if _THREADS not in environ:
        variables[_THREADS] = str(max(usable_cores() // ((point.processes or 1) * parallel), 1))
    size = visible_gpus(environ) // parallel
    if size and visible_gpus(environ) % parallel == 0:
        names = environ.get(VISIBLE_DEVICES, ",".join(map(str, range(size * parallel)))).split(",")
        variables[VISIBLE_DEVICES] = ",".join(name.strip() for name in names[slot * size : (slot + 1) * size])
    return variables
