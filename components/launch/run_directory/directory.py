"""The run directory of one attempt: what a start writes into it, and what is removed if the start is rejected."""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config.compose.frozen import frozen_text
from components.config.errors import ConfigError
from components.config.metrics_log import METRICS
from components.config.schema.recipes import RecipeConfig
from components.launch.run_directory.filesystem import free_space
from components.protocol.run_files import (
    BEFORE,
    CODE,
    CONFIG,
    JOB_ID,
    LEASE,
    LOCK,
    LOGS,
    MANIFEST,
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
from components.protocol.safe_json import read_regular
from components.terminal import print_text

START_ENTRIES = {CONFIG, RECORD, RESULT, LOGS, LOCK, CODE, SCRIPT, MANIFEST, JOB_ID, SUBMISSION, LEASE}
"""Entries that a start creates before main runs."""


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

    def freeze(self, cfg: RecipeConfig, record: dict[str, Any]) -> None:
        """Write the frozen config (config.yaml), which every rank reads, and its provenance (environment.json).

        Those of an existing run stay until the first step: the new ones are in the folder `START` until then. First
        moves the result.json of the previous attempt to that attempt's logs. Raises ConfigError if the files cannot be
        written.
        """
        try:
            self._freeze(cfg, record)
        except OSError as error:
            why = f"{error.strerror or error}{free_space(self.path)}"
            raise ConfigError(
                f"run.dir={self.path}: cannot be written: {why}; free disk space, or choose another run.dir"
            ) from error

    def _freeze(self, cfg: RecipeConfig, record: dict[str, Any]) -> None:
        for left in temporaries(self.path):
            if not left.is_dir() or left.is_symlink():
                left.unlink(missing_ok=True)
        own_folder(self.path / LOGS)
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
        self.logs.mkdir()  # after config.yaml: a killed start leaves a run that can be continued
        for each in (folder, self.logs):  # the copies in the logs restore a damaged first one
            atomic_write_json(each / RECORD, record, PRIVATE)
        if not resumes:
            atomic_write(self.logs / CONFIG, frozen_text(cfg))
        try:
            point_latest(self.path / LOGS / "latest", self.logs)
        except OSError as error:  # the link is only a convenience: not worth failing the run
            print_text(f"{self.path / LOGS / 'latest'}: cannot be linked to this attempt: {error}", file=sys.stderr)

    def _keep_submission(self, folder: Path) -> None:
        """Move the script and the code of the last submission to `folder`, from where a refusal restores them."""
        for name in (SCRIPT, MANIFEST, CODE):
            if os.path.lexists(self.path / name) and not os.path.lexists(folder / name):
                (self.path / name).rename(folder / name)

    def _keep_last_attempt(self) -> None:
        """Archive config.yaml, environment.json and result.json of the previous attempt in its logs."""
        before = own_folder(attempt_logs(self.path, self.attempt - 1))
        if not os.path.lexists(before / RECORD):  # the logs were lost, or are of an earlier version
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
            why = f"{refused.strerror or refused}{free_space(self.path)}"
            print_text(f"{self.path / RESULT} could not be written: {why}", file=sys.stderr, flush=True)

    def discard(self, error: str) -> None:
        """Remove what a rejected start wrote; an existing run is as it was, but for the logs of this attempt.

        If a new directory holds anything else, or an existing run has taken a step, write result.json instead.
        """
        if not self.fresh and refuse_start(self.path, self.attempt):
            return
        entries = list(self.path.iterdir()) if self.path.is_dir() else []
        if not self.fresh or any(entry.name not in START_ENTRIES and _has_content(entry) for entry in entries):
            self.conclude("invalid", error)
            return
        own = {*START_ENTRIES, METRICS, *(left.name for left in temporaries(self.path))}
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
    """Point `link` to the logs of this attempt, replacing a folder there, as in a copy made by following links."""
    if link.is_dir() and not link.is_symlink():
        if any(_same_files(link, attempt) for attempt in logs.parent.glob("attempt_*")):
            shutil.rmtree(link)
        else:
            set_aside(link, "a folder of its own")
    with atomic_path(link) as new:
        new.symlink_to(logs.name)


def _same_files(one: Path, other: Path) -> bool:
    """Return whether two folders without subfolders contain the same files with the same contents."""
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(other)) and filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def _has_content(entry: Path) -> bool:
    """Return whether an entry is anything but an empty file."""
    return not entry.is_file() or entry.stat().st_size > 0
