"""Figures of losses and other metrics, written as PNG files by matplotlib, an optional dependency."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from components.protocol.run_files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "matplotlib is not installed (pip install 'meshbook[plot]')"
STEP, LOSS = "optimizer step", "loss per target token (nats)"
"""Labels of the usual axes."""


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed, without importing it."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without a window or global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def finish_axes(
    axes: Axes, *, xlabel: str = STEP, ylabel: str = LOSS, small_legend: bool = False, legend: bool = True
) -> None:
    """Add labels, a grid and a legend to axes whose x values are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if axes.lines and legend:
        axes.legend(fontsize="small" if small_legend else None)


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure as PNG. Raises OSError."""
    with atomic_file(file) as image:
        figure.savefig(image, dpi=120, format="png")
