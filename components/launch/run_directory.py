"""The run directory: chosen once by the launching process, guarded against other runs, locked while it runs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config.compose.frozen import read_frozen, to_yaml
from components.config.errors import ConfigError
from components.config.schema.recipes import RecipeConfig
from components.config.schema.run import CONFIG
from components.launch.changes import check_changes, check_source
from components.launch.files import aside, read_json, take_lock, write_json, write_text
from components.launch.folders import check_writable, make, make_new, told_by_path
from components.launch.slurm.jobs import ENDED, GONE, UNKNOWN, job_states

RECORD, RESULT, LOGS, LOCK = "environment.json", "result.json", "logs", ".lock"
CODE, SCRIPT, JOB_ID, REQUEUE = "code", "job.sbatch", "job_id", "requeue"
"""Of a Slurm job: its copy of the code, its batch script, its number, and the wish to be started again."""
OWN_NAMES = {CONFIG, RECORD, RESULT, LOGS, LOCK, CODE, SCRIPT, JOB_ID}
"""What a start writes before the recipe does anything."""


@dataclass
class RunDirectory:
    """The directory of one attempt of a run."""

    path: Path
    fresh: bool
    """Whether it was new or empty: what is in it then comes from this attempt."""
    created: list[Path]
    """Folders that this start made, outermost first."""
    lock: int | None
    """Descriptor that holds the lock for as long as this process lives."""
    attempt: int
    """How often the run was started before."""

    @property
    def logs(self) -> Path:
        """Logs of this attempt."""
        return attempt_logs(self.path, self.attempt)

    def freeze(self, cfg: RecipeConfig, record: dict[str, Any]) -> None:
        """Write what every rank reads (config.yaml) and where it came from (environment.json).

        What the attempt before left of the two, and its result.json, goes to its logs. Raises ConfigError where the
        disk does not take them.
        """
        try:
            self._freeze(cfg, record)
        except OSError as error:
            why = f"{error.strerror or error}{_free(self.path)}"
            raise ConfigError(f"run.dir={self.path}: cannot be written: {why}; make room, or choose another") from error

    def _freeze(self, cfg: RecipeConfig, record: dict[str, Any]) -> None:
        if self.attempt > 0:
            before = attempt_logs(self.path, self.attempt - 1)
            before.mkdir(parents=True, exist_ok=True)
            for name in (CONFIG, RECORD):
                if (self.path / name).exists():
                    shutil.copyfile(self.path / name, before / name)
            if (self.path / RESULT).exists():
                (self.path / RESULT).replace(before / RESULT)
        (self.path / REQUEUE).unlink(missing_ok=True)
        write_text(self.path / CONFIG, to_yaml(cfg))
        write_json(self.path / RECORD, record)
        self.logs.mkdir(parents=True)
        link = self.path / LOGS / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(self.logs.name)
        link.replace(self.path / LOGS / "latest")

    def conclude(self, status: str, error: str) -> None:
        """Write result.json, unless the recipe has written one; say so where the disk does not take it."""
        if (self.path / RESULT).exists():
            return
        try:
            write_result(self.path, {"status": status, "error": error})
        except OSError as refused:
            why = f"{refused.strerror or refused}{_free(self.path)}"
            print(f"{self.path / RESULT} could not be written: {why}", file=sys.stderr, flush=True)

    def discard(self, error: str) -> None:
        """Take back a run that was refused: leave nothing behind, unless there is more than what a start writes."""
        entries = list(self.path.iterdir()) if self.path.is_dir() else []
        if not self.fresh or any(entry.name not in OWN_NAMES and _has_content(entry) for entry in entries):
            self.conclude("invalid", error)
            return
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        for folder in reversed(self.created):
            with suppress(OSError):  # somebody else has put something there meanwhile
                folder.rmdir()


def write_result(run_dir: Path, values: dict[str, Any]) -> None:
    """Write result.json for a run whose recipe has not come to do so."""
    write_json(run_dir / RESULT, values)


def read_result(run_dir: Path) -> dict[str, Any]:
    """Return result.json; empty where there is none yet."""
    result = run_dir / RESULT
    return json.loads(result.read_text()) if result.exists() else {}


def job_of(run_dir: Path) -> str | None:
    """Return the number of the job that was submitted for a directory; None where there was none."""
    file = run_dir / JOB_ID
    return file.read_text().strip() or None if file.exists() else None


def attempt_logs(run_dir: Path, attempt: int) -> Path:
    """Return the folder of the logs of an attempt."""
    return run_dir / LOGS / f"attempt_{attempt}"


def open_run_directory(cfg: RecipeConfig, recipe: str) -> RunDirectory:
    """Choose, make, lock and guard the run directory of `cfg`, and set cfg.run.dir to it (absolute).

    Raises ConfigError where it holds another run, is in use, or cannot be written; it then made nothing.
    """
    check_source(cfg)
    path = _place(cfg, recipe)
    with told_by_path(path):
        path, created = (path, make(path)) if cfg.run.dir is not None else make_new(path)
        names = _names(path)
        lock = _lock(path)
    if CONFIG in names:
        try:
            _guard(path, cfg, recipe)
        except ConfigError:
            _unlock(lock)
            raise
    cfg.run.dir = str(path)
    return RunDirectory(path, fresh=not names, created=created, lock=lock, attempt=_next_attempt(path))


def check_run_directory(cfg: RecipeConfig, recipe: str) -> None:
    """Raise ConfigError where `open_run_directory` would, as far as that can be told without making anything."""
    check_source(cfg)
    path = _place(cfg, recipe)
    with told_by_path(path):
        check_writable(path)
        names = _names(path) if cfg.run.dir is not None and path.is_dir() else set()
        if (path / LOCK).exists():
            _unlock(_lock(path))
    if CONFIG in names:
        _guard(path, cfg, recipe)


def _place(cfg: RecipeConfig, recipe: str) -> Path:
    """The run directory, or where a new one is to be made."""
    if cfg.run.dir is None:
        return Path.cwd() / "outputs" / recipe
    return Path(os.path.expanduser(cfg.run.dir)).absolute()


def _names(path: Path) -> set[str]:
    """What a run directory holds. Raises ConfigError where that is no run."""
    names = {entry.name for entry in path.iterdir()} - {LOCK, aside(path / CONFIG).name}
    if names and CONFIG not in names:
        raise ConfigError(f"run.dir={path}: holds files, but no run; choose another run.dir")
    return names


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep every start out of a run directory while something in it is changed by hand.

    Raises ConfigError while a run uses it, or a job that has not ended (or that nobody here can ask for) owns it.
    """
    mend = "wait for its end"
    lock = _lock(path, mend)
    try:
        if lock is None and not (path / RESULT).exists():
            raise ConfigError(f"run.dir={path}: nothing tells here whether its run has ended: no locks, no {RESULT}")
        if doubt := _refuse_live_job(path, mend):
            raise ConfigError(
                f"run.dir={path}: {doubt}; try again from a login node of its cluster, or remove {path / JOB_ID} if it "
                "has ended"
            )
        yield
    finally:
        _unlock(lock)


def _next_attempt(path: Path) -> int:
    numbers = [folder.name.rpartition("_")[2] for folder in (path / LOGS).glob("attempt_*")]
    return max((int(number) for number in numbers if number.isdigit()), default=-1) + 1


def _lock(path: Path, mend: str = "choose another run.dir") -> int | None:
    """Lock the directory for the life of this process; None where its file system has no locks."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        has_locks = take_lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"run.dir={path}: is in use by a run that is still going; {mend}") from error
    if not has_locks:
        os.close(descriptor)
        print(f"{path}: no locks on this file system; do not start this run twice at once", file=sys.stderr)
        return None
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        raise ConfigError(f"run.dir={path}: was removed at this moment by another start; start again")
    return descriptor


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _refuse_live_job(path: Path, mend: str = "choose another run.dir") -> str | None:
    """Return what to tell a person where nobody can say whether the directory's job has ended; None if it has.

    Raises ConfigError while a job that was submitted for this directory waits or runs.
    """
    job = job_of(path)
    state = job_states([job]).get(job, UNKNOWN) if job else GONE
    if state == UNKNOWN:
        return f"belongs to job {job}, which may still run: there is no squeue on PATH, or Slurm does not answer it"
    if state != GONE and state not in ENDED:
        raise ConfigError(
            f"run.dir={path}: belongs to job {job}, which is {state}; {mend}, or end the job with scancel {job}"
        )
    return None


def _guard(path: Path, cfg: RecipeConfig, recipe: str) -> None:
    """Raise ConfigError unless the run in `path` may go on as `cfg`."""
    if doubt := _refuse_live_job(path):
        print(f"{path}: {doubt}; do not start this run twice at once", file=sys.stderr)
    owner = _recipe_of(path)
    if owner not in (None, recipe):
        raise ConfigError(f"run.dir={path}: holds a run of the recipe {owner}, not {recipe}; choose another run.dir")
    if cfg.run.resume == "never":
        if any(".tmp" not in folder.name for folder in (path / "checkpoints").glob("step_*")):
            raise ConfigError(
                f"run.resume=never: run.dir={path} holds checkpoints, which a new run would mix with its own; choose "
                "another run.dir, or remove it"
            )
        return
    try:
        read_frozen(path / CONFIG, type(cfg))
    except ConfigError as error:
        told = "; ".join(error.problems)
        raise ConfigError(
            f"run.dir={path}: its {CONFIG} is of another kind ({told}); choose another run.dir"
        ) from error
    check_changes((path / CONFIG).read_text(), cfg, f"run.dir={path}")


def _recipe_of(path: Path) -> str | None:
    return read_json(path / RECORD).get("recipe")


def _has_content(entry: Path) -> bool:
    return not entry.is_file() or entry.stat().st_size > 0


def _free(folder: Path) -> str:
    """How much room there is, as the end of a message; nothing where the disk does not tell."""
    try:
        return f" ({shutil.disk_usage(folder).free:,} bytes are free)"
    except OSError:
        return ""
