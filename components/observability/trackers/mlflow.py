"""MLflow: the server in MLFLOW_TRACKING_URI, or the folder `mlruns` in the run directory."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.config.schema.logging import MlflowConfig
from components.config.stored_run import flat_config
from components.observability.trackers.tracker import TrackedRun
from components.protocol.run_files import own_folder

_FOLDER = "mlruns"
"""Folder of the local store."""
LONGEST_VALUE = 5000
"""Maximum length of a parameter's or tag's value in characters; servers accept 5,000 or 6,000."""
BATCH = 100
"""Maximum number of parameters per request."""
DEFAULTS = {
    # A server that does not answer would block rank 0 for four minutes, and with it all ranks.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # MLflow rejects folders otherwise. SQLite, its other local store, needs more packages and file locks.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables of MLflow, unless the user sets them."""


class MlflowTracker:
    """An MLflow run whose id is stored in the run directory, so that a resumed run continues it.

    The keys of the frozen config are its parameters. MLflow cannot change a parameter or a value of a metric: a
    parameter that a resume changed is added as a tag, and of repeated steps the first values are kept.
    """

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._id = ""
        self._run: TrackedRun

    def start(self, run: TrackedRun) -> str:
        """Start the MLflow run, or continue it. Raises if the store does not contain the stored id."""
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        stored, folder = run.stored_id("mlflow"), run.directory / _FOLDER
        if stored is not None and not folder.exists() and Path(_FOLDER).is_dir():
            folder = Path.cwd() / _FOLDER  # where earlier versions stored the run
        server = os.environ.get("MLFLOW_TRACKING_URI")
        uri = server or own_folder(folder).as_uri()
        # Unlike mlflow.start_run, the client records no user, git state or URL of the repository.
        self._client = client = MlflowClient(tracking_uri=uri)
        if stored is None:
            # Values logged so far were not logged here.
            self._run = replace(run, last_logged={})
            tags = {"mlflow.note.content": str(run.directory)}
            if self._config.group:
                tags["group"] = self._config.group
            created = client.create_run(self._experiment(), run_name=run.directory.name, tags=tags)
            self._id = created.info.run_id
            run.store_id("mlflow", self._id)
        else:
            self._run, self._id = run, stored
            client.update_run(stored, status="RUNNING")
        self._log_config(run.config)
        command = shlex.join(["mlflow", "ui", "--backend-store-uri", str(folder)])
        return server or f"{folder}; open it with: MLFLOW_ALLOW_FILE_STORE=true {command}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at the step."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        new = self._run.unlogged(step, values)
        self._client.log_batch(self._id, metrics=[Metric(name, float(value), now, step) for name, value in new.items()])

    def finish(self, *, failed: bool) -> None:
        """Set the status of the MLflow run."""
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")

    def _experiment(self) -> str:
        """Return the id of the experiment, which is created if it does not exist."""
        found = self._client.get_experiment_by_name(self._config.project)
        return found.experiment_id if found is not None else self._client.create_experiment(self._config.project)

    def _log_config(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._id).data.params
        values = {key: text[:LONGEST_VALUE] for key, text in flat_config(config)}
        new = [Param(key, value) for key, value in values.items() if key not in known]
        for start in range(0, len(new), BATCH):
            self._client.log_batch(self._id, params=new[start : start + BATCH])
        changed = [RunTag(key, value) for key, value in values.items() if known.get(key, value) != value]
        if changed:
            self._client.log_batch(self._id, tags=changed)
