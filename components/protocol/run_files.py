"""Files of a run directory: their names, atomic writes, locks, and what is set aside when it is damaged.

Temporary names are unpredictable and opened with O_EXCL, final names with O_NOFOLLOW, so that a link planted in a
shared directory is never written through.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from components.terminal import print_text

CONFIG = "config.yaml"
"""The frozen config."""
RECORD = "environment.json"
"""Versions, command, host and git state of the last start."""
RESULT = "result.json"
"""How the run ended."""
LOGS = "logs"
"""Folder with a folder of logs per attempt."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints."""
LOCK, LEASE = ".lock", ".lease"
"""The launcher's lock, and the folder with the lease of rank 0."""
CODE, SCRIPT, JOB_ID = "code", "job.sbatch", "job_id"
"""Of a submitted run: the copy of the code, the batch script, and the id of the job."""
SUBMISSION = ".submission"
"""Tag of a submission that has not been confirmed."""
REQUEUE = "requeue"
"""Marker: the batch job is to be requeued; may list nodes to exclude."""
CANCELLED = "cancelled"
"""Marker in an attempt's logs: the batch job was cancelled."""
FIRST_STEP = "first_step"
"""Marker in the logs: the attempt finished an optimizer step. The next start moves it to the attempt's own logs."""

PRIVATE, BY_UMASK = 0o600, 0o666
"""Modes of new files: for the owner only, or whatever the umask allows."""
NONFINITE = "nonfinite"
"""Key of a JSON object that lists its values that are NaN or infinite, which strict JSON cannot hold: there null."""
_TEMPORARY = ".tmp-"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def attempt_logs(run_dir: Path, attempt: int) -> Path:
    """Return the folder of the logs of an attempt."""
    return run_dir / LOGS / f"attempt_{attempt}"


def log_file(logs: Path, rank: int) -> Path:
    """Return the file of a rank's output; rank 0 of a local run writes to the terminal instead."""
    return logs / f"rank_{rank}.log"


def read_result(run_dir: Path) -> dict[str, Any]:
    """Return result.json; empty if it is missing or cannot be read."""
    return read_json(run_dir / RESULT)


def record_result(run_dir: Path, values: Mapping[str, Any]) -> None:
    """Write result.json for a run whose recipe could not."""
    atomic_write_json(run_dir / RESULT, values)


def atomic_write(path: Path, content: bytes | str, mode: int = BY_UMASK) -> None:
    """Write a file durably and rename it to `path`, so that neither a reader nor a crash ever sees part of it.

    Text is encoded as UTF-8. A link at `path` is replaced, not followed; a directory there is set aside. Raises
    OSError.
    """
    with atomic_file(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def atomic_write_json(path: Path, values: Mapping[str, Any], mode: int = BY_UMASK) -> None:
    """Write an object as strict JSON like `atomic_write`."""
    atomic_write(path, json.dumps(finite(values), indent=2, allow_nan=False) + "\n", mode)


@contextmanager
def atomic_file(path: Path, mode: int = BY_UMASK) -> Iterator[IO[bytes]]:
    """Open a temporary file that becomes `path` at the end of the context, unless an exception ends it."""
    with atomic_path(path) as temporary, open_new(temporary, mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield an unpredictable name beside `path`; what the context creates there is renamed to `path` at its end.

    For what only takes a name, such as a link; it is not synced to disk. Use `atomic_file` otherwise.
    """
    temporary = path.with_name(f".{path.name}{_TEMPORARY}{token_hex(8)}")
    try:
        yield temporary
        if path.is_dir() and not path.is_symlink():
            set_aside(path, "a directory")
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(path)  # writing and closing name no file
        raise
    _sync_folder(path.parent)


def temporaries(folder: Path) -> list[Path]:
    """Return the files that writers left behind when they were killed."""
    return [*folder.glob(f".*{_TEMPORARY}*"), *folder.glob(".*.tmp")]


def open_new(path: Path, mode: int = BY_UMASK) -> IO[bytes]:
    """Create a file for writing. Raises FileExistsError where anything has that name, a dangling link too."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb")


def open_append(path: Path, mode: int = BY_UMASK) -> IO[bytes]:
    """Open a file for appending, unbuffered. What is there and is no file, such as a link, is set aside first."""
    keep_only_file(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.fdopen(os.open(path, flags, mode), "ab", buffering=0)


def create_marker(path: Path) -> None:
    """Create an empty file; what is there already, a link too, stays as it is."""
    with suppress(FileExistsError):
        open_new(path, PRIVATE).close()


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError for anything else: a pipe or a device may never end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    """Return an object from a file; empty if there is none that can be read."""
    try:
        values = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def take_lock(descriptor: int) -> bool:
    """Lock an open file for as long as it is open, and return True; False if the file system has no locks.

    Raises OSError if another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def keep_only_file(path: Path) -> None:
    """Set aside what has the name of a file and is a directory, a link, a pipe or a device; report it on stderr."""
    with suppress(FileNotFoundError):
        kind = stat.S_IFMT(os.lstat(path).st_mode)
        if kind != stat.S_IFREG:
            set_aside(path, {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link"}.get(kind, "no regular file"))


def keep_only_folder(path: Path, *, links: bool = True) -> None:
    """Set aside what has the name of a folder and is none; report it on stderr.

    Args:
        links: A link to a folder counts as one.
    """
    if os.path.lexists(path) and (not path.is_dir() or (path.is_symlink() and not links)):
        set_aside(path, "a link" if path.is_symlink() else "no directory")


def set_aside(path: Path, reason: str) -> Path:
    """Rename what is damaged to NAME.damaged (or NAME.damaged-2, ...), report it on stderr, and return the new path."""
    name, number = f"{path.name}.damaged", 1
    while os.path.lexists(path.with_name(name)):
        number += 1
        name = f"{path.name}.damaged-{number}"
    path.rename(path.with_name(name))
    print_text(f"{path}: is {reason}; moved to {name}", file=sys.stderr, flush=True)
    return path.with_name(name)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object that strict JSON can hold: NaN and infinities are null, and `nonfinite` maps keys to them."""
    odd = {key: str(value) for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    kept = {key: None if key in odd else value for key, value in values.items()}
    return kept | ({NONFINITE: odd} if odd else {})


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, if its file system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
