"""Files that other processes look at meanwhile: written whole, read whether or not they are there, locked."""

from __future__ import annotations

import errno
import fcntl
import json
from pathlib import Path
from typing import Any

from components.protocol.run_files import BY_UMASK, read_regular, replace_json, replace_text

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def write_text(path: Path, text: str, mode: int = BY_UMASK) -> None:
    """Write a file in one rename, so that nobody reads half of it."""
    replace_text(path, text, mode)


def write_json(path: Path, values: dict[str, Any], mode: int = BY_UMASK) -> None:
    """Write an object as strict JSON in one rename."""
    replace_json(path, values, mode)


def read_json(path: Path) -> dict[str, Any]:
    """Return an object from a file; empty where there is none that can be read."""
    try:
        values = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
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
