"""Pictures and traces of a run: loss.png, and torch.profiler traces of a few optimizer steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from components.config.schema.run import ProfileConfig
from components.presentation import (
    LOSS,
    MISSING,
    draw_curves,
    figure_text,
    finish_axes,
    has_matplotlib,
    new_figure,
    save_figure,
)
from components.protocol.run_files import atomic_path, atomic_write, own_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UPDATE_SECONDS = 60.0
"""Minimum time between two plots during a run."""
TARGET_TOKEN = "target token"
"""Unit of losses whose label has their unit, nats."""


class LossPlot:
    """RUN_DIR/loss.png, redrawn by a thread during the run, and once more at its end."""

    def __init__(self, run_dir: Path, title: str, read: Callable[[], list[dict[str, Any]]]) -> None:
        """Set the file, title and source of the plot.

        Args:
            title: Title of the figure; empty: the name of the run directory.
            read: Function that returns the objects of metrics.jsonl.
        """
        self._file, self._title, self._read = run_dir / "loss.png", title or run_dir.name, read
        self.unit = TARGET_TOKEN
        """What a loss is a mean over; set by the first evaluation."""
        self._thread: threading.Thread | None = None
        self._next = 0.0  # time.monotonic() from which the next update may start

    def update(self) -> None:
        """Start a redraw in a thread, unless one is running or the last was less than _UPDATE_SECONDS ago."""
        now = time.monotonic()
        if now >= self._next and not (self._thread and self._thread.is_alive()):
            self._next = now + _UPDATE_SECONDS
            self._thread = threading.Thread(target=self._draw, name="loss.png", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait for a redraw that is running."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> str | None:
        """Draw the final plot; return why nothing was drawn, or None."""
        self.wait()
        return self._draw()

    def _draw(self) -> str | None:
        metrics = self._read()
        if not has_matplotlib():
            return f"no plot: {MISSING}"
        name = "divergence" if any("eval_divergence" in line for line in metrics) else "loss"
        training = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
        held_out = [(line["step"], line[f"eval_{name}"]) for line in metrics if line.get(f"eval_{name}") is not None]
        if not training and not held_out:
            return "no plot: no loss was logged"
        save_figure(_figure(training, held_out, self._title, self.unit, name), self._file)
        return None


def _figure(
    training: list[tuple[int, float]],
    held_out: list[tuple[int, float]],
    title: str,
    unit: str = TARGET_TOKEN,
    name: str = "loss",
) -> Figure:
    """Return a figure of the two curves, each a list of (optimizer step, value of the metric `name`)."""
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    draw_curves(axes, {"training": training, "held out": held_out})
    axes.set_title(figure_text(title, 64), fontsize="medium")
    finish_axes(axes, ylabel=LOSS if (name, unit) == ("loss", TARGET_TOKEN) else f"{name} per {unit}")
    return figure


class StepProfile:
    """Profiler of the steps in logging.profile, counted from the start of this attempt; no overhead in other steps.

    It writes RUN_DIR/profile/rank_N.json, a Chrome trace (chrome://tracing, perfetto.dev), and rank_N.txt, a table of
    operators.
    """

    def __init__(self, cfg: ProfileConfig, run_dir: str, report: Callable[[str], None]) -> None:
        """Set up the profiler of this rank; `report` prints the line about the written files."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._cfg, self._report = cfg, report
        self._files = Path(run_dir) / "profile" / f"rank_{rank}"
        self._enabled = cfg.enabled and rank in cfg.ranks
        self._steps = 0
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one optimizer step; start and stop the profiler at the configured steps."""
        self._steps += 1
        if self._enabled and self._steps == self._cfg.start:
            self._profiler = torch.profiler.profile(profile_memory=self._cfg.memory, with_stack=self._cfg.stacks)
            self._profiler.start()
        yield
        if self._profiler is not None and self._steps == self._cfg.start + self._cfg.steps - 1:
            self._finish(self._profiler)
            self._profiler = None

    def finish(self) -> None:
        """Report that an attempt, which may have resumed, ended before the configured steps."""
        first, last = self._cfg.start, self._cfg.start + self._cfg.steps - 1
        if self._cfg.enabled and self._steps < last:
            self._report(
                f"no profile of steps {first} to {last} of this attempt, which had {self._steps}: logging.profile "
                "counts from the start of an attempt; set logging.profile.start and logging.profile.steps lower"
            )

    def _finish(self, profiler: torch.profiler.profile) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the kernels that these steps have launched belong to the trace
        profiler.stop()
        own_folder(self._files.parent)
        trace, table = self._files.with_suffix(".json"), self._files.with_suffix(".txt")
        with atomic_path(trace) as unpublished:
            profiler.export_chrome_trace(str(unpublished))
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        atomic_write(table, profiler.key_averages().table(sort_by=by, row_limit=60) + "\n")
        last = self._cfg.start + self._cfg.steps - 1
        self._report(f"profile of steps {self._cfg.start} to {last} of this attempt: {trace}, {table}")
