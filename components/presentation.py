"""Tables for the console, printed by rich, and figures as PNG files, drawn by matplotlib, an optional dependency."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.protocol.run_files import atomic_file
from components.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MISSING = "matplotlib is not installed (pip install 'meshbook[plot]')"
STEP, LOSS = "optimizer step", "loss per target token (nats)"
"""Labels of the usual axes."""
TARGET_TOKEN = "target token"
"""Unit of losses whose label has their unit, nats."""
LOG_RATIO = 20.0
"""Ratio of the largest to the smallest value of a metric above which its axis is logarithmic."""
_LINE, _WIDER, _WIDEST = 1.5, 2.0, 8.0
"""Width of a line, how much wider the line below a coinciding one is, and the widest line, in points."""
_CLOSE = 0.002
"""Largest distance of coinciding curves, as a share of the height of the axes."""
_FEW, _SHORT = 6, 28
"""Curves, and characters of the longest label, up to which a legend is inside its axes."""


class PlainConsole(Console):
    """Console that prints text literally: without markup and emoji codes, and with control characters escaped.

    This includes the cells of tables, since rich passes every string through `render_str`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Convert a string to rich text, with control characters escaped."""
        return super().render_str(printable(text), **settings)


def new_table(header: Sequence[str], text_columns: Collection[int], *, wrap: bool = False) -> Table:
    """Return a table without lines; columns of text, given by number, are aligned left, the others right.

    Args:
        wrap: Break long texts into lines instead of cutting them.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(header):
        is_text = number in text_columns
        table.add_column(
            column,
            justify="left" if is_text else "right",
            no_wrap=is_text and not wrap,
            overflow="fold" if wrap else "ellipsis",
        )
    return table


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table. The caller escapes control characters with `printable`."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def number_text(value: float | None, form: str) -> str:
    """Return a formatted number; empty for None."""
    return "" if value is None else format(value, form)


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed, without importing it."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without a window or global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def figure_text(text: str, width: int = 1000) -> str:
    """Return a text for matplotlib, in lines of at most `width`, with ? for characters that its font lacks."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    glyphs, lines = get_font(findfont(FontProperties())).get_charmap(), [""]
    ends = r"\s_/.,;=+-"  # words longer than a line are broken after these
    pieces = rf"(?<!\S)\S{{1,{width}}}(?:\s|$)|[^{ends}]{{1,{width - 1}}}[{ends}]?|[{ends}]"
    for piece in re.findall(pieces, " ".join(printable(text).split())):
        if len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += "".join(each if ord(each) in glyphs else "?" for each in piece)
    return "\n".join(line.strip() for line in lines).replace("$", r"\$")  # matplotlib reads $ as math


def is_logarithmic(values: Iterable[float], ratio: float = LOG_RATIO) -> bool:
    """Return whether values are positive and differ by more than a ratio."""
    numbers = list(values)
    return bool(numbers) and min(numbers) > 0 and max(numbers) > ratio * min(numbers)


def draw_curves(
    axes: Axes,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    linear: bool = False,
) -> None:
    """Draw curves of (x, y) pairs by their labels.

    A curve is drawn wider for each later one that coincides with it, which would hide it. The y axis is logarithmic if
    the values differ by more than LOG_RATIO. Values that are not finite are crosses at the upper edge.

    Args:
        styles: Arguments of `Axes.plot` by label; None: a color, or dashes, for each curve.
        linear: Use a linear y axis whatever the values, as for rewards, which may also be 0 or negative.
    """
    shown = {label: points for label, points in curves.items() if points}
    values = [y for points in shown.values() for _, y in points if math.isfinite(y)]
    log = not linear and is_logarithmic(values)
    for number, ((label, points), width) in enumerate(
        zip(shown.items(), _widths(list(shown.values()), log), strict=True)
    ):
        style: dict[str, Any] = {"color": f"C{number}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}
        style |= {"linewidth": width, "marker": "o" if len(points) < 20 else None, "markersize": width + 3}
        style |= styles[label] if styles else {}
        name = figure_text(label, 40).lstrip("_")  # matplotlib hides labels that begin with _
        axes.plot(*zip(*points, strict=True), label=name, **style)
        if lost := [x for x, y in points if not math.isfinite(y)]:
            cross: dict[str, Any] = {"color": style["color"], "label": f"{name}: not finite"}
            axes.plot(lost, [0.97] * len(lost), "x", transform=axes.get_xaxis_transform(), **cross)
    if log:
        axes.set_yscale("log")
    elif not values:
        axes.set_yticks([])


def finish_axes(axes: Axes, *, xlabel: str = STEP, ylabel: str = LOSS, legend: bool = True) -> None:
    """Add labels, a grid and a legend to axes whose x values are whole numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    shared = [each.dataLim.intervalx for each in axes.get_shared_x_axes().get_siblings(axes)]
    low, high = min(first for first, _ in shared), max(last for _, last in shared)
    if low == high:
        axes.set_xlim(low - 1, high + 1)
    unit, name = next(((size, name) for size, name in ((1e9, "B"), (1e6, "M")) if high >= 10 * size), (1.0, ""))
    whole = {"steps": [1, 2, 5, 10], "integer": True, "min_n_ticks": 1}
    axes.xaxis.set_major_locator(MaxNLocator("auto" if high < 1e5 else 4, **whole))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:,.15g}{name}"))
    axes.set(xlabel=figure_text(xlabel, 60), ylabel=figure_text(ylabel, 40))
    plain_numbers(axes.yaxis)
    axes.grid(alpha=0.3)
    labels = [str(line.get_label()) for line in axes.lines]
    if labels and legend:
        outside = len(labels) > _FEW or max(map(len, labels)) > _SHORT
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "fontsize": "small"} if outside else {}
        axes.legend(**place)


def plain_numbers(axis: Axis) -> None:
    """Label the ticks of an axis of numbers by their whole values, without an offset or powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, ScalarFormatter

    if axis.get_scale() != "log":
        axis.set_major_formatter(ScalarFormatter(useOffset=False))
        return
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def loss_figure(lines: Sequence[Mapping[str, Any]], title: str, unit: str) -> Figure | None:
    """Return the losses over the steps of a run, or the divergences of a distillation; None if none were logged.

    Args:
        lines: Objects of metrics.jsonl.
        unit: What a loss is a mean over.
    """
    name = "divergence" if any("eval_divergence" in line for line in lines) else "loss"
    curves = _train_and_held_out(lines, name)
    if not any(curves.values()):
        return None
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    draw_curves(axes, curves)
    axes.set_title(figure_text(title, 64), fontsize="medium")
    finish_axes(axes, ylabel=LOSS if (name, unit) == ("loss", TARGET_TOKEN) else f"{name} per {unit}")
    return figure


def reward_figure(lines: Sequence[Mapping[str, Any]], title: str) -> Figure | None:
    """Return the rewards over the steps of a run, and below them the length of answers and the entropy, if logged.

    A band around the rewards of training is as wide as the metric `reward_std`. None if no reward was logged.

    Args:
        lines: Objects of metrics.jsonl.
    """
    labels = {"reward": "reward", "answer_tokens": "answer length (tokens)", "entropy": "entropy (nats per token)"}
    panels = {name: _train_and_held_out(lines, name) for name in labels}
    panels = {name: curves for name, curves in panels.items() if any(curves.values())}
    if "reward" not in panels:
        return None
    figure = new_figure(7, 2 + 2 * len(panels))
    ratios = [1.5] + [1.0] * (len(panels) - 1)
    every = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, curves in zip(every, panels.values(), strict=True):
        draw_curves(axes, curves, {"training": {"color": "C0"}, "held out": {"color": "C1"}}, linear=True)
    banded = [line for line in lines if _is_finite(line.get("reward")) and _is_finite(line.get("reward_std"))]
    if banded:
        edges = [[line["reward"] + sign * line["reward_std"] for line in banded] for sign in (-1, 1)]
        style: dict[str, Any] = {"color": "C0", "alpha": 0.15, "linewidth": 0, "label": "training ± reward_std"}
        every[0].fill_between([line["step"] for line in banded], *edges, **style)
    every[0].set_title(figure_text(title, 64), fontsize="medium")
    for axes, name in zip(every, panels, strict=True):
        finish_axes(axes, xlabel=STEP if axes is every[-1] else "", ylabel=labels[name], legend=axes is every[0])
    figure.align_ylabels()
    return figure


def _train_and_held_out(lines: Iterable[Mapping[str, Any]], name: str) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, value) pairs of a metric in training and in evaluations."""
    keys = {"training": name, "held out": f"eval_{name}"}
    return {
        label: [(line["step"], line[key]) for line in lines if line.get(key) is not None] for label, key in keys.items()
    }


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def expert_figure(lines: Sequence[Mapping[str, Any]], title: str) -> Figure | None:
    """Return the loads of experts over the steps of a run, those of layers as a map; None if none were logged.

    Args:
        lines: Objects of metrics.jsonl.
    """
    logged = [line for line in lines if line.get("expert_load") is not None]
    if not logged:
        return None
    of_layers = sorted(
        (int(match[1]), match[0]) for name in logged[-1] if (match := re.fullmatch(r"expert_load_(\d+)", name))
    )
    figure = new_figure(7, 6 if of_layers else 4)
    first, second, *third = figure.subplots(3 if of_layers else 2, sharex=True)
    draw_curves(first, {"load": [(line["step"], line["expert_load"]) for line in logged]})
    draw_curves(second, {"entropy": [(line["step"], line["expert_entropy"]) for line in logged]})
    first.set_title(figure_text(title, 64), fontsize="medium")
    finish_axes(first, xlabel="", ylabel="largest load / mean", legend=False)
    finish_axes(second, xlabel="" if third else STEP, ylabel="entropy of loads", legend=False)
    for axes in third:
        shown = [line for line in logged if all(name in line for _, name in of_layers)]
        loads = [[line[name] for line in shown] for _, name in of_layers]  # (layers, steps)
        steps, rows = [line["step"] for line in shown], range(len(of_layers))
        ticks = rows[:: max(1, len(rows) // 8)]
        axes.set_yticks(ticks, [str(of_layers[row][0]) for row in ticks])
        image = axes.pcolormesh(steps, rows, loads, vmin=1, cmap="viridis", shading="nearest")
        axes.set(xlabel=STEP, ylabel="layer")
        figure.colorbar(image, ax=axes, label="largest load / mean")
    return figure


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure as PNG. Raises OSError."""
    with atomic_file(file) as image:
        figure.savefig(image, dpi=120, format="png")


def _widths(curves: Sequence[Sequence[tuple[float, float]]], log: bool) -> list[float]:
    """Return the widths of the lines of curves, in drawing order."""
    values = [{x: math.log(y) if log else y for x, y in points if math.isfinite(y)} for points in curves]
    everything = [y for points in values for y in points.values()]
    close = _CLOSE * (max(everything) - min(everything)) if everything else 0.0

    def coincide(one: dict[float, float], other: dict[float, float]) -> bool:
        common = one.keys() & other.keys()
        return 2 * len(common) > min(len(one), len(other)) and all(abs(one[x] - other[x]) <= close for x in common)

    below = [sum(coincide(each, later) for later in values[number + 1 :]) for number, each in enumerate(values)]
    return [_LINE + number * min(_WIDER, (_WIDEST - _LINE) / max(below)) if number else _LINE for number in below]
