"""trackio: a local database in TRACKIO_DIR, by default the folder `trackio` in the run directory; TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL name a server instead."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from components.config.schema.logging import TrackioConfig
from components.observability.trackers.tracker import TrackedRun, name_in_group
from components.protocol.run_files import own_folder

LOCAL = "trackio"
"""Folder of the local database in the run directory."""


class TrackioTracker:
    """A trackio run named after the run directory, whose id is stored there, so that a resumed run continues it.

    Of steps that a resumed run repeats, the first values are kept. trackio writes in a thread of its own.
    """

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._started: Any = None
        self._run: TrackedRun

    def start(self, run: TrackedRun) -> str:
        """Start the trackio run, or continue it. Raises RuntimeError if another run has its name."""
        server = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        if (
            not server
            and "TRACKIO_DIR" not in os.environ
            and (
                run.stored_id("trackio") is None or (run.directory / LOCAL).is_dir()  # earlier versions used the cache
            )
        ):
            os.environ["TRACKIO_DIR"] = str(own_folder(run.directory / LOCAL))  # read on import
        import trackio

        config, stored = self._config, run.stored_id("trackio")
        name = name_in_group(run.directory, config.group)
        self._started = trackio.init(
            project=config.project,
            name=name,
            group=config.group,
            config=run.config,
            resume="never" if stored is None else "must",
            embed=False,
            auto_log_gpu=False,  # its threads would compete with the run's
            auto_log_cpu=False,
        )
        if stored is None:
            run.store_id("trackio", self._started.id)
        elif stored != self._started.id:
            raise RuntimeError(
                f"the newest run {name} of the trackio project {config.project} is not this one; set "
                "logging.trackio.project"
            )
        # Values logged before trackio was enabled were not logged there.
        self._run = run if stored is not None else replace(run, last_logged={})
        folder = os.environ.get("TRACKIO_DIR")
        where = f"TRACKIO_DIR={shlex.quote(folder)} " if folder else ""
        command = f"{where}{shlex.join(['trackio', 'show', '--project', config.project])}"
        return server or f"{folder or 'its local database'}; open it with: {command}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at the step."""
        if new := self._run.unlogged(step, values):
            self._started.log(new, step=step)

    def finish(self, *, failed: bool) -> None:
        """Write what is pending."""
        self._started.finish()
