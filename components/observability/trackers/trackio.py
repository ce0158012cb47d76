"""trackio: a local database in TRACKIO_DIR, by default the folder `trackio` in the run directory; TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL name a server instead."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from components.config.schema.logging import TrackioConfig
from components.observability.trackers.tracker import TrackedRun, name_in_group
from components.protocol.run_files import own_folder

_FOLDER = "trackio"
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
        variables, folder = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_DIR"), run.directory / _FOLDER
        # Earlier versions used trackio's cache. The variable is read on import.
        if not any(map(os.environ.get, variables)) and (run.stored_id("trackio") is None or folder.is_dir()):
            os.environ["TRACKIO_DIR"] = str(own_folder(folder))
        # trackio looks into the loaded matplotlib at each value, and drops the value while another thread imports it.
        with suppress(ImportError):
            import matplotlib.figure  # noqa: F401
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
        *servers, database = map(os.environ.get, variables)
        where = f"TRACKIO_DIR={shlex.quote(database)} " if database else ""
        command = f"{where}{shlex.join(['trackio', 'show', '--project', config.project])}"
        return next(filter(None, servers), None) or f"{database or 'its local database'}; open it with: {command}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at the step."""
        if new := self._run.unlogged(step, values):
            self._started.log(new, step=step)

    def finish(self, *, failed: bool) -> None:
        """Write what is pending."""
        self._started.finish()
