"""Files of a run directory: written without following links, replaced whole, set aside when damaged.

Temporary names are unpredictable and opened with O_EXCL, final names with O_NOFOLLOW, so that a link that somebody
planted in a shared directory is never written through. Imports no torch.
"""

from __future__ import annotations

import errno
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

RESULT, LOGS = "result.json", "logs"
"""In a run directory: how the run ended, and the folder of a folder per attempt."""
PRIVATE, BY_UMASK = 0o600, 0o666
"""Modes of new files: for the owner only, or whatever the umask allows."""
NONFINITE = "nonfinite"
"""Key of a JSON object that lists its values that are NaN or infinite, which strict JSON cannot hold: there null."""
_TEMPORARY = ".tmp-"


def replace_bytes(path: Path, content: bytes, mode: int = BY_UMASK) -> None:
    """Write a file durably and rename it to `path`, so that a reader or a crash never sees part of it.

    A link at `path` is replaced, not followed; a directory there is set aside. Raises OSError.
    """
    with replacing(path, mode) as file:
        file.write(content)


def replace_text(path: Path, text: str, mode: int = BY_UMASK) -> None:
    """Write UTF-8 text like `replace_bytes`."""
    replace_bytes(path, text.encode(), mode)


def replace_json(path: Path, values: Mapping[str, Any], mode: int = BY_UMASK) -> None:
    """Write an object as strict JSON like `replace_bytes`."""
    replace_text(path, json.dumps(finite(values), indent=2, allow_nan=False) + "\n", mode)


@contextmanager
def replacing(path: Path, mode: int = BY_UMASK) -> Iterator[IO[bytes]]:
    """Open a temporary file that becomes `path` at the end of the context, unless an exception ends it."""
    temporary = temporary_of(path)
    try:
        with open_new(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
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


def temporary_of(path: Path) -> Path:
    """Return an unpredictable name beside `path`."""
    return path.with_name(f".{path.name}{_TEMPORARY}{token_hex(8)}")


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
    """Wait until the names in a folder are on disk; a file system that cannot is as good as it gets."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
