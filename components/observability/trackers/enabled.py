"""The trackers that a config enables, behind a guard: a tracker that fails is off for the rest of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from components.config.schema.logging import LoggingConfig, WandbMode
from components.config.secrets import masked
from components.observability.trackers.mlflow import MlflowTracker
from components.observability.trackers.tensorboard import TensorBoardTracker
from components.observability.trackers.tracker import TrackedRun, Tracker
from components.observability.trackers.trackio import TrackioTracker
from components.observability.trackers.wandb import WandbTracker

logger = logging.getLogger(__name__)


def enabled_trackers(config: LoggingConfig) -> dict[str, Tracker]:
    """Return the enabled trackers by name. None has imported its package yet."""
    trackers: dict[str, Tracker] = {}
    if config.wandb.mode is not WandbMode.disabled:
        trackers["wandb"] = WandbTracker(config.wandb)
    if config.tensorboard:
        trackers["TensorBoard"] = TensorBoardTracker()
    if config.mlflow.enabled:
        trackers["MLflow"] = MlflowTracker(config.mlflow)
    if config.trackio.enabled:
        trackers["trackio"] = TrackioTracker(config.trackio)
    return trackers


class Trackers:
    """All trackers of a run.

    Errors of a tracker never stop a run: the first one is printed, and that tracker is not used again.
    """

    def __init__(self, trackers: Mapping[str, Tracker], run_dir: str, console: Console) -> None:
        """Start the trackers.

        Args:
            trackers: Trackers by the name that a warning gives them.
        """
        self._console = console
        self._active = dict(trackers)
        if self._active:  # otherwise the history need not be read
            run = TrackedRun.read(run_dir)
            self._call(lambda tracker: tracker.start(run))

    def log(self, line: Mapping[str, Any]) -> None:
        """Log one line of metrics.jsonl at its step."""
        values = {key: value for key, value in line.items() if key != "step"}
        self._call(lambda tracker: tracker.log(line["step"], values))

    def finish(self, *, failed: bool) -> None:
        """Finish the run in all trackers, marked as failed if `failed`."""
        self._call(lambda tracker: tracker.finish(failed=failed))

    def _call(self, call: Callable[[Tracker], str | None]) -> None:
        """Call each tracker and print what it returns; on any error print the reason once and drop the tracker."""
        for name, tracker in list(self._active.items()):
            try:
                if text := call(tracker):
                    self._console.print(f"{name}: {text}", markup=False)
            except Exception as error:  # of any kind: trackers are libraries and servers of others
                del self._active[name]
                logger.debug("%s failed", name, exc_info=True)
                reason = masked(f"{type(error).__name__}: {error}")  # a failed request may quote a URL with a password
                self._console.print(f"{name} failed and is off for the rest of the run: {reason}", markup=False)
