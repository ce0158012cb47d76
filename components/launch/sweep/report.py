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
from components.figures import MISSING, draw_curves, figure_text, finish_axes, has_matplotlib, new_figure, save_figure
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
    names = [_bar_name(row, report) for row in rows]
    lines = sum(name.count("\n") + 2 for name in names)
    figure = new_figure(12, max(4.0, 1.2 + 0.17 * lines))
    speeds, curves = figure.subplots(1, 2)
    bars = speeds.barh(range(len(rows)), [row.tokens_per_second or 0.0 for row in rows], color="tab:blue")
    speeds.bar_label(bars, fmt="{:,.0f}", padding=3)
    speeds.set_ylim(max(len(rows), 6) - 0.5, -0.5)
    speeds.margins(x=0.3)
    speeds.set_xlim(left=0)
    draw_curves(curves, {row.point.name: _curve(row, report) for row in rows})
    finish_axes(curves)
    finish_axes(speeds, xlabel="target tokens per second", ylabel="", legend=False)
    speeds.set_yticks(range(len(rows)), names, fontsize="small")
    figure.suptitle(figure_text(report.sweep.directory.name, 100))
    save_figure(figure, file)
    return None


def _bar_name(row: SweepRow, report: SweepReport) -> str:
    """Return the lines beside the bar of a point."""
    best = f"best {report.criterion.label}" if report.criterion and row is report.best else ""
    mesh = row.mesh if row.mesh != "1" else ""
    return "\n".join(figure_text(text, 30) for text in (row.point.name, mesh, best) if text)


def _curve(row: SweepRow, report: SweepReport) -> list[tuple[int, float]]:
    """Return the (step, training loss) pairs of a point."""
    lines = MetricsLog(report.sweep.run_dir(row.point)).read()
    return [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]


def _console() -> PlainConsole:
    return PlainConsole(highlight=False) if sys.stdout.isatty() else PlainConsole(highlight=False, width=WIDTH)
