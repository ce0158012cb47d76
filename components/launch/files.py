"""Files that other processes look at meanwhile: written whole, read whether or not they are there, locked."""

from __future__ import annotations

import errno
import fcntl
import json
from pathlib import Path
from typing import Any

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def write_text(path: Path, text: str) -> None:
    """Write a file in one rename, so that nobody reads half of it."""
    temporary = aside(path)
    temporary.write_text(text)
    temporary.replace(path)


def aside(path: Path) -> Path:
    """Where a file is written first: all that a process which is killed at once may leave."""
    return path.with_name(f".{path.name}.tmp")


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write an object in one rename."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return an object from a file; empty where there is none that can be read."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def take_lock(descriptor: int) -> bool:
    """Lock an open file for as long as it is open, and return True; False where the file system has no locks.

    Raises OSError where another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
