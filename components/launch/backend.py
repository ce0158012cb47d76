"""Interface of a backend, which starts a checked run on this machine or through a cluster's scheduler.

Also the record, in a run directory, of the job that was submitted for it. `job.scheduler.Scheduler` is the backend of a
scheduler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from components.config.schema.recipes import RecipeConfig
from components.launch.recipe import Recipe
from components.launch.run_directory import RunDirectory
from components.protocol.errors import ConfigError
from components.protocol.run_files import JOB_ID, SUBMISSION, atomic_write
from components.protocol.safe_parsing import read_regular
from components.terminal import fit, print_text


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run that passed every check, with its run directory locked and its config frozen."""

    recipe: Recipe
    cfg: RecipeConfig
    directory: RunDirectory
    processes: int
    notes: list[str] = field(default_factory=list)
    """Informational messages of the checks."""
    node_counts: list[int] = field(default_factory=list)
    """Numbers of nodes in cluster.nodes on which the run can train, in order; an attempt uses the largest that its job
    has."""


class JobState(StrEnum):
    """State of a job, independent of the scheduler; shown in a sweep's table."""

    submitted = "submitted"
    running = "running"
    ended = "ended"
    timeout = "timeout"
    oom = "oom"
    cancelled = "cancelled"
    preempted = "preempted"
    failed = "failed"
    gone = "gone"
    """The scheduler no longer lists the job: it ended long ago."""
    unknown = "unknown"
    """The scheduler does not respond."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as reported by its scheduler."""

    id: str
    cluster: str
    """Name of the scheduler, for messages."""
    state: JobState
    reported: str
    """State as named by the scheduler."""
    over: bool
    """Whether the job has ended for good."""
    doubt: str = ""
    """Why the state is unknown."""


class Backend(Protocol):
    """Starts runs."""

    runs_here: bool
    """Whether ranks are local processes that end with the launcher."""

    def validate(
        self, cfg: RecipeConfig, processes: int, rejected: Collection[str], *, quick: bool = False
    ) -> tuple[list[str], list[str]]:
        """Return the problems specific to this backend, and notes for the user.

        Args:
            cfg: Config of the run.
            processes: Number of ranks.
            rejected: Keys and sections already rejected; their values in `cfg` are not the user's.
            quick: Skip checks that take longer than milliseconds. Sweeps leave those to the launcher of each point.
        """

    def show(self, run: CheckedRun) -> None:
        """Print what `submit` would start (cluster.dry_run). The run directory does not exist, or is not locked."""

    def submit(self, run: CheckedRun, run_here: Callable[[], int]) -> int:
        """Start or submit a run, and return the exit status of the launcher.

        Args:
            run: The run.
            run_here: Runs main in this process as the only rank, and returns its exit status.

        Raises ConfigError if submission fails, after removing a newly created run directory.
        """


def recorded_job(run_dir: Path) -> str | None:
    """Return the recorded job id of a run directory; None if there is none."""
    try:
        return read_regular(run_dir / JOB_ID).decode(errors="replace").strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{run_dir / JOB_ID}: the id of the run's job cannot be read: {error.strerror}") from error


def print_job(run: CheckedRun, text: str, use: str) -> None:
    """Print what a submission passes to the scheduler, and its `use`, for cluster.dry_run.

    With `render` stdout has the bytes of the file and nothing else, so that it can be redirected.
    """
    mode = run.cfg.cluster.dry_run
    print_text(text, end="", flush=True)
    if not run.cfg.cluster.only_renders:
        print_text(*(f"# {line}" for line in (f"cluster.dry_run={mode}: would {use}", *run.notes)), sep="\n")
        return
    new = "" if run.cfg.run.dir else f"; {run.directory.path.name} is replaced by the name of a new folder"
    notes = [f"- {note}" for note in sorted(run.notes, key=lambda note: note.startswith("not checked"))]
    first = f"cluster.dry_run={mode}: nothing was submitted or written. Without it this command would {use}{new}"
    print_text(*map(fit, [first, *notes]), sep="\n", file=sys.stderr)


def record_job(run_dir: Path, job: str) -> None:
    """Record the job id of a run directory, which confirms its submission."""
    atomic_write(run_dir / JOB_ID, f"{job}\n")
    (run_dir / SUBMISSION).unlink(missing_ok=True)
