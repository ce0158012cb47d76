"""`logging`: console output, loss plot, profiler traces and trackers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from components.config.schema.checks import above, at_least, raise_all


class WandbMode(StrEnum):
    """disabled: do not import wandb; offline: write local files only, needs no account; online: upload."""

    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases. Errors of wandb never stop a run."""

    mode: WandbMode = WandbMode.disabled
    """disabled, offline (local files, no account) or online (upload)."""
    project: str = "meshbook"
    """wandb project."""
    entity: str | None = None
    """wandb team or user; null: the account's default."""
    tags: list[str] = field(default_factory=list)
    """wandb tags of the run."""
    group: str | None = None
    """wandb group that the run is shown in; a sweep sets it for its runs. null: none."""


@dataclass(kw_only=True, slots=True)
class MlflowConfig:
    """MLflow (extra `mlflow`): the server in MLFLOW_TRACKING_URI, or the folder `mlruns` in the run directory.
    Errors of MLflow never stop a run."""

    enabled: bool = False
    """Track the run with MLflow."""
    project: str = "meshbook"
    """MLflow experiment."""
    group: str | None = None
    """Value of the MLflow tag `group`; a sweep sets it for its runs. null: none."""


@dataclass(kw_only=True, slots=True)
class TrackioConfig:
    """trackio (extra `trackio`): a local database in TRACKIO_DIR, by default in the run directory. Its errors never
    stop a run."""

    enabled: bool = False
    """Track the run with trackio."""
    project: str = "meshbook"
    """trackio project."""
    group: str | None = None
    """trackio group that the run is shown in; a sweep sets it for its runs. null: none."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """torch.profiler traces of some optimizer steps, written to RUN_DIR/profile/; no overhead unless enabled."""

    enabled: bool = False
    """Record traces."""
    start: int = 10
    """First step to record, at least 1, counted from the start or resume of the run; the very first steps include
    setup."""
    steps: int = 3
    """Number of steps to record, at least 1."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record a trace."""
    memory: bool = False
    """Also record memory allocations."""
    stacks: bool = False
    """Also record the Python stack of each operation; slower."""

    def __post_init__(self) -> None:
        problems = [
            *at_least("logging.profile.start", self.start, 1),
            *at_least("logging.profile.steps", self.steps, 1),
        ]
        for rank in self.ranks:
            problems += at_least("logging.profile.ranks", rank, 0)
        if self.enabled and not self.ranks:
            problems.append("logging.profile.ranks=[]: no rank would record; set it to a list of ranks, such as [0]")
        raise_all(problems)


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """Console output, loss plot, profiler traces and trackers."""

    comm: bool = False
    """Record the collectives of the second optimizer step on rank 0 and print them by process group and operation:
    number of calls and MiB."""
    examples: int = 2
    """Number of decoded training examples to print at the start, with their loss mask; 0: none."""
    progress: bool = True
    """Show a progress bar on rank 0 if the output is a terminal; otherwise plain lines are printed."""
    quiet: bool = False
    """Print only the run directory and the launcher's notes at the start, the summary at the end, and errors;
    `--quiet` on the command line sets it. metrics.jsonl has every number."""
    plot: bool = True
    """Write RUN_DIR/loss.png at the end; if the optional dependency `plot` is not installed, skip it with a message."""
    peak_tflops: float | None = None
    """Peak throughput of one device in TFLOP/s for the compute dtype, to compute the MFU, greater than 0; null: from a
    table of common GPUs."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Profiler traces of some steps."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard event files to RUN_DIR/tensorboard/ (extra `tensorboard`)."""
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    """MLflow."""
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    """trackio."""

    def __post_init__(self) -> None:
        problems = at_least("logging.examples", self.examples, 0)
        if self.peak_tflops is not None:
            problems += above("logging.peak_tflops", self.peak_tflops, 0)
        raise_all(problems)


def trackers_without_group(logging: LoggingConfig) -> list[str]:
    """Return the keys of the enabled trackers that show runs in groups and have none."""
    enabled = {
        "logging.wandb": logging.wandb.mode is not WandbMode.disabled and logging.wandb.group is None,
        "logging.mlflow": logging.mlflow.enabled and logging.mlflow.group is None,
        "logging.trackio": logging.trackio.enabled and logging.trackio.group is None,
    }
    return [key for key, has_none in enabled.items() if has_none]
