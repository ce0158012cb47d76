"""The folder of a sweep: SWEEP/sweep.json (its points), SWEEP/points/N.json (how the last start of each ended)."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from components.config.errors import ConfigError
from components.protocol.run_files import PRIVATE, atomic_write_json, read_json, take_lock

PLAN, NOTES, SWEEP_LOCK = "sweep.json", "points", ".lock"
LONGEST_NAME = 48
"""Characters of a point's name, so that paths stay short."""
_LOCK_TRIES, _LOCK_PAUSE = 20, 0.05
"""A look whether a sweep is running holds the lock for a moment."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    number: int
    """Counted from 0, in the order of the command line."""
    name: str
    """Of its run directory in the sweep's folder, such as 2_fsdp2_tp2."""
    values: dict[str, str]
    """Of the swept keys."""
    overrides: list[str]
    """The point's own command line, without run.dir."""
    mesh: str | None = None
    """Its mesh; None if the mesh is invalid."""
    processes: int | None = None
    """Its number of processes."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that was started once."""

    directory: Path
    id: str
    """Group of its runs in wandb."""
    recipe: str
    file: Path
    """The recipe's file."""
    folder: Path
    """Working directory of the command; relative paths in its overrides start there."""
    command: str
    """As typed."""
    options: list[str]
    """Hydra's options that every point needs."""
    keys: list[str]
    """Swept keys, in the order of the command line."""
    points: list[Point]

    def run_dir(self, point: Point) -> Path:
        """Run directory of a point."""
        return self.directory / point.name

    def log(self, point: Point) -> Path:
        """Return the log of the point's launcher and rank 0."""
        return self.directory / f"{point.name}.log"

    def write(self) -> None:
        """Write sweep.json: all but `directory`, which is wherever the file is."""
        plan = asdict(self) | {"file": str(self.file), "folder": str(self.folder)}
        del plan["directory"]
        plan["points"] = [{**entry, "run_dir": entry["name"]} for entry in plan["points"]]
        atomic_write_json(self.directory / PLAN, plan)


def read_sweep(directory: Path) -> Sweep:
    """Return the sweep in a folder. Raises ConfigError where there is none."""
    place = directory.expanduser().absolute()
    try:
        plan = json.loads((place / PLAN).read_text())
        plan["points"] = [Point(**_known(Point, entry)) for entry in plan["points"]]
        plan |= {"file": Path(plan["file"]), "folder": Path(plan["folder"])}
        return Sweep(directory=place, **_known(Sweep, plan))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory}: is not the folder of a sweep: no {PLAN} that can be read ({error}); give outputs/sweeps/..."
        ) from error


@dataclass(frozen=True, slots=True)
class Note:
    """The last start of a point, as the sweep saw it."""

    started: float
    """Seconds since the epoch."""
    status: int | None = None
    """Exit status of the point's launcher, negative for a signal; None: it has not ended, or the sweep ended first."""
    seconds: float | None = None
    """From its start to its end."""
    message: str = ""
    """The last lines of its output."""
    killed_for_memory: bool = False
    """Whether the kernel killed a process for memory meanwhile."""


def write_note(sweep: Sweep, point: Point, note: Note) -> None:
    """Write SWEEP/points/N.json."""
    (sweep.directory / NOTES).mkdir(exist_ok=True)
    values = {**asdict(note), "point": point.name}
    atomic_write_json(sweep.directory / NOTES / f"{point.number}.json", values, PRIVATE)


def read_note(sweep: Sweep, point: Point) -> Note | None:
    """Return the note of a point; None where it was never started."""
    values = read_json(sweep.directory / NOTES / f"{point.number}.json")
    return Note(**_known(Note, values)) if values else None


def point_name(number: int, values: dict[str, str]) -> str:
    """Return the name of a point: its number and its values, with nothing that a file's name should not have."""
    words = [re.sub(r"[^\w.+-]+", "-", value.strip("'\""), flags=re.ASCII).strip("-.") for value in values.values()]
    return "_".join([str(number), *filter(None, words)])[:LONGEST_NAME].rstrip("-._")


def new_directory(recipe: str, given: str | None) -> tuple[Path, str]:
    """Choose the folder of a new sweep, and its id; nothing is made yet.

    Raises ConfigError where the given folder holds something.
    """
    if given is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        return Path.cwd() / "outputs" / "sweeps" / recipe / name, name
    path = Path(given).expanduser().absolute()
    if path.is_dir() and any(path.iterdir()):
        advice = f"continue it with scripts/sweep_report.py {given} --retry, or choose" if _is_sweep(path) else "choose"
        raise ConfigError(f"run.dir={given}: holds files, and a sweep needs a new folder; {advice} another run.dir")
    return path, f"{path.name}-{secrets.token_hex(2)}"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the sweep's lock, which ends with this process.

    Raises ConfigError where another process holds it, and where the folder cannot be written.
    """
    try:
        descriptor = os.open(directory / SWEEP_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{directory}: cannot be written: {why}; mend that, or start a sweep elsewhere") from error
    try:
        for left in reversed(range(_LOCK_TRIES)):
            if not _is_locked(descriptor):
                break
            if not left:
                raise ConfigError(f"{directory}: this sweep is still running; wait for it, or stop it first")
            time.sleep(_LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)


def is_running(directory: Path) -> bool:
    """Whether a process works on the sweep at this moment."""
    try:
        descriptor = os.open(directory / SWEEP_LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return _is_locked(descriptor)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Whether another process holds the lock; otherwise this one does, where the file system has locks."""
    try:
        take_lock(descriptor)
    except OSError:
        return True
    return False


def _is_sweep(path: Path) -> bool:
    return (path / PLAN).exists()


def _known(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    return {entry.name: values[entry.name] for entry in fields(kind) if entry.name in values}
