"""Report of a sweep: the table on the console and in files, a plot, and the exit status."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from components.config.compose.sources import CONF
from components.config.metrics_log import MetricsLog
from components.console import PlainConsole
from components.figures import MISSING, finish_axes, has_matplotlib, new_figure, save_figure
from components.launch.sweep.criterion import SPEED, judged_by_metric
from components.launch.sweep.plan import Sweep, is_running
from components.launch.sweep.plots import plot_sweep
from components.launch.sweep.point_rows import ALIVE, NOT_BAD, SweepRow
from components.launch.sweep.table import SweepReport, print_table, read_report, to_csv, to_markdown
from components.protocol.exit_codes import EXIT_INVALID
from components.protocol.run_files import atomic_write, is_replaceable
from components.terminal import print_text

WATCH_EVERY = 5.0
"""Refresh interval in seconds."""
WIDTH = 200
"""Line width if the output is not a terminal, but a file to read later."""


def report_now(sweep: Sweep) -> int:
    """Print the table, write report.md, report.csv and the plots, and return the exit status.

    The status is also 1 if the report cannot be written.
    """
    report = read_report(sweep)
    console = _console()
    print_table(report, console)
    status = exit_status(report)
    marks = {"report.md": "# Sweep ", "report.csv": ",tokens_per_second,tokens_per_second_per_process,"}
    for name, mark in marks.items():
        if not is_replaceable(sweep.directory / name, mark):
            print_text(f"{sweep.directory / name}: is not of a sweep; move it away, then run: {report_command(sweep)}")
            return EXIT_INVALID
    for why_not in _plot(report):
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
    """Return 0 if every point is ok or may still become ok, the losses agree, and sweep.metric exists; else 1."""
    fine = (*NOT_BAD, "not started") if is_running(report.sweep.directory) else NOT_BAD
    bad = bool(report.agreement.disagreeing) or any(row.state not in fine for row in report.rows)
    return int(bad or bool(report.problem))


def _plot(report: SweepReport) -> list[str]:
    """Write report.png, and sweep.png unless the points are compared by speed; return why one was not written."""
    plots: dict[str, Callable[[SweepReport, Path], str | None]] = {"report.png": _plot_to}
    if judged_by_metric(report.sweep) or report.criterion not in (None, SPEED):
        plots["sweep.png"] = plot_sweep
    reasons: dict[str, str] = {}
    for name, plot in plots.items():
        try:
            why_not = plot(report, report.sweep.directory / name)
        except (MemoryError, OSError, ImportError) as error:  # a failed plot must not cost the table
            why_not = f"{type(error).__name__}: {error}"
        if why_not is not None:
            reasons[name] = why_not
    return [f"no {name}: {why_not}" for name, why_not in reasons.items()]


def _plot_to(report: SweepReport, file: Path) -> str | None:
    """Plot throughput and loss curves to a PNG; return the reason if there is nothing to plot."""
    if not has_matplotlib():
        return MISSING
    rows = [row for row in report.rows if row.tokens_per_second]
    if not rows:
        return "no point has measured its throughput"
    figure = new_figure(11, 1.5 + 0.4 * max(len(rows), 6))
    speeds, curves = figure.subplots(1, 2)
    names = [f"{row.point.name}\n{row.mesh}" if row.mesh != "1" else row.point.name for row in rows]
    colors = ["tab:green" if row is report.best else "tab:blue" for row in rows]
    bars = speeds.barh(names, [row.tokens_per_second for row in rows], color=colors)
    speeds.bar_label(bars, fmt="{:,.0f}", padding=3)
    speeds.invert_yaxis()
    speeds.margins(x=0.2)
    speeds.set(xlabel="target tokens per second", title=report.sweep.directory.name)
    for index, row in enumerate(rows):  # coinciding curves would hide each other: draw the first one widest
        curves.plot(*_curve(row, report), label=row.point.name, linewidth=max(8 - 2 * index, 1))
    finish_axes(curves, small_legend=True)
    save_figure(figure, file)
    return None


def _curve(row: SweepRow, report: SweepReport) -> tuple[list[int], list[float]]:
    """Return the steps and training losses of a point."""
    lines = [line for line in MetricsLog(report.sweep.run_dir(row.point)).read() if "loss" in line]
    return [line["step"] for line in lines], [line["loss"] for line in lines]


def _console() -> PlainConsole:
    return PlainConsole(highlight=False) if sys.stdout.isatty() else PlainConsole(highlight=False, width=WIDTH)
