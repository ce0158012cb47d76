"""Report of a sweep: the table on the console and in files, sweep.png, and the exit status."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.config.compose.sources import CONF
from components.config.stored_run import MetricsLog
from components.launch.sweep.plan import ALIVE, NOT_BAD, STOPPED_EARLY, Sweep, SweepRow, is_running
from components.launch.sweep.ranking import (
    SPEED,
    SweepReport,
    judged_by_metric,
    print_table,
    read_curve,
    read_report,
    to_csv,
    to_markdown,
)
from components.presentation import (
    LOG_RATIO,
    LOSS,
    MISSING,
    PlainConsole,
    draw_curves,
    figure_text,
    finish_axes,
    has_matplotlib,
    is_logarithmic,
    new_figure,
    plain_numbers,
    save_figure,
)
from components.protocol.errors import EXIT_INVALID
from components.protocol.run_files import atomic_write, is_replaceable
from components.terminal import print_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

_WATCH_EVERY = 5.0
"""Refresh interval in seconds."""
_WIDTH = 200
"""Line width if the output is not a terminal, but a file to read later."""
_COLUMNS = 3
"""Most panels in a row of the figure."""
_DECADE = 9.99
"""Ratio of the largest to the smallest value of a swept key from which its scale is logarithmic."""
_MOST_TICKS = 12
"""Different numbers up to which each is a tick."""
_LONGEST = 24
"""Maximum length of the label of a text."""
_BEST = "tab:red"
_BEST_MARK: dict[str, Any] = {"marker": "*", "markersize": 15, "markeredgecolor": "black", "zorder": 4}
"""Mark of the best point, which color alone would not show."""
_CHARACTER = 0.02
"""Width of a character of a tick label, as a share of the width of a panel."""
_BACKGROUND: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1.0}
"""Box behind a label, which lines would make unreadable."""


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
        file, reason = error.filename or sweep.directory, error.strerror or error
        print_text(f"{file}: cannot be written: {reason}; fix that, then run: {report_command(sweep)}", file=sys.stderr)
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
        time.sleep(_WATCH_EVERY)


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
        plots["sweep.png"] = _plot_sweep
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
    """Plot throughput and curves of losses or rewards to a PNG; return the reason if there is nothing to plot."""
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
    is_rewarded = any(row.improves == "reward" for row in rows)
    name, label, tokens = ("reward", "reward", "answer tokens") if is_rewarded else ("loss", LOSS, "target tokens")
    draw_curves(curves, {row.point.name: _curve(row, report, name) for row in rows}, linear=is_rewarded)
    finish_axes(curves, ylabel=label)
    finish_axes(speeds, xlabel=f"{tokens} per second{', with sampling' * is_rewarded}", ylabel="", legend=False)
    speeds.set_yticks(range(len(rows)), names, fontsize="small")
    figure.suptitle(figure_text(report.sweep.directory.name, 100))
    save_figure(figure, file)
    return None


def _bar_name(row: SweepRow, report: SweepReport) -> str:
    """Return the lines beside the bar of a point."""
    best = f"best {report.criterion.label}" if report.criterion and row is report.best else ""
    mesh = row.mesh if row.mesh != "1" else ""
    return "\n".join(figure_text(text, 30) for text in (row.point.name, mesh, best) if text)


def _curve(row: SweepRow, report: SweepReport, name: str) -> list[tuple[int, float]]:
    """Return the (step, loss or reward) pairs of a point."""
    lines = MetricsLog(report.sweep.run_dir(row.point)).read()
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _console() -> PlainConsole:
    return PlainConsole(highlight=False) if sys.stdout.isatty() else PlainConsole(highlight=False, width=_WIDTH)


@dataclass(frozen=True, slots=True)
class Scale:
    """Positions of a column of values on an axis."""

    positions: list[float]
    """One per value: the number, or the index among the different texts."""
    labels: dict[float, str]
    """Labels of the different positions, in ascending order."""
    log: bool
    is_text: bool = False

    @classmethod
    def of(cls, values: Sequence[str | float], order: Sequence[str] = ()) -> Scale:
        """Return the scale of numbers, or of texts if not all values are finite numbers.

        The scale of numbers of a command line is logarithmic if they span a decade or have equal ratios. If one of them
        is zero, which that scale lacks, they are texts in ascending order.

        Args:
            order: The values as given on the command line: other texts are in the order of their first occurrence.
        """
        try:
            numbers = [float(value) for value in values]
        except ValueError:
            numbers = [math.nan]
        if not all(map(math.isfinite, numbers)):
            return cls._of_texts(
                list(map(str, values)),
                [key for key in dict.fromkeys(order or map(str, values)) if key in values],
            )
        is_typed = isinstance(values[0], str)
        fits = is_typed and max(map(len, map(str, values))) < 10
        texts = [
            str(value) if fits else _digits(number, numbers) for value, number in zip(values, numbers, strict=True)
        ]
        labels = dict(sorted(zip(numbers, texts, strict=True)))
        positive = [label for label in labels if label]
        log = is_logarithmic(positive, _DECADE if is_typed else LOG_RATIO) or (is_typed and _is_geometric(positive))
        if log and min(labels) == 0:
            return cls._of_texts([labels[number] for number in numbers], list(labels.values()))
        return cls(numbers, labels, log)

    @classmethod
    def _of_texts(cls, values: list[str], different: list[str]) -> Scale:
        labels = dict(zip(map(float, range(len(different))), _shortened(different), strict=True))
        return cls([float(different.index(value)) for value in values], labels, False, is_text=True)

    def height(self, position: float) -> float:
        """Return a position scaled to [0, 1]."""
        low, high, each = (math.log(number) if self.log else number for number in (*self._ends(), position))
        return (each - low) / (high - low) if high > low else 0.5

    def ticks(self, gap: float) -> dict[float, str]:
        """Return the labels to show: of all texts, and of numbers those at least `gap` of the axis apart."""
        if self.is_text or len(self.labels) < 3:
            return self.labels
        low, high = self._ends()
        kept = [low]
        for label in self.labels:
            if min(self.height(label) - self.height(kept[-1]), self.height(high) - self.height(label)) >= gap:
                kept.append(label)
        return {each: self.labels[each] for each in (*kept, high)}

    def _ends(self) -> tuple[float, float]:
        return min(self.positions), max(self.positions)


def _plot_sweep(report: SweepReport, file: Path) -> str | None:
    """Write the plots of the points that have the metric of a report; return the reason if there is nothing to plot.

    The best point is a red star, those that were stopped early are crosses and dotted lines. Worse values are lighter.
    """
    if report.criterion is None:
        return "the points cannot be compared"
    if not has_matplotlib():
        return MISSING
    name, label = report.criterion.metric, report.criterion.label
    rows = [row for row in report.rows if row.state in ("ok", STOPPED_EARLY) and row.number(name) is not None]
    if len(rows) < 2:
        return f"fewer than two points have a {label}"
    rows.sort(key=lambda row: (row is report.best, row.point.number))  # the best one on top
    keys = report.sweep.keys
    order = {key: [point.values.get(key, "") for point in report.sweep.points] for key in keys}
    scales = {key: Scale.of([row.point.values.get(key, "") for row in rows], order[key]) for key in keys}
    scales[label] = Scale.of([row.numbers()[name] for row in rows])
    colors = _colors(report, scales[label])
    styles = {row.point.name: _style(report, row, colors) for row in rows}
    columns = min(_COLUMNS, 1 + len(keys))
    upper = math.ceil((1 + len(keys)) / columns)
    figure = new_figure(5 * columns, 4 * (upper + 1))
    grid = figure.add_gridspec(upper + 1, columns)
    panels = [figure.add_subplot(grid[number // columns, number % columns]) for number in range(1 + len(keys))]
    sweep = replace(report.sweep, metric=name)
    _draw_curves(panels[0], report, {row.point.name: read_curve(sweep, row.point) for row in rows}, styles)
    kinds = ["best" if row is report.best else row.state for row in rows]
    for axes, key in zip(panels[1:], keys, strict=True):
        _draw_key(axes, scales[key], scales[label], kinds)
        axes.set(xlabel=figure_text(key, 50), ylabel=figure_text(label, 40))
    below = figure.add_subplot(grid[upper, :])
    _draw_parallel(below, scales, list(styles.values()))
    bar = figure.colorbar(colors, ax=below, label=figure_text(label, 40))
    if len(scales[label].labels) == 1:
        bar.set_ticks(list(scales[label].labels), labels=list(scales[label].labels.values()))
    else:
        plain_numbers(bar.ax.yaxis)
    title = [figure_text(report.sweep.directory.name, 40 * columns)]
    if left_out := len(report.rows) - len(rows):
        title.append(f"without {left_out} of {len(report.rows)} points, which have no {figure_text(label)}")
    figure.suptitle("\n".join(title))
    save_figure(figure, file)
    return None


def _colors(report: SweepReport, metric: Scale) -> ScalarMappable:
    """Return the colors of values of the metric, the best ones darkest, none as light as the page."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm, Normalize

    lowest_is_best = report.criterion is not None and report.criterion.goal == "min"
    shades = colormaps["viridis"]([number / 255 for number in range(225)])
    norm = (LogNorm if metric.log else Normalize)(min(metric.positions), max(metric.positions))
    return ScalarMappable(norm, ListedColormap(shades if lowest_is_best else shades[::-1]))


def _style(report: SweepReport, row: SweepRow, colors: ScalarMappable) -> dict[str, Any]:
    """Return the style of a point's line."""
    if row is report.best:
        return {"color": _BEST, "linewidth": 2.5, "linestyle": "-"}
    value = row.numbers()[report.criterion.metric] if report.criterion else math.nan
    return {"color": colors.to_rgba(cast(Any, value)), "linestyle": ":" if row.state == STOPPED_EARLY else "-"}


def _draw_curves(
    axes: Axes, report: SweepReport, curves: dict[str, dict[int, float]], styles: dict[str, dict[str, Any]]
) -> None:
    """Draw the metric of every point over its steps, with a star at the end of the best one."""
    draw_curves(axes, {name: list(curve.items()) for name, curve in curves.items()}, styles)
    label = report.criterion.label if report.criterion else ""
    finish_axes(axes, ylabel=label, legend=False)
    if report.best is not None and (curve := curves[report.best.point.name]):
        name = figure_text(f"best: {report.best.point.name}", 30)
        axes.plot(*list(curve.items())[-1], color=_BEST, linewidth=2.5, label=name, **_BEST_MARK)
        axes.legend(handles=axes.lines[-1:], fontsize="small")


def _draw_key(axes: Axes, scale: Scale, metric: Scale, kinds: Sequence[str]) -> None:
    """Draw the metric of points of some kinds against a swept key."""
    marks: dict[str, dict[str, Any]] = {
        STOPPED_EARLY: {"marker": "x", "color": "tab:gray"},
        "ok": {"marker": "o", "color": "tab:blue"},
        "best": {"color": _BEST, **_BEST_MARK},
    }
    places = list(zip(scale.positions, metric.positions, kinds, strict=True))
    for kind, mark in marks.items():
        if shown := [place[:2] for place in places if place[2] == kind]:
            axes.plot(*zip(*shown, strict=True), linestyle="none", label=kind, **mark)
    axes.set_xscale("log" if scale.log else "linear")
    axes.set_yscale("log" if metric.log else "linear")
    axes.margins(x=0.08)
    if scale.is_text or len(scale.labels) <= _MOST_TICKS:
        longest = _CHARACTER * max(map(len, scale.labels.values()))
        ticks = scale.ticks(longest)
        turned: dict[str, Any] = {"rotation": 90 if len(ticks) > 15 else 40, "ha": "right", "rotation_mode": "anchor"}
        fits = longest * len(ticks) <= 1
        size = min(10.0, 250 / len(ticks))
        axes.set_xticks(list(ticks), list(ticks.values()), fontsize=size, **({} if fits else turned))
        axes.set_xticks([], minor=True)
    else:
        plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_parallel(axes: Axes, scales: dict[str, Scale], styles: Sequence[dict[str, Any]]) -> None:
    """Draw every point as a line over the swept keys, in the order of the command line, and the metric."""
    for number, style in enumerate(styles):
        heights = [scale.height(scale.positions[number]) for scale in scales.values()]
        mark = _BEST_MARK if style["color"] == _BEST else {}
        axes.plot(range(len(scales)), heights, **{"linewidth": 1.2, **style, **mark})
    for place, scale in enumerate(scales.values()):
        axes.axvline(place, color="black", linewidth=0.8)
        for position, label in scale.ticks(0.07).items():
            at = (place, scale.height(position))
            axes.annotate(
                label, at, xytext=(9, 3), textcoords="offset points", fontsize="small", zorder=5, bbox=_BACKGROUND
            )
    width = max(12, 150 // len(scales))
    axes.set_xticks(range(len(scales)), [figure_text(name, width) for name in scales])
    axes.set_xlim(-0.1, len(scales) - 0.7)
    axes.set_yticks([])


def _is_geometric(numbers: Sequence[float]) -> bool:
    """Return whether three or more numbers in ascending order have equal ratios, which are not close to 1."""
    ratios = [second / first for first, second in pairwise(numbers)] if min(numbers, default=0) > 0 else []
    return len(ratios) > 1 and min(ratios) > 1.1 and max(ratios) < 1.01 * min(ratios)


def _digits(value: float, values: Sequence[float]) -> str:
    """Return a number with at least four significant digits, and as many as it takes to tell it from the others."""
    different = len(set(values))
    for digits in range(4, 17):
        if len({f"{each:.{digits}g}" for each in values}) == different:
            return f"{value:.{digits}g}"
    return repr(value)


def _shortened(texts: Sequence[str]) -> list[str]:
    """Return texts cut in the middle to _LONGEST characters, and numbered if that makes two of them equal."""
    short = [text if len(text) <= _LONGEST else f"{text[:8]}…{text[9 - _LONGEST :]}" for text in texts]
    numbered = [f"{number}: " * (len(set(short)) < len(short)) for number in range(1, len(short) + 1)]
    return [figure_text(number + text) for number, text in zip(numbered, short, strict=True)]
