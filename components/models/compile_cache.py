"""Cleanup of torch's compile cache: shared libraries that a killed compiler left truncated."""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

WRITING_SECONDS = 2.0
"""A file modified within this time may still be being written."""


def remove_truncated_libraries() -> list[Path]:
    """Delete truncated files from the cache of torch.compile's C++ backend, and return their paths.

    The linker writes in place, and torch assumes that any existing file is complete. A process killed while compiling
    therefore leaves a file that makes every later run fail with "ImportError: file too short".
    """
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    removed = [path for path in _libraries(Path(cache_dir())) if _remove_truncated(path, Path(get_lock_dir()))]
    if removed:
        logger.warning("removed %d truncated files from torch's compile cache, such as %s", len(removed), removed[0])
    return removed


def is_truncated(path: Path) -> bool:
    """Return whether a file is shorter than its ELF header states; compilers write the section table last."""
    with path.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if header[:4] != b"\x7fELF"[: len(header[:4])]:
        return False  # not ELF: another platform
    if len(header) < 64:
        return True
    (offset,) = struct.unpack_from("<Q", header, 40)
    entry_size, entries = struct.unpack_from("<HH", header, 58)
    return offset == 0 or offset + entry_size * entries > size


def _libraries(cache: Path) -> Iterator[Path]:
    for suffix in ("so", "o"):
        yield from cache.glob(f"*/*.{suffix}")


def _remove_truncated(path: Path, locks: Path) -> bool:
    """Delete a file if it is truncated and no process is writing it; return whether it was deleted.

    While it writes a library, torch holds the lock named after the library's key. Object files have no lock, so their
    age decides.
    """
    from filelock import FileLock, Timeout

    try:
        if not is_truncated(path) or time.time() - path.stat().st_mtime < WRITING_SECONDS:
            return False
        with FileLock(locks / f"{path.name.partition('.')[0]}.lock", timeout=0):
            if not is_truncated(path):  # its writer finished in the meantime
                return False
            path.unlink()
            return True
    except (FileNotFoundError, Timeout):  # another rank deleted it, or a compiler holds the lock
        return False
