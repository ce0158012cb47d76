"""The interface of trackers, and what they are given about the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from components.config.metrics_log import MetricsLog
from components.config.safe_yaml import load_yaml
from components.protocol.run_files import atomic_write_json, current_config, keep_only_file, read_json

IDS = "trackers.json"
"""File of the run directory that maps a tracker to its id of this run, by which a resumed run is found again."""


class Tracker(Protocol):
    """One service that shows a run's metrics. Any method may raise; the caller then stops using the tracker."""

    def start(self, run: TrackedRun) -> str | None:
        """Import the tracker's package, and start the run or continue that of an earlier attempt.

        Return where the run is stored and how to open it, for the console.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one line of metrics.jsonl, without its step."""

    def finish(self, *, failed: bool) -> None:
        """Send what is pending, and mark the run as finished or failed."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run, as trackers see it."""

    directory: Path
    """The run directory, absolute."""
    config: dict[str, Any] = field(default_factory=dict)
    """The frozen config. It contains no secrets: validation rejects a config that does."""
    last_logged: dict[str, int] = field(default_factory=dict)
    """Last step of each metric in metrics.jsonl at the start of this attempt; empty for a new run."""

    @classmethod
    def read(cls, run_dir: str) -> TrackedRun:
        """Return the run in a run directory."""
        folder = Path(run_dir).resolve()
        file = current_config(folder)
        config = load_yaml(file.read_text("utf-8")) if file.is_file() else {}
        last = {key: line["step"] for line in MetricsLog(folder).read() for key in line if key != "step"}
        return cls(folder, config, last)

    @property
    def config_text(self) -> str:
        """The frozen config as YAML text."""
        file = current_config(self.directory)
        return file.read_text("utf-8") if file.is_file() else ""

    def stored_id(self, tracker: str) -> str | None:
        """Return a tracker's id of this run, stored by an earlier attempt; None if it has none."""
        found = read_json(self.directory / IDS).get(tracker)
        return found if isinstance(found, str) else None

    def store_id(self, tracker: str, run_id: str) -> None:
        """Store a tracker's id of this run for later attempts."""
        keep_only_file(self.directory / IDS)
        atomic_write_json(self.directory / IDS, {**read_json(self.directory / IDS), tracker: run_id})

    def unlogged(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values that no earlier attempt logged: a resumed run repeats the steps after its checkpoint."""
        return {key: value for key, value in values.items() if step > self.last_logged.get(key, -1)}


def name_in_group(directory: Path, group: str | None) -> str:
    """Return the name of a run directory, prefixed with the group, since those of every sweep are named 0_..., 1_..."""
    return f"{group}-{directory.name}" if group else directory.name
