"""Open a run directory: chosen once by the launching process, guarded against other runs, locked while it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from components.config.compose.frozen import from_yaml, intact_copy, read_intact
from components.config.errors import ConfigError
from components.config.schema.recipes import RecipeConfig
from components.launch.clusters import job_of, jobs_by_id, stop_command
from components.launch.run_directory.directory import RunDirectory
from components.launch.run_directory.filesystem import check_writable, make, make_new, reported_by_path
from components.launch.run_directory.lease import take_lease
from components.launch.run_directory.resume_check import check_changes, check_source
from components.protocol.run_files import (
    CHECKPOINTS,
    CONFIG,
    JOB_ID,
    LEASE,
    LOCK,
    LOGS,
    RECORD,
    RESULT,
    atomic_write,
    read_json,
    set_aside,
    take_lock,
    temporaries,
)
from components.terminal import print_text

LONGEST_PROBLEM = 200
"""Characters quoted of each problem with a file that is not a config: it may be anything."""


def open_run_directory(cfg: RecipeConfig, recipe: str) -> RunDirectory:
    """Choose, make, lock and guard the run directory of `cfg`, and set cfg.run.dir to it (absolute).

    Raises ConfigError if it holds another run, is in use, or cannot be written; nothing is created then.
    """
    check_source(cfg)
    path = _place(cfg, recipe)
    with reported_by_path(path):
        path, created = (path, make(path)) if cfg.run.dir is not None else make_new(path)
        names = _names(path)
        lock = _lock(path)
    if names:
        try:
            stored = _stored_config(path)
            _guard(path, stored, cfg, recipe)
            with reported_by_path(path):
                take_lease(path).release()  # refuses while a rank 0 elsewhere trains in it; ours takes it again
                stored.restore(path)
        except ConfigError:
            _unlock(lock)
            raise
    cfg.run.dir = str(path)
    return RunDirectory(path, fresh=not names, created=created, lock=lock, attempt=_next_attempt(path))


def check_run_directory(cfg: RecipeConfig, recipe: str) -> None:
    """Raise ConfigError where `open_run_directory` would, as far as can be checked without creating anything."""
    check_source(cfg)
    path = _place(cfg, recipe)
    with reported_by_path(path):
        check_writable(path)
        names = _names(path) if cfg.run.dir is not None and path.is_dir() else set()
        if (path / LOCK).exists():
            _unlock(_lock(path))
    if names:
        _guard(path, _stored_config(path), cfg, recipe)


def _place(cfg: RecipeConfig, recipe: str) -> Path:
    """Return the run directory, or the folder in which to create one."""
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
        atomic_write(path / CONFIG, self.text)
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

    Raises ConfigError while a run uses it, or a job owns it that has not ended or whose cluster does not answer.
    """
    mend = "wait for its end"
    lock, lease = _lock(path, mend), None
    try:
        if lock is None and not (path / RESULT).exists():
            raise ConfigError(
                f"run.dir={path}: it is unknown whether its run has ended: there are no locks and no {RESULT}"
            )
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
    """Return why it is unknown whether the directory's job has ended; None if it has, or if there is none.

    Raises ConfigError while a job that was submitted for this directory waits or runs.
    """
    try:
        job = job_of(path, search=True)
    except ConfigError as error:
        return f"was submitted, and it is unknown whether the cluster took the job ({error})"
    if job is None:
        return None
    found = jobs_by_id([job]).get(job)
    if found is None or found.doubt:
        why = found.doubt if found else "no kind of cluster has such ids"
        return f"belongs to job {job}, which may still run: {why}"
    if not found.over:
        raise ConfigError(
            f"run.dir={path}: belongs to job {job}, which is {found.reported}; {mend}, or end the job with "
            f"{stop_command(job)}"
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
