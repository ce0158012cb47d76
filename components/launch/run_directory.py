"""The run directory: chosen once by the launching process, guarded against other runs, locked while it runs."""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from components.config.compose.frozen import from_yaml, frozen_text, intact_copy, read_intact
from components.config.errors import ConfigError
from components.config.schema.recipes import RecipeConfig
from components.config.schema.run import CONFIG
from components.launch.changes import check_changes, check_source
from components.launch.files import read_json, take_lock, write_json, write_text
from components.launch.folders import check_writable, free_space, make, make_new, told_by_path
from components.launch.lease import LEASE, take_lease
from components.launch.slurm.jobs import ENDED, GONE, UNKNOWN, find_submission, job_states
from components.protocol.failures import attempt_logs
from components.protocol.run_files import (
    LOGS,
    PRIVATE,
    RESULT,
    keep_only_file,
    keep_only_folder,
    read_regular,
    replace_bytes,
    set_aside,
    temporaries,
    temporary_of,
)
from components.terminal import print_text

RECORD, LOCK = "environment.json", ".lock"
CHECKPOINTS = "checkpoints"
CODE, SCRIPT, JOB_ID, REQUEUE = "code", "job.sbatch", "job_id", "requeue"
"""Of a Slurm job: its copy of the code, its batch script, its number, and the wish to be started again."""
CANCELLED = "cancelled"
"""File that the batch script writes into an attempt's logs when the job is cancelled."""
LONGEST_PROBLEM = 200
"""Characters that are quoted of what is wrong with a file that is no config: it may be anything."""
SUBMISSION = ".submission"
"""The tag of a submission while it is unknown whether Slurm took the job."""
OWN_NAMES = {CONFIG, RECORD, RESULT, LOGS, LOCK, CODE, SCRIPT, JOB_ID, SUBMISSION, LEASE}
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
            why = f"{error.strerror or error}{free_space(self.path)}"
            raise ConfigError(f"run.dir={self.path}: cannot be written: {why}; make room, or choose another") from error

    def _freeze(self, cfg: RecipeConfig, record: dict[str, Any]) -> None:
        for left in temporaries(self.path):
            if not left.is_dir() or left.is_symlink():
                left.unlink(missing_ok=True)
        keep_only_folder(self.path / LOGS)
        if self.attempt > 0:
            self._keep_last_attempt()
        keep_only_file(self.path / REQUEUE)
        (self.path / REQUEUE).unlink(missing_ok=True)
        self.logs.mkdir(parents=True)
        for folder in (self.path, self.logs):  # a copy of each, should the first be damaged
            keep_only_file(folder / RECORD)
            write_text(folder / CONFIG, frozen_text(cfg))
            write_json(folder / RECORD, record, PRIVATE)
        try:
            _point_latest(self.path / LOGS / "latest", self.logs)
        except OSError as error:  # a convenience for people: never a reason to stop
            print_text(f"{self.path / LOGS / 'latest'} does not show this attempt: {error}", file=sys.stderr)

    def _keep_last_attempt(self) -> None:
        """Move what the attempt before left to its logs."""
        before = attempt_logs(self.path, self.attempt - 1)
        keep_only_folder(before, links=False)
        before.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, RECORD):
            if not os.path.lexists(before / name) and (self.path / name).is_file():
                replace_bytes(before / name, read_regular(self.path / name), PRIVATE)
        if os.path.lexists(self.path / RESULT):
            if os.path.lexists(before / RESULT):
                set_aside(before / RESULT, "in the way of a newer one")
            (self.path / RESULT).replace(before / RESULT)

    def conclude(self, status: str, error: str) -> None:
        """Write result.json, unless the recipe has written one; say so where the disk does not take it."""
        if (self.path / RESULT).is_file():
            return
        try:
            write_result(self.path, {"status": status, "error": error})
        except OSError as refused:
            why = f"{refused.strerror or refused}{free_space(self.path)}"
            print_text(f"{self.path / RESULT} could not be written: {why}", file=sys.stderr, flush=True)

    def discard(self, error: str) -> None:
        """Take back a run that was refused: leave nothing behind, unless there is more than what a start writes."""
        entries = list(self.path.iterdir()) if self.path.is_dir() else []
        if not self.fresh or any(entry.name not in OWN_NAMES and _has_content(entry) for entry in entries):
            self.conclude("invalid", error)
            return
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink():
                removed = entry.with_name(f".{entry.name}.removed")
                entry.rename(removed)  # at once: other ranks, which still write their reports, find no logs
                _remove(removed)
            else:
                entry.unlink(missing_ok=True)
        for folder in reversed(self.created):
            with suppress(OSError):  # somebody else has put something there meanwhile
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a folder that was just renamed.

    A system call that another rank had begun before may still write into it: those get time to end.
    """
    for _ in range(20):
        time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def write_result(run_dir: Path, values: dict[str, Any]) -> None:
    """Write result.json for a run whose recipe has not come to do so."""
    write_json(run_dir / RESULT, values)


def read_result(run_dir: Path) -> dict[str, Any]:
    """Return result.json; empty where there is none yet, or none that can be read."""
    return read_json(run_dir / RESULT)


def job_of(run_dir: Path) -> str | None:
    """Return the number of the job that was submitted for a directory; None where there was none."""
    try:
        return read_regular(run_dir / JOB_ID).decode(errors="replace").strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{run_dir / JOB_ID}: the number of the run's job cannot be read: {error.strerror}"
        ) from error


def adopt_submission(run_dir: Path) -> str | None:
    """Return the number of the directory's job, where needed that of a submission whose answer was lost.

    Raises ConfigError where there is such a submission and squeue cannot be asked.
    """
    file, job = run_dir / SUBMISSION, job_of(run_dir)
    if job is None and file.exists():
        job = find_submission(file.read_text().strip(), run_dir / SCRIPT)
        if job is not None:
            record_job(run_dir, job)
    return job


def record_job(run_dir: Path, job: str) -> None:
    """Write down the number of the job that was submitted for a directory."""
    write_text(run_dir / JOB_ID, f"{job}\n")
    (run_dir / SUBMISSION).unlink(missing_ok=True)


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
    if names:
        try:
            stored = _stored_config(path)
            _guard(path, stored, cfg, recipe)
            with told_by_path(path):
                take_lease(path).release()  # refuses while a rank 0 elsewhere trains in it; ours takes it again
                stored.restore(path)
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
    if names:
        _guard(path, _stored_config(path), cfg, recipe)


def _place(cfg: RecipeConfig, recipe: str) -> Path:
    """The run directory, or where a new one is to be made."""
    if cfg.run.dir is None:
        return Path.cwd() / "outputs" / recipe
    return Path(os.path.expanduser(cfg.run.dir)).absolute()


def _names(path: Path) -> set[str]:
    """Return the names in a run directory. Raises ConfigError if it holds no run."""
    ours = {LOCK, LEASE, *(left.name for left in temporaries(path))}
    names = {entry.name for entry in path.iterdir()} - ours
    if names and CONFIG not in names and intact_copy(path) is None:
        lost = f" ({CONFIG} is missing, and no copy of it is intact)" if names & {LOGS, CHECKPOINTS} else ""
        raise ConfigError(f"run.dir={path}: holds files, but no run{lost}; choose another run.dir")
    return names


@dataclass(frozen=True)
class _StoredConfig:
    """The config that a run was started with before."""

    text: str
    copy: Path | None = None
    """Where the text comes from if config.yaml is missing or damaged."""
    why: str = ""

    def restore(self, path: Path) -> None:
        """Put the copy in the place of config.yaml, and keep what is there."""
        if self.copy is None:
            return
        if os.path.lexists(path / CONFIG):
            set_aside(path / CONFIG, "damaged")
        write_text(path / CONFIG, self.text)
        print_text(f"{path / CONFIG}: restored from {self.copy}: {self.why}", file=sys.stderr)


def _stored_config(path: Path) -> _StoredConfig:
    """Return config.yaml, or its newest intact copy. Raises ConfigError if there is neither."""
    try:
        return _StoredConfig(read_intact(path / CONFIG))
    except ConfigError as error:
        found = intact_copy(path)
        if found is None:
            raise ConfigError(f"run.dir={path}: {error}; restore it, or choose another run.dir") from error
        why = "missing" if not os.path.lexists(path / CONFIG) else "it was damaged, or edited by hand"
        return _StoredConfig(found[1], found[0], why)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep every start out of a run directory while something in it is changed by hand.

    Raises ConfigError while a run uses it, or a job that has not ended (or that nobody here can ask for) owns it.
    """
    mend = "wait for its end"
    lock, lease = _lock(path, mend), None
    try:
        if lock is None and not (path / RESULT).exists():
            raise ConfigError(f"run.dir={path}: nothing tells here whether its run has ended: no locks, no {RESULT}")
        if doubt := _refuse_live_job(path, mend):
            raise ConfigError(
                f"run.dir={path}: {doubt}; try again from a login node of its cluster, or remove {path / JOB_ID} if it "
                "has ended"
            )
        lease = take_lease(path)
        yield
    finally:
        if lease is not None:
            lease.release()
        _unlock(lock)


def _next_attempt(path: Path) -> int:
    numbers = [folder.name.rpartition("_")[2] for folder in (path / LOGS).glob("attempt_*")]
    unseen = 0 if os.path.lexists(path / RESULT) else -1  # an attempt whose logs are gone
    return max((int(number) for number in numbers if number.isdigit()), default=unseen) + 1


def _point_latest(link: Path, logs: Path) -> None:
    """Let `link` point to the logs of this attempt, whatever is there: a copy with links followed has a folder."""
    if link.is_dir() and not link.is_symlink():
        if any(_same_files(link, attempt) for attempt in logs.parent.glob("attempt_*")):
            shutil.rmtree(link)
        else:
            set_aside(link, "a folder of its own")
    new = temporary_of(link)
    new.symlink_to(logs.name)
    new.replace(link)


def _same_files(one: Path, other: Path) -> bool:
    """Whether two folders without subfolders hold the same files with the same contents."""
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(other)) and filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def _lock(path: Path, mend: str = "choose another run.dir") -> int | None:
    """Lock the directory for the life of this process; None where its file system has no locks."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        has_locks = take_lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"run.dir={path}: is in use by a run that is still going; {mend}") from error
    if not has_locks:
        os.close(descriptor)
        print_text(f"{path}: no locks on this file system; do not start this run twice at once", file=sys.stderr)
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
    try:
        job = adopt_submission(path)
    except ConfigError as error:
        return f"was submitted, and it is unknown whether Slurm took the job ({error})"
    state = job_states([job]).get(job, UNKNOWN) if job else GONE
    if state == UNKNOWN:
        return f"belongs to job {job}, which may still run: there is no squeue on PATH, or Slurm does not answer it"
    if state != GONE and state not in ENDED:
        raise ConfigError(
            f"run.dir={path}: belongs to job {job}, which is {state}; {mend}, or end the job with scancel {job}"
        )
    return None


def _guard(path: Path, stored: _StoredConfig, cfg: RecipeConfig, recipe: str) -> None:
    """Raise ConfigError unless the run in `path` may go on as `cfg`."""
    if doubt := _refuse_live_job(path):
        print_text(f"{path}: {doubt}; do not start this run twice at once", file=sys.stderr)
    checkpoints = path / CHECKPOINTS
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        raise ConfigError(f"{checkpoints}: is no directory; move it away, or put the checkpoints back")
    owners = _recipes_of(path)
    if owners and recipe not in owners:
        raise ConfigError(
            f"run.dir={path}: holds a run of the recipe {owners[0]}, not {recipe}; choose another run.dir"
        )
    if cfg.run.resume == "never":
        if any(".tmp" not in folder.name for folder in checkpoints.glob("step_*")):
            raise ConfigError(
                f"run.resume=never: run.dir={path} holds checkpoints, which a new run would mix with its own; choose "
                "another run.dir, or remove it"
            )
        return
    try:
        from_yaml(stored.text, type(cfg))
    except ConfigError as error:
        quoted = "; ".join(shorten(problem, LONGEST_PROBLEM, placeholder="...") for problem in error.problems[:2])
        more = f"; and {len(error.problems) - 2} more" if len(error.problems) > 2 else ""
        raise ConfigError(
            f"run.dir={path}: its {CONFIG} is of another kind ({quoted}{more}); choose another run.dir"
        ) from error
    check_changes(stored.text, cfg, f"run.dir={path}")


def _recipes_of(path: Path) -> list[str]:
    """Return the recipes that environment.json and its copies name; a damaged one is reported."""
    files = [path / RECORD, *sorted((path / LOGS).glob(f"attempt_*/{RECORD}"))]
    owners = [read_json(file).get("recipe") for file in files]
    if owners[0] is None and os.path.lexists(path / LOGS):
        print_text(f"{files[0]}: is missing or damaged; this start writes a new one", file=sys.stderr)
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, str)))


def _has_content(entry: Path) -> bool:
    return not entry.is_file() or entry.stat().st_size > 0
