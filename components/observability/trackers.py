"""Trackers (Weights & Biases, MLflow, TensorBoard, trackio): one interface, and a guard that disables one that fails.

trackio: a local database in TRACKIO_DIR, by default the folder `trackio` in the run directory; TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL name a server instead.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from components.config.schema.run import LoggingConfig, MlflowConfig, TrackioConfig, WandbConfig, WandbMode
from components.config.stored_run import MetricsLog, flat_config
from components.protocol.run_files import atomic_write_json, current_config, keep_only_file, own_folder, read_json
from components.protocol.safe_parsing import load_yaml
from components.protocol.secrets import masked

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_IDS = "trackers.json"
"""File of the run directory that maps a tracker to its id of this run, by which a resumed run is found again."""
logger = logging.getLogger(__name__)
_MLFLOW_FOLDER = "mlruns"
"""Folder of the local store."""
_MLFLOW_VALUE = 5000
"""Maximum length of a parameter's or tag's value in characters; servers accept 5,000 or 6,000."""
_MLFLOW_BATCH = 100
"""Maximum number of parameters per request."""
_MLFLOW_DEFAULTS = {
    # A server that does not answer would block rank 0 for four minutes, and with it all ranks.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # MLflow rejects folders otherwise. SQLite, its other local store, needs more packages and file locks.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables of MLflow, unless the user sets them."""
_TENSORBOARD_FOLDER = "tensorboard"
"""Folder of the event files in the run directory."""
_TRACKIO_FOLDER = "trackio"
"""Folder of the local database in the run directory."""


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
        stored = read_json(self.directory / _IDS).get(tracker)
        return stored if isinstance(stored, str) else None

    def store_id(self, tracker: str, run_id: str) -> None:
        """Store a tracker's id of this run for later attempts."""
        keep_only_file(self.directory / _IDS)
        atomic_write_json(self.directory / _IDS, {**read_json(self.directory / _IDS), tracker: run_id})

    def unlogged(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values that no earlier attempt logged: a resumed run repeats the steps after its checkpoint."""
        return {key: value for key, value in values.items() if step > self.last_logged.get(key, -1)}


def _name_in_group(directory: Path, group: str | None) -> str:
    """Return the name of a run directory, prefixed with the group, since those of every sweep are named 0_..., 1_..."""
    return f"{group}-{directory.name}" if group else directory.name


def enabled_trackers(config: LoggingConfig) -> dict[str, Tracker]:
    """Return the enabled trackers by name. None has imported its package yet."""
    trackers: dict[str, Tracker] = {}
    if config.wandb.mode is not WandbMode.disabled:
        trackers["wandb"] = WandbTracker(config.wandb)
    if config.tensorboard:
        trackers["TensorBoard"] = _TensorBoardTracker()
    if config.mlflow.enabled:
        trackers["MLflow"] = _MlflowTracker(config.mlflow)
    if config.trackio.enabled:
        trackers["trackio"] = _TrackioTracker(config.trackio)
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


class WandbTracker:
    """A wandb run whose id is stored in the run directory, so that a resumed run continues its curve.

    wandb keeps the first values of steps that a resumed run repeats.
    """

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        """Start the wandb run, or continue it."""
        import wandb

        config = self._config
        run_id = run.stored_id("wandb")
        if run_id is None:
            # The name alone would merge runs of directories with the same name, and wandb rejects these characters.
            name = re.sub(r"[/\\#?%:\s]", "-", _name_in_group(run.directory, config.group))
            run_id = f"{name[-80:]}-{secrets.token_hex(4)}"
            run.store_id("wandb", run_id)
        # Private, because wandb's files contain the host, the command and the environment.
        own_folder(run.directory / "wandb", 0o700)
        self._run = wandb.init(
            # save_code would upload the recipe and all uncommitted changes, including any secrets in them.
            settings=wandb.Settings(silent=True, console="off", save_code=False),
            dir=str(run.directory),
            id=run_id,
            name=run.directory.name,
            resume="allow",
            mode=config.mode.value,
            project=config.project,
            entity=config.entity,
            tags=config.tags,
            group=config.group,
            config=run.config,
        )
        if config.mode is not WandbMode.offline and self._run.url:  # wandb warns if it is read offline
            return str(self._run.url)
        folder = Path(self._run.dir).parent  # of this attempt
        return f"{folder}; upload it with: wandb sync {shlex.quote(str(folder))}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at the step."""
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        """Finish the wandb run."""
        self._run.finish(exit_code=int(failed))


class _MlflowTracker:
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
        for name, value in _MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        stored, folder = run.stored_id("mlflow"), run.directory / _MLFLOW_FOLDER
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
        experiment = self._client.get_experiment_by_name(self._config.project)
        return (
            experiment.experiment_id if experiment is not None else self._client.create_experiment(self._config.project)
        )

    def _log_config(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._id).data.params
        values = {key: text[:_MLFLOW_VALUE] for key, text in flat_config(config)}
        new = [Param(key, value) for key, value in values.items() if key not in known]
        for start in range(0, len(new), _MLFLOW_BATCH):
            self._client.log_batch(self._id, params=new[start : start + _MLFLOW_BATCH])
        changed = [RunTag(key, value) for key, value in values.items() if known.get(key, value) != value]
        if changed:
            self._client.log_batch(self._id, tags=changed)


class _TensorBoardTracker:
    """A scalar per metric, rounded to float32, and the frozen config as the text `config`."""

    def __init__(self) -> None:
        self._run: TrackedRun
        self._writer: SummaryWriter | None = None

    def start(self, run: TrackedRun) -> str:
        """Import TensorBoard."""
        import torch.utils.tensorboard  # noqa: F401  (imports the tensorboard package)

        self._run = run
        folder = run.directory / _TENSORBOARD_FOLDER
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

        folder = own_folder(self._run.directory / _TENSORBOARD_FOLDER)
        self._writer = writer = SummaryWriter(str(folder), purge_step=step)
        writer.add_text("config", f"```yaml\n{self._run.config_text}```", step)
        return writer


class _TrackioTracker:
    """A trackio run named after the run directory, whose id is stored there, so that a resumed run continues it.

    Of steps that a resumed run repeats, the first values are kept. trackio writes in a thread of its own.
    """

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._started: Any = None
        self._run: TrackedRun

    def start(self, run: TrackedRun) -> str:
        """Start the trackio run, or continue it. Raises RuntimeError if another run has its name."""
        variables, folder = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_DIR"), run.directory / _TRACKIO_FOLDER
        if not any(map(os.environ.get, variables)):
            os.environ["TRACKIO_DIR"] = str(own_folder(folder))  # read when trackio is imported
        # trackio looks into the loaded matplotlib at each value, and drops the value while another thread imports it.
        with suppress(ImportError):
            import matplotlib.figure  # noqa: F401
        import trackio

        config, stored = self._config, run.stored_id("trackio")
        name = _name_in_group(run.directory, config.group)
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
