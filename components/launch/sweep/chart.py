"""report.png: throughput and loss curve of each point; curves of equivalent meshes must coincide."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from components.config.metrics_log import MetricsLog
from components.launch.sweep.point_rows import SweepRow
from components.launch.sweep.table import SweepReport
from components.protocol.run_files import atomic_file


def plot_report(report: SweepReport, file: Path) -> str | None:
    """Plot the sweep to a PNG; return the reason if there is nothing to plot."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no report.png: matplotlib is not installed (pip install 'meshbook[plot]')"
    rows = [row for row in report.rows if row.tokens_per_second]
    if not rows:
        return "no report.png: no point has measured its throughput"
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 1.5 + 0.4 * max(len(rows), 6)), layout="constrained")
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
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    curves.set(xlabel="optimizer step", ylabel="loss per target token (nats)")
    curves.grid(alpha=0.3)
    curves.legend(fontsize="small")
    with atomic_file(file) as picture:
        figure.savefig(picture, dpi=120, format="png")
    return None


def _curve(row: SweepRow, report: SweepReport) -> tuple[list[int], list[float]]:
    """Return the steps and training losses of a point."""
    lines = [line for line in MetricsLog(report.sweep.run_dir(row.point)).read() if "loss" in line]
    return [line["step"] for line in lines], [line["loss"] for line in lines]
