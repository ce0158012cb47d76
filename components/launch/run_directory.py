"""The run directory of one attempt: what a start writes into it, and what is removed if the start is rejected.

A start writes config.yaml and environment.json: versions, git state, command and host. environment.json lists no
environment variables, which may hold secrets.
"""

from __future__ import annotations

import errno
import filecmp
import os
import platform
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.config.compose.frozen import frozen_text
from components.config.schema.recipes import RecipeConfig
from components.config.stored_run import METRICS
from components.launch.machine import usable_cores
from components.protocol.errors import ConfigError
from components.protocol.run_files import (
    BEFORE,
    CODE,
    CONFIG,
    JOB_ID,
    JOB_MANIFEST,
    JOB_SCRIPT,
    LEASE,
    LOCK,
    LOGS,
    MESH_PICTURE,
    PRIVATE,
    RECORD,
    REQUEUE,
    RESULT,
    SCRIPT,
    START,
    SUBMISSION,
    atomic_path,
    atomic_write,
    atomic_write_json,
    attempt_logs,
    keep_only_file,
    own_folder,
    record_result,
    refuse_start,
    set_aside,
    temporaries,
)
from components.protocol.safe_parsing import read_regular
from components.protocol.secrets import masked
from components.terminal import print_text

_START_ENTRIES = {
    *(CONFIG, RECORD, MESH_PICTURE, RESULT, LOGS, LOCK, CODE, SCRIPT, JOB_MANIFEST, JOB_SCRIPT, JOB_ID, SUBMISSION),
    LEASE,
}
"""Entries that a start creates before main runs."""
_PACKAGES = ("meshbook", "torch", "transformers", "datasets", "hydra-core", "omegaconf", "safetensors", "gguf", "wandb")


@dataclass
class RunDirectory:
    """The run directory, as used by one attempt."""

    path: Path
    fresh: bool
    """Whether it was new or empty, so that all its contents come from this attempt."""
    created: list[Path]
    """Folders that this start created, outermost first."""
    lock: int | None
    """File descriptor that holds the lock until this process ends; None if there is no lock."""
    attempt: int
    """Number of earlier starts of the run."""

    @property
    def logs(self) -> Path:
        """Logs of this attempt."""
        return attempt_logs(self.path, self.attempt)

    def freeze(self, cfg: RecipeConfig, record: dict[str, Any], picture: str | None = None) -> None:
        """Write the frozen config (config.yaml), which every rank reads, its provenance (environment.json), and the
        picture of its mesh if there is one (mesh.svg).

        Those of an existing run stay until the first step: the new ones are in the folder `START` until then. First
        moves the result.json of the previous attempt to that attempt's logs. Raises ConfigError if the files cannot be
        written.
        """
        try:
            self._freeze(cfg, record, picture)
        except OSError as error:
            reason = f"{error.strerror or error}{_free_space(self.path)}"
            raise ConfigError(
                f"run.dir={self.path}: cannot be written: {reason}; free disk space, or choose another run.dir"
            ) from error

    def _freeze(self, cfg: RecipeConfig, record: dict[str, Any], picture: str | None) -> None:
        for left in temporaries(self.path):
            if not left.is_dir() or left.is_symlink():
                left.unlink(missing_ok=True)
        if self.attempt > 0:
            self._keep_last_attempt()
        keep_only_file(self.path / REQUEUE)
        (self.path / REQUEUE).unlink(missing_ok=True)
        resumes = os.path.lexists(self.path / CONFIG)
        folder = own_folder(self.path / START) if resumes else self.path
        if resumes:
            self._keep_submission(own_folder(folder / BEFORE))
        keep_only_file(folder / RECORD)
        atomic_write(folder / CONFIG, frozen_text(cfg))
        if picture is not None:
            keep_only_file(folder / MESH_PICTURE)
            atomic_write(folder / MESH_PICTURE, picture)
        own_folder(self.path / LOGS)  # after config.yaml: a killed start leaves a run that can be continued
        self.logs.mkdir()
        for each in (folder, self.logs):  # the copies in the logs restore a damaged first one
            atomic_write_json(each / RECORD, record, PRIVATE)
        if not resumes:
            atomic_write(self.logs / CONFIG, frozen_text(cfg))
        point_latest(self.path / LOGS / "latest", self.logs)

    def _keep_submission(self, folder: Path) -> None:
        """Move the script and the code of the last submission to `folder`, from where a refusal restores them."""
        for name in (SCRIPT, JOB_MANIFEST, JOB_SCRIPT, CODE):
            if os.path.lexists(self.path / name) and not os.path.lexists(folder / name):
                (self.path / name).rename(folder / name)

    def _keep_last_attempt(self) -> None:
        """Archive config.yaml, environment.json and result.json of the previous attempt in its logs."""
        own_folder(self.path / LOGS)
        before = own_folder(attempt_logs(self.path, self.attempt - 1))
        if not os.path.lexists(before / RECORD):  # the logs were lost
            for name in (CONFIG, RECORD):
                if not os.path.lexists(before / name) and (self.path / name).is_file():
                    atomic_write(before / name, read_regular(self.path / name), PRIVATE)
        if os.path.lexists(self.path / RESULT):
            if os.path.lexists(before / RESULT):
                set_aside(before / RESULT, "in the way of a newer one")
            (self.path / RESULT).replace(before / RESULT)

    def conclude(self, status: str, error: str) -> None:
        """Write result.json unless the recipe already wrote one; print a message if it cannot be written."""
        if (self.path / RESULT).is_file():
            return
        try:
            record_result(self.path, {"status": status, "error": error})
        except OSError as refused:
            reason = f"{refused.strerror or refused}{_free_space(self.path)}"
            print_text(f"{self.path / RESULT} could not be written: {reason}", file=sys.stderr, flush=True)

    def discard(self, error: str) -> None:
        """Remove what a rejected start wrote; an existing run is as it was, but for the logs of this attempt.

        If a new directory holds anything else, or an existing run has taken a step, write result.json instead.
        """
        if not self.fresh and refuse_start(self.path, self.attempt):
            return
        entries = list(self.path.iterdir()) if self.path.is_dir() else []
        if not self.fresh or any(entry.name not in _START_ENTRIES and _has_content(entry) for entry in entries):
            self.conclude("invalid", error)
            return
        own = {*_START_ENTRIES, METRICS, *(left.name for left in temporaries(self.path))}
        for entry in sorted(
            (entry for entry in entries if entry.name in own), key=lambda entry: entry.name == CONFIG
        ):  # last: what remains is still a run
            if entry.is_dir() and not entry.is_symlink():
                removed = entry.with_name(f".{entry.name}.removed")
                entry.rename(removed)  # atomic: other ranks that still write reports find no logs folder
                _remove(removed)
            else:
                entry.unlink(missing_ok=True)
        for folder in reversed(self.created):
            with suppress(OSError):  # not empty: another process has written to it meanwhile
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a renamed folder, retrying for two seconds.

    Other ranks may complete writes that they began before the rename.
    """
    for _ in range(20):
        time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def point_latest(link: Path, logs: Path) -> None:
    """Point `link` to the logs of this attempt, replacing a folder there, as in a copy made by following links.

    Prints why if it cannot be linked: the link is only a convenience, not worth failing the run.
    """
    try:
        if link.is_dir() and not link.is_symlink():
            if any(_same_files(link, attempt) for attempt in logs.parent.glob("attempt_*")):
                shutil.rmtree(link)
            else:
                set_aside(link, "a folder of its own")
        with atomic_path(link) as new:
            new.symlink_to(logs.name)
    except OSError as error:
        print_text(f"{link}: cannot be linked to this attempt: {error}", file=sys.stderr)


def _same_files(one: Path, other: Path) -> bool:
    """Return whether two folders without subfolders contain the same files with the same contents."""
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(other)) and filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def _has_content(entry: Path) -> bool:
    """Return whether an entry is anything but an empty file."""
    return not entry.is_file() or entry.stat().st_size > 0


def make_new(parent: Path) -> tuple[Path, list[Path]]:
    """Create a folder named by the time and random hex digits; return it, and all folders created, outermost first."""
    while True:
        path = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        created = make(path)
        if path in created:
            return path, created


def make(path: Path) -> list[Path]:
    """Create a folder with its parents; return those that this call created, outermost first."""
    missing = [folder for folder in (*reversed(path.parents), path) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        missing = [folder for folder in missing if folder != path]
    return missing


@contextmanager
def reported_by_path(path: Path) -> Iterator[None]:
    """Raise file system errors as a ConfigError that names the run directory."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"{error.strerror}{_free_space(path)}"
            raise ConfigError(
                f"run.dir={path}: cannot be written: {reason}; free disk space, or choose another run.dir"
            ) from error
        inside = f"{error.filename}: " if path in Path(str(error.filename)).parents else ""
        raise ConfigError(
            f"run.dir={path}: cannot be used: {inside}{error.strerror}; choose another run.dir"
        ) from error


def _free_space(folder: Path) -> str:
    """Return the free space as a message suffix; "" if it cannot be determined."""
    try:
        return f" ({shutil.disk_usage(folder).free:,} bytes are free)"
    except OSError:
        return ""


def check_writable(path: Path) -> None:
    """Raise OSError if permissions or the mount prevent writing to a folder, or creating it if it does not exist."""
    nearest = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def start_record(recipe: str, recipe_file: Path, processes: int, attempt: int) -> dict[str, Any]:
    """Return the versions, git state, command, host and devices of this start, without importing the packages."""
    return {
        "recipe": recipe,
        "recipe_file": str(recipe_file),
        "attempt": attempt,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *map(masked, sys.argv)]),
        "folder": os.getcwd(),
        "processes": processes,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": usable_cores(),
        "gpus": _gpu_names(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "git": _git_state(recipe_file.parent),
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # 10 ms; only a run that starts needs it

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu_names() -> list[str]:
    """Return the model names of all GPUs that the driver lists, including those hidden from the run."""
    names = []
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        models = [line.partition(":")[2].strip() for line in card.read_text().splitlines() if line.startswith("Model")]
        names += models[:1]
    return names


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and changed files of the recipe's git repository; None without git or a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no") or ""
    return {"commit": commit.strip(), "dirty": bool(changed.strip()), "changed": masked(changed).splitlines()}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
