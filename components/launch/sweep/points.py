"""Sequential execution of a sweep's points, each by an ordinary launcher in a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from components.cgroup import killed_for_memory
from components.config.compose.sweep import override_of
from components.config.errors import ConfigError
from components.config.schema.checks import raise_all
from components.config.schema.parallelism import describe_processes
from components.launch.rank import die_with
from components.launch.sweep.plan import PLAN, Point, PointRecord, Sweep, is_running, locked, write_record
from components.launch.sweep.point_rows import ALIVE, NOT_BAD, STATES, SweepRow, read_points
from components.launch.sweep.report import report_command, report_now
from components.launch.sweep.table import first_line
from components.protocol.exit_codes import EXIT_INTERRUPTED
from components.protocol.role import without_ranks
from components.protocol.run_files import PRIVATE, open_append
from components.protocol.signals import CTRL_C_MESSAGE, collected_signals
from components.terminal import print_text

LAST_LINES = 15
"""Lines of a point's output kept in its record."""
POLL = 0.05
"""Polling interval for the running point, in seconds."""
MAX_INTERRUPTS = 2
"""Interrupts (Ctrl-C) forwarded to a point: the first saves and stops, the second aborts. One more kills it."""


def run_points(sweep: Sweep, points: Sequence[Point]) -> int:
    """Run the points sequentially, print the table, and return the exit status of the sweep.

    SIGINT, SIGTERM and SIGUSR2 are forwarded to the launcher of the running point, whose backend stops its ranks or
    job; no further point starts.

    Args:
        sweep: The sweep; its folder and sweep.json must exist.
        points: Points to run.

    Raises ConfigError if another process is running the sweep.
    """
    with locked(sweep.directory), collected_signals() as arrived:
        stops: list[int] = []
        for index, point in enumerate(points, start=1):
            if stops or arrived:
                break
            _print_start(sweep, point, f"[{index}/{len(points)}]")
            stops += _run_point(sweep, point, arrived)
            _print_end(*read_points(sweep, point))
        stops += arrived
        if stops:
            names = " and ".join(signal.Signals(number).name for number in dict.fromkeys(stops))
            print_text(f"sweep stopped by {names}; continue it: {report_command(sweep, '--retry')}", flush=True)
    status = report_now(sweep)
    if signal.SIGINT in stops:
        return EXIT_INTERRUPTED
    return 1 if stops else status


def retry(sweep: Sweep, states: Sequence[str]) -> int:
    """Run the points in any of `states` again, in their run directories, and return the exit status.

    Runs with a checkpoint resume. Empty `states` selects all states but ok, running and submitted. Raises ConfigError
    for an unknown state, while the sweep is running, and if its recipe or working directory is missing.
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
        return report_now(sweep)
    _check_origin(sweep)
    return run_points(sweep, points)


def point_command(sweep: Sweep, point: Point) -> list[str]:
    """Return the command that runs a point, as an argument list: no shell is involved."""
    run_dir = override_of("run.dir", str(sweep.run_dir(point)))
    return [sys.executable, str(sweep.file), *sweep.options, *point.overrides, run_dir]


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


def _run_point(sweep: Sweep, point: Point, arrived: deque[int]) -> list[int]:
    """Run a point until its launcher exits, record the result, and return the signals forwarded to it."""
    began, killed_before = time.time(), killed_for_memory()
    write_record(sweep, point, PointRecord(began))
    with open_append(sweep.log(point), PRIVATE) as log:
        log_start = log.tell()
        launcher = os.getpid()
        process = subprocess.Popen(
            point_command(sweep, point),
            cwd=sweep.folder,
            env=without_ranks(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C then reaches only this process, which forwards it once
            preexec_fn=lambda: die_with(launcher),  # noqa: PLW1509 (this process has one thread)
        )
        try:
            stops = _wait(process, arrived)
        finally:
            _end(process)
    record = PointRecord(
        began,
        process.returncode,
        round(time.time() - began, 1),
        _tail(sweep.log(point), log_start),
        killed_for_memory() > killed_before,
    )
    write_record(sweep, point, record)
    return stops


def _wait(process: subprocess.Popen[bytes], arrived: deque[int]) -> list[int]:
    """Wait for a point's launcher to exit while forwarding signals to it; return the signals."""
    stops: list[int] = []
    while process.poll() is None:
        while arrived:
            stops.append(arrived.popleft())
            if stops[-1] == signal.SIGINT and stops.count(signal.SIGINT) == 1:
                print_text(f"\n{CTRL_C_MESSAGE}", file=sys.stderr, flush=True)
            is_last = stops.count(signal.SIGINT) > MAX_INTERRUPTS
            process.send_signal(signal.SIGKILL if is_last else stops[-1])
        time.sleep(POLL)
    return stops


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a point's launcher; ranks are in other groups and end with their launcher."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path, start: int) -> str:
    """Return the last lines of a log from the offset `start`, without blank lines and the run directory line."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    kept = [line for line in lines if line.strip() and not line.startswith("run /")]
    return "\n".join(kept[-LAST_LINES:])


def _print_start(sweep: Sweep, point: Point, counter: str) -> None:
    """Print the first half of a point's line, without a line break."""
    width = max(len(each.name) for each in sweep.points)
    count = describe_processes(point.processes) if point.processes else ""
    mesh = SweepRow(point, "running").mesh
    print_text(f"{counter} {point.name:<{width}}  {count:<12} {mesh:<24} ... ", end="", flush=True)


def _print_end(row: SweepRow) -> None:
    """Print the second half of a point's line: state, wall time, throughput and reason."""
    parts = [row.state]
    if row.seconds:
        parts.append(f"{row.seconds:.0f} s")
    if row.tokens_per_second:
        parts.append(f"{row.tokens_per_second:,.0f} tokens/s")
    if row.reason and row.state != "ok":
        parts.append(first_line(row.reason, 100))
    print_text(", ".join(parts), flush=True)
