"""loss.png: the curve of a run."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config.schema.data import DataConfig, RowsDataConfig
from components.config.schema.model import ModelConfig
from components.config.schema.parallelism import MeshShape
from components.protocol.run_files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UPDATE_SECONDS = 60.0
"""Least time between two drawings of loss.png during a run."""


class LossPlot:
    """RUN_DIR/loss.png, drawn anew now and then during a run by a thread, and once more at its end."""

    def __init__(self, run_dir: Path, title: str, read: Callable[[], list[dict[str, Any]]]) -> None:
        """`read` returns the objects of metrics.jsonl."""
        self._file, self._title, self._read = run_dir / "loss.png", title or run_dir.name, read
        self._thread: threading.Thread | None = None
        self._next = 0.0  # by time.monotonic()

    def update(self) -> None:
        """Start to draw what there is, unless that was done a moment ago."""
        now = time.monotonic()
        if now >= self._next and not (self._thread and self._thread.is_alive()):
            self._next = now + UPDATE_SECONDS
            self._thread = threading.Thread(target=self._draw, name="loss.png", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Let a drawing that was begun end."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> str | None:
        """Draw the whole curve; return why nothing was drawn, or None."""
        self.wait()
        return self._draw()

    def _draw(self) -> str | None:
        return plot_losses(self._read(), self._file, self._title)


def run_title(model: ModelConfig, data: DataConfig, mesh: MeshShape) -> str:
    """Return what tells a run's curve from others: model, data and mesh."""
    trained = (
        Path(model.path).name.removesuffix(".gguf")
        if model.path
        else f"{model.config.get('model_type', 'model')} from scratch"
    )
    source = Path(str((data.path if isinstance(data, RowsDataConfig) else None) or data.kind)).name
    return f"{trained} on {source}, {mesh.summary}"


def plot_losses(metrics: list[dict[str, Any]], file: Path, title: str) -> str | None:
    """Draw training and held-out loss over the optimizer steps; return why nothing was drawn, or None.

    Args:
        metrics: The objects of metrics.jsonl.
        file: Where the PNG goes.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install 'meshbook[plot]')"
    training = [(line["step"], line["loss"]) for line in metrics if line.get("loss") is not None]
    held_out = [(line["step"], line["eval_loss"]) for line in metrics if line.get("eval_loss") is not None]
    if not training and not held_out:
        return "no plot: nothing was logged"
    with atomic_file(file) as picture:
        _figure(training, held_out, title).savefig(picture, dpi=120, format="png")
    return None


def _figure(training: list[tuple[int, float]], held_out: list[tuple[int, float]], title: str) -> Figure:
    """Return a figure of two curves of (optimizer step, loss)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    if training:
        axes.plot(*zip(*training, strict=True), label="training", linewidth=1)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), label="held out", marker="o")
    axes.set(xlabel="optimizer step", ylabel="loss per target token (nats)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
