"""Create and check folders, and report file system errors by path."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.config.errors import ConfigError


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
            why = f"{error.strerror}{free_space(path)}"
            raise ConfigError(
                f"run.dir={path}: cannot be written: {why}; free disk space, or choose another run.dir"
            ) from error
        inside = f"{error.filename}: " if path in Path(str(error.filename)).parents else ""
        raise ConfigError(
            f"run.dir={path}: cannot be used: {inside}{error.strerror}; choose another run.dir"
        ) from error


def free_space(folder: Path) -> str:
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
