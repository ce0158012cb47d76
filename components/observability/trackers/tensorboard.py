"""TensorBoard: event files in RUN_DIR/tensorboard, written through torch.utils.tensorboard."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from components.observability.trackers.tracker import TrackedRun
from components.protocol.run_files import own_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
"""Folder of the event files in the run directory."""


class TensorBoardTracker:
    """A scalar per metric, rounded to float32, and the frozen config as the text `config`."""

    def __init__(self) -> None:
        self._run: TrackedRun
        self._writer: SummaryWriter | None = None

    def start(self, run: TrackedRun) -> str:
        """Import TensorBoard."""
        import torch.utils.tensorboard  # noqa: F401  (imports the tensorboard package)

        self._run = run
        folder = run.directory / FOLDER
        return f"{folder}; open it with: tensorboard --logdir {shlex.quote(str(folder))}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at the step."""
        writer = self._writer or self._open(step + ("loss" not in values))
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def finish(self, *, failed: bool) -> None:
        """Write what is pending."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> SummaryWriter:
        """Open an event file of this attempt, after whose start TensorBoard hides earlier attempts' values from `step`.

        An attempt begins with an evaluation at the step that it resumes from, or with the loss of a later step.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._writer = writer = SummaryWriter(str(own_folder(self._run.directory / FOLDER)), purge_step=step)
        writer.add_text("config", f"```yaml\n{self._run.config_text}```", step)
        return writer
