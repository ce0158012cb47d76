"""Plots of what a sweep found (sweep.png): the metric over steps, against each swept key, and parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.figures import MISSING, STEP, finish_axes, has_matplotlib, new_figure, save_figure
from components.launch.sweep.early_stop import read_curve
from components.launch.sweep.point_rows import STOPPED_EARLY, SweepRow
from components.launch.sweep.table import SweepReport
from components.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

COLUMNS = 3
"""Panels in a row of the figure."""
LOG_RATIO = 20.0
"""Ratio of the largest to the smallest value above which a scale is logarithmic."""

BACKGROUND: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1.0}
"""Box behind a label, which lines would make unreadable."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Positions of a column of values on an axis."""

    positions: list[float]
    """One per value: the number, or the index among the different texts."""
    labels: list[str]
    """Labels of the positions 0, 1, ... of texts; empty for numbers."""
    log: bool

    @classmethod
    def of(cls, values: Sequence[str | float]) -> Scale:
        """Return the scale of numbers, or of texts if not all values are finite numbers."""
        try:
            numbers = [float(value) for value in values]
        except ValueError:
            numbers = [math.nan]
        if not all(map(math.isfinite, numbers)):
            texts = list(dict.fromkeys(map(str, values)))
            return cls([float(texts.index(str(value))) for value in values], [_text(each) for each in texts], False)
        return cls(numbers, [], min(numbers) > 0 and max(numbers) > LOG_RATIO * min(numbers))

    def heights(self) -> list[float]:
        """Return the positions scaled to [0, 1]."""
        placed = [math.log(each) for each in self.positions] if self.log else self.positions
        low, high = min(placed), max(placed)
        return [(each - low) / (high - low) if high > low else 0.5 for each in placed]

    def ends(self) -> list[tuple[float, str]]:
        """Return the heights to label, with their labels."""
        if not self.labels:
            low, high = min(self.positions), max(self.positions)
            return [(0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")] if high > low else [(0.5, f"{low:.4g}")]
        last = len(self.labels) - 1
        return [(index / last if last else 0.5, label) for index, label in enumerate(self.labels)]


def plot_sweep(report: SweepReport, file: Path) -> str | None:
    """Write the plots of the points that have the metric of a report; return the reason if there is nothing to plot.

    Points that were stopped early are drawn as crosses, the best one in red, and worse values in lighter colors.
    """
    if report.criterion is None:
        return "the points cannot be compared"
    if not has_matplotlib():
        return MISSING
    name = report.criterion.metric
    rows = [row for row in report.rows if row.state in ("ok", STOPPED_EARLY) and row.number(name) is not None]
    if len(rows) < 2:
        return f"fewer than two points have a {report.criterion.label}"
    values = [row.numbers()[name] for row in rows]
    count = 1 + len(report.sweep.keys)
    upper = math.ceil(count / COLUMNS)
    figure = new_figure(5 * COLUMNS, 4 * (upper + 1))
    grid = figure.add_gridspec(upper + 1, COLUMNS)
    colors = _colors(report, values)
    panels = [figure.add_subplot(grid[number // COLUMNS, number % COLUMNS]) for number in range(count)]
    _draw_curves(panels[0], report, rows, colors)
    for axes, key in zip(panels[1:], report.sweep.keys, strict=True):
        _draw_key(axes, report, rows, key)
    below = figure.add_subplot(grid[upper, :])
    _draw_parallel(below, report, rows, colors)
    figure.colorbar(colors, ax=below, label=_text(report.criterion.label))
    figure.suptitle(_text(report.sweep.directory.name))
    save_figure(figure, file)
    return None


def _colors(report: SweepReport, values: Sequence[float]) -> ScalarMappable:
    """Return the colors of values of the metric, the best ones darkest."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    lowest_is_best = report.criterion is not None and report.criterion.goal == "min"
    return ScalarMappable(Normalize(min(values), max(values)), "viridis" if lowest_is_best else "viridis_r")


def _draw_curves(axes: Axes, report: SweepReport, rows: Sequence[SweepRow], colors: ScalarMappable) -> None:
    """Draw the metric of every point over its steps."""
    for row in reversed(rows):  # the best one on top
        curve = read_curve(report.sweep, row.point)
        axes.plot(
            list(curve), list(curve.values()), marker="." if len(curve) < 20 else None, **_line(report, row, colors)
        )
    finish_axes(axes, xlabel=STEP, ylabel=_label(report), legend=False)


def _draw_key(axes: Axes, report: SweepReport, rows: Sequence[SweepRow], key: str) -> None:
    """Draw the metric of every point against a swept key."""
    scale = Scale.of([row.point.values.get(key, "") for row in rows])
    for row, position in zip(rows, scale.positions, strict=True):
        is_best, stopped = row is report.best, row.state == STOPPED_EARLY
        color = "tab:red" if is_best else "tab:gray" if stopped else "tab:blue"
        axes.plot(
            position, _value(report, row), marker="x" if stopped else "o", color=color, zorder=3 if is_best else 2
        )
    if scale.labels:
        axes.set_xticks(range(len(scale.labels)), scale.labels)
    axes.set_xscale("log" if scale.log else "linear")
    axes.set(xlabel=_text(key), ylabel=_label(report))
    axes.grid(alpha=0.3)


def _draw_parallel(axes: Axes, report: SweepReport, rows: Sequence[SweepRow], colors: ScalarMappable) -> None:
    """Draw every point as a line over the swept keys, in the order of the command line, and the metric."""
    keys = report.sweep.keys
    scales = [Scale.of([row.point.values.get(key, "") for row in rows]) for key in keys]
    scales.append(Scale.of([_value(report, row) for row in rows]))
    heights = [scale.heights() for scale in scales]
    for number in reversed(range(len(rows))):
        axes.plot(range(len(scales)), [each[number] for each in heights], **_line(report, rows[number], colors))
    for place, scale in enumerate(scales):
        axes.axvline(place, color="black", linewidth=0.8)
        for height, label in scale.ends():
            axes.annotate(
                label, (place, height), xytext=(4, 0), textcoords="offset points", fontsize="small", bbox=BACKGROUND
            )
    axes.set_xticks(range(len(scales)), [_text(each) for each in (*keys, _label(report))])
    axes.set_yticks([])


def _line(report: SweepReport, row: SweepRow, colors: ScalarMappable) -> dict[str, Any]:
    """Return the style of a point's line."""
    if row is report.best:
        return {"color": "tab:red", "linewidth": 2.5}
    style = ":" if row.state == STOPPED_EARLY else "-"
    return {"color": colors.to_rgba(cast(Any, _value(report, row))), "linewidth": 1.2, "linestyle": style}


def _value(report: SweepReport, row: SweepRow) -> float:
    return row.numbers()[report.criterion.metric] if report.criterion else math.nan


def _label(report: SweepReport) -> str:
    return _text(report.criterion.label) if report.criterion else ""


def _text(text: str) -> str:
    """Return a text for matplotlib, which reads $ as math."""
    return printable(text).replace("$", r"\$")
