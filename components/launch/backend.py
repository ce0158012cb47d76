"""The interface between a checked run and what runs it: this machine, or a cluster's scheduler.

A new backend is a schema in components/config, a folder here, and a branch of `clusters.backend_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from components.config.schema.recipes import RecipeConfig
from components.launch.run_directory.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Recipe:
    """A decorated main."""

    name: str
    main: Callable[[Any], object]
    schema: type[RecipeConfig]
    file: Path


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run that passed every check and whose run directory is locked and frozen."""

    recipe: Recipe
    cfg: RecipeConfig
    directory: RunDirectory
    processes: int
    notes: list[str] = field(default_factory=list)
    """What the checks report besides problems."""


class JobState(StrEnum):
    """State of a job, in the words of a sweep's table."""

    submitted = "submitted"
    running = "running"
    ended = "ended"
    timeout = "timeout"
    oom = "oom"
    cancelled = "cancelled"
    preempted = "preempted"
    failed = "failed"
    gone = "gone"
    """The cluster no longer lists the job: it ended long ago."""
    unknown = "unknown"
    """The cluster does not answer."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as its cluster reports it."""

    id: str
    cluster: str
    """Name of the scheduler, for messages."""
    state: JobState
    reported: str
    """State in the scheduler's own terms."""
    over: bool
    """Whether the job will not run any more."""
    doubt: str = ""
    """Why the state is unknown."""


class Backend(Protocol):
    """What starts a run and answers for its job."""

    runs_here: bool
    """Whether ranks are processes of this machine that end with the launcher."""

    def validate(
        self, cfg: RecipeConfig, processes: int, refused: Collection[str], *, quick: bool = False
    ) -> tuple[list[str], list[str]]:
        """Return the problems that only this backend has with a run, and notes for the user.

        Args:
            cfg: The run.
            processes: Its number of ranks.
            refused: Keys and sections rejected before, whose values in `cfg` are not what the user wanted.
            quick: Check only what takes milliseconds. Sweeps do, and leave the rest to the launcher of each point.
        """

    def show(self, recipe: Recipe, cfg: RecipeConfig, processes: int, notes: list[str]) -> None:
        """Print what `submit` would start (cluster.dry_run)."""

    def submit(self, run: CheckedRun, run_here: Callable[[], int]) -> int:
        """Run or submit a run, and return the exit status of the launcher.

        Args:
            run: What to start.
            run_here: Runs main in this process as the only rank and returns its exit status.

        Raises ConfigError if it cannot be submitted; a new run directory is then removed again.
        """

    def job(self, run_dir: Path, *, search: bool = False) -> str | None:
        """Return the id of the job submitted for a run directory, None if this backend submitted none.

        Args:
            run_dir: The run directory.
            search: Ask the cluster for a submission whose answer was lost, and record its job. Raises ConfigError if
                the cluster does not answer.
        """

    def state(self, jobs: Iterable[str]) -> dict[str, Job]:
        """Return the jobs with these ids, in as few queries as possible; ids of other backends are left out."""

    def stop(self, job: str) -> bool:
        """Cancel a job, and return whether the cluster accepted that."""

    def stop_command(self, job: str) -> str | None:
        """Return the command with which the user cancels a job; None for an id of another backend."""
