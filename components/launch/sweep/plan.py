"""Folder of a sweep: SWEEP/sweep.json lists its points, SWEEP/points/N.json records the last start of each."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from components.config.compose.sweep_keys import EVAL_LOSS, EarlyStop, Goal
from components.protocol.errors import ConfigError
from components.protocol.run_files import PRIVATE, atomic_write_json, own_folder, read_json, take_lock
from components.protocol.safe_json import load_json

PLAN, POINTS, SWEEP_LOCK = "sweep.json", "points", ".lock"
_LONGEST_NAME = 48
"""Maximum length of a point's name, to keep paths short."""
_LOCK_TRIES, _LOCK_PAUSE = 20, 0.05
"""Retries and their interval in seconds: `is_running` in another process holds the lock for a moment."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    number: int
    """Index from 0, in the order of the command line."""
    name: str
    """Name of its run directory in the sweep's folder, such as 2_fsdp2_tp2."""
    values: dict[str, str]
    """Values of the swept keys."""
    overrides: list[str]
    """Overrides of the point's command line, without run.dir."""
    mesh: str | None = None
    """Its mesh; None if the mesh is invalid."""
    processes: int | None = None
    """Its number of processes."""
    runs_here: bool = True
    """Whether its ranks run on this machine, and not as a job."""


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """The Optuna study of a sweep with sweep.trials, whose points are chosen one by one."""

    trials: int
    """Number of points."""
    seed: int
    """sweep.seed."""
    space: dict[str, Any]
    """Swept key -> its listed values, or the fields of its `Range`."""
    fixed: list[str]
    """The other overrides of the command line."""

    def differences(self, other: StudyPlan) -> list[str]:
        """Return the names of what differs from another plan, apart from the number of points."""
        keys = [key for key in {**self.space, **other.space} if self.space.get(key) != other.space.get(key)]
        fixed = [each for each in (*self.fixed, *other.fixed) if (each in self.fixed) != (each in other.fixed)]
        return keys + fixed + (["sweep.seed"] if self.seed != other.seed else [])


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep, as recorded in its folder."""

    directory: Path
    id: str
    """wandb group of its runs."""
    recipe: str
    file: Path
    """The recipe's file."""
    folder: Path
    """Working directory of the command; relative paths in its overrides start there."""
    command: str
    """The command line, as typed."""
    options: list[str]
    """Options passed to every point, such as --config-dir."""
    keys: list[str]
    """Swept keys, in the order of the command line."""
    points: list[Point]
    metric: str = EVAL_LOSS
    """sweep.metric."""
    goal: Goal = Goal.min
    """Whether lower or higher values of the metric are better."""
    study: StudyPlan | None = None
    """Plan of the study; None if all points are given. `points` are then those that it has chosen so far."""
    parallel: int | None = None
    """sweep.parallel."""
    early_stop: EarlyStop | None = None
    """sweep.early_stop."""

    @property
    def waits_for_jobs(self) -> bool:
        """Whether the sweep waits for the jobs of its points, instead of submitting all of them and ending."""
        return self.study is not None or self.parallel is not None or self.early_stop is not None

    def run_dir(self, point: Point) -> Path:
        """Run directory of a point."""
        return self.directory / point.name

    def log(self, point: Point) -> Path:
        """Return the log of the point's launcher and rank 0."""
        return self.directory / f"{point.name}.log"

    def write(self) -> None:
        """Write sweep.json, without `directory`, which is the folder of the file."""
        plan = asdict(self) | {"file": str(self.file), "folder": str(self.folder)}
        del plan["directory"]
        plan["points"] = [{**entry, "run_dir": entry["name"]} for entry in plan["points"]]
        atomic_write_json(self.directory / PLAN, plan)


def read_sweep(directory: Path) -> Sweep:
    """Return the sweep in a folder. Raises ConfigError if there is none."""
    folder = directory.expanduser().absolute()
    try:
        plan = load_json(folder / PLAN)
        plan["points"] = [Point(**_select_fields(Point, entry)) for entry in plan["points"]]
        plan |= {"file": Path(plan["file"]), "folder": Path(plan["folder"])}
        plan["goal"] = Goal(plan.get("goal", Goal.min))
        plan["early_stop"] = EarlyStop(plan["early_stop"]) if plan.get("early_stop") else None
        plan["study"] = StudyPlan(**plan["study"]) if plan.get("study") else None
        return Sweep(directory=folder, **_select_fields(Sweep, plan))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory}: is not the folder of a sweep: no readable {PLAN} ({error}); give outputs/sweeps/..."
        ) from error


@dataclass(frozen=True, slots=True)
class PointRecord:
    """Record of the last start of a point, as observed by the sweep."""

    started: float
    """Seconds since the epoch."""
    status: int | None = None
    """Exit status of the point's launcher, negative for a signal; None if it is running or outlived the sweep."""
    seconds: float | None = None
    """Wall time from start to exit."""
    message: str = ""
    """Last lines of its output."""
    killed_for_memory: bool = False
    """Whether the kernel's OOM killer ended a process in that time."""
    stopped_early: str = ""
    """Why the sweep has requested its stop (sweep.early_stop); empty: it has not."""


def write_record(sweep: Sweep, point: Point, record: PointRecord) -> None:
    """Write SWEEP/points/N.json."""
    values = {**asdict(record), "point": point.name}
    atomic_write_json(own_folder(sweep.directory / POINTS) / f"{point.number}.json", values, PRIVATE)


def read_record(sweep: Sweep, point: Point) -> PointRecord | None:
    """Return the record of a point's last start; None if it was never started."""
    values = read_json(sweep.directory / POINTS / f"{point.number}.json")
    return PointRecord(**_select_fields(PointRecord, values)) if values else None


def point_name(number: int, values: dict[str, str]) -> str:
    """Return the name of a point: its number and values, with characters unsuitable for file names replaced."""
    parts = [re.sub(r"[^\w.+-]+", "-", value.strip("'\""), flags=re.ASCII).strip("-.") for value in values.values()]
    return "_".join([str(number), *filter(None, parts)])[:_LONGEST_NAME].rstrip("-._")


def new_directory(recipe: str, given: str | None) -> tuple[Path, str]:
    """Choose the folder and id of a new sweep, without creating the folder.

    Raises ConfigError if the given folder is not empty.
    """
    if given is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        return Path.cwd() / "outputs" / "sweeps" / recipe / name, name
    path = Path(given).expanduser().absolute()
    if path.is_dir() and any(entry.name != SWEEP_LOCK for entry in path.iterdir()):
        is_sweep = (path / PLAN).exists()
        advice = f"continue it with scripts/sweep_report.py {given} --retry, or choose" if is_sweep else "choose"
        raise ConfigError(f"run.dir={given}: contains files, but a sweep needs a new folder; {advice} another run.dir")
    return path, f"{path.name}-{secrets.token_hex(2)}"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the sweep's lock, which the kernel releases if this process dies.

    Raises ConfigError if another process holds it, or if the folder cannot be written.
    """
    try:
        descriptor = os.open(directory / SWEEP_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{directory}: cannot be written: {why}; fix that, or choose another folder") from error
    try:
        for tries_left in reversed(range(_LOCK_TRIES)):
            if not _is_locked(descriptor):
                break
            if not tries_left:
                raise ConfigError(f"{directory}: this sweep is still running; wait for it to finish, or stop it first")
            time.sleep(_LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)


def is_running(directory: Path) -> bool:
    """Return whether a process is running the sweep."""
    try:
        descriptor = os.open(directory / SWEEP_LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return _is_locked(descriptor)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Try to take the lock; return whether another process holds it. False if the file system has no locks."""
    try:
        take_lock(descriptor)
    except OSError:
        return True
    return False


def _select_fields(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass, ignoring those of other versions."""
    return {entry.name: values[entry.name] for entry in fields(kind) if entry.name in values}
