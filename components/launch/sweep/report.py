"""Report of a sweep: the table on the console and in files, and the exit status."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from components.config.compose.sources import CONF
from components.console import PlainConsole
from components.launch.sweep.plan import Sweep, is_running
from components.launch.sweep.point_rows import ALIVE, NOT_BAD
from components.launch.sweep.table import SweepReport, print_table, read_report, to_csv, to_markdown
from components.protocol.run_files import atomic_write
from components.terminal import print_text

WATCH_EVERY = 5.0
"""Refresh interval in seconds."""
WIDTH = 200
"""Line width if the output is not a terminal, but a file to read later."""


def report_now(sweep: Sweep) -> int:
    """Print the table, write report.md, report.csv and report.png, and return the exit status.

    The status is also 1 if the report cannot be written.
    """
    report = read_report(sweep)
    console = _console()
    print_table(report, console)
    status = exit_status(report)
    if why_not := _plot(report):
        print_text(why_not)
    try:
        for name, text in (("report.md", to_markdown(report)), ("report.csv", to_csv(report))):
            atomic_write(sweep.directory / name, text)
        print_text(f"report: {sweep.directory / 'report.md'}", flush=True)
    except OSError as error:
        file, why = error.filename or sweep.directory, error.strerror or error
        print_text(f"{file}: cannot be written: {why}; fix that, then run: {report_command(sweep)}", file=sys.stderr)
        status = 1
    if any(row.state in ALIVE for row in report.rows):
        print_text(f"to follow it: {report_command(sweep, '--watch')}", flush=True)
    return status


def watch(sweep: Sweep) -> int:
    """Print the table repeatedly until no point is running or pending; then report as `report_now` does."""
    console = _console()
    while True:
        report = read_report(sweep)
        if not (is_running(sweep.directory) or any(row.state in ALIVE for row in report.rows)):
            return report_now(sweep)
        console.clear()
        print_table(report, console)
        sys.stdout.flush()
        time.sleep(WATCH_EVERY)


def report_command(sweep: Sweep, *options: str) -> str:
    """Return the shell command that prints the report, relative to the current folder."""
    here = Path.cwd()
    paths = (CONF.parent / "scripts" / "sweep_report.py", sweep.directory)
    shown = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in paths]
    return shlex.join(["python", *shown, *options])


def exit_status(report: SweepReport) -> int:
    """Return 0 if every point is ok or may still become ok, and the losses agree; else 1."""
    fine = (*NOT_BAD, "not started") if is_running(report.sweep.directory) else NOT_BAD
    return int(bool(report.agreement.disagreeing) or any(row.state not in fine for row in report.rows))


def _plot(report: SweepReport) -> str | None:
    from components.launch.sweep.chart import plot_report

    try:
        return plot_report(report, report.sweep.directory / "report.png")
    except (MemoryError, OSError, ImportError) as error:  # a failed plot must not cost the table
        return f"no report.png: {type(error).__name__}: {error}"


def _console() -> PlainConsole:
    return PlainConsole(highlight=False) if sys.stdout.isatty() else PlainConsole(highlight=False, width=WIDTH)
