"""Files of a run directory: names, also those of checkpoints, atomic writes, locks, and renaming of damaged files.

Temporary files have unpredictable names and are opened with O_EXCL, final names with O_NOFOLLOW, and a folder of a run
is never a link, so that a link that another user plants in a shared directory is never written, listed or removed
through.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from components.protocol.safe_parsing import load_json, read_regular
from components.protocol.secrets import masked
from components.terminal import print_text

CONFIG = "config.yaml"
"""The frozen config: composed, validated and resolved."""
RECORD = "environment.json"
"""Versions, command, host and git state of the last start."""
RESULT = "result.json"
"""Status of the ended run and its final numbers."""
MESH_PICTURE = "mesh.svg"
"""Picture of the mesh, its groups and the pipeline schedule."""
LOGS = "logs"
"""Folder of the logs, with one folder per attempt."""
ROLLOUTS = "rollouts"
"""Folder of sampled answers, a file STEP.safetensors for each batch, named by the step that first trains on it."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints; `checkpoint_name` returns the name of the folder of each."""
CHECKPOINT_MANIFEST, CHECKPOINT_STATE = "manifest.json", "state.json"
"""Files of a checkpoint: its manifest, written last, and the JSON state of the run, which contains the run's config."""
START = ".start"
"""Folder with config.yaml and environment.json of a start of an existing run that has not taken its first step, and in
its folder `BEFORE` what the start replaces already."""
BEFORE = "before"
LOCK, LEASE = ".lock", ".lease"
"""The launcher's lock file, and the folder of rank 0's lease."""
CODE, SCRIPT, JOB_ID = "code", "job.sbatch", "job_id"
"""Files of a submitted run: the copy of the code, the batch script, and the job id."""
JOB_MANIFEST, JOB_SCRIPT = "job.yaml", "job.sh"
"""Objects of a run submitted to Kubernetes, and the script of one submitted to a scheduler of the user's own."""
SUBMISSION = ".submission"
"""Tag of a submission that has not been confirmed."""
REQUEUE = "requeue"
"""Marker that requests a requeue of the batch job; may list nodes to exclude."""
RESTART = "restart"
"""Marker that asks the batch job to start the ranks again."""
CANCELLED = "cancelled"
"""Marker in an attempt's logs that the batch job was cancelled."""
FIRST_STEP = "first_step"
"""Marker in the logs that the attempt finished an optimizer step; the next start moves it to the attempt's folder."""

PRIVATE, BY_UMASK = 0o600, 0o666
"""Modes of new files: owner only, or limited by the umask."""
NONFINITE = "nonfinite"
"""Key of a JSON object with its NaN and infinite values, which are null at their own keys: strict JSON has neither."""
TEMPORARY = ".tmp-"
"""Part of the names of temporary files, and of checkpoints that are being written or removed."""
_LEFT_FILE = re.compile(rf"\..+{re.escape(TEMPORARY)}[0-9a-f]{{16}}")
_CHECKPOINT = re.compile(r"step_([0-9]{1,18})(?:\.([0-9]{1,9}))?")
_UNFINISHED = re.compile(f"{_CHECKPOINT.pattern}{re.escape(TEMPORARY)}[0-9a-f]+")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def attempt_logs(run_dir: Path, attempt: int) -> Path:
    """Return the folder of the logs of an attempt."""
    return run_dir / LOGS / f"attempt_{attempt}"


def log_file(logs: Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return logs / f"rank_{rank}.log"


def checkpoint_name(step: int, again: int = 0) -> str:
    """Return the name of a checkpoint's folder: step_40, or step_40.1 for a step that is saved a second time.

    Args:
        step: Optimizer steps completed.
        again: Number of earlier saves of the same step.
    """
    return f"step_{step}.{again}" if again else f"step_{step}"


def checkpoint_step(name: str) -> int | None:
    """Return the step in the name of a published checkpoint's folder; None if it is no such name."""
    parsed = _CHECKPOINT.fullmatch(name)
    return None if parsed is None else int(parsed[1])


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the paths in `RUN_DIR/checkpoints` that are named like a published checkpoint, ordered by step.

    Their contents are not checked. Raises OSError if the folder exists and cannot be listed.
    """
    parsed = [(_CHECKPOINT.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [path for *_, path in sorted((int(name[1]), int(name[2] or 0), path) for name, path in parsed if name)]


def unfinished_checkpoints(folder: Path) -> list[Path]:
    """Return the temporary folders in `RUN_DIR/checkpoints` that killed saves and removals left, sorted by name."""
    return sorted(path for path in folder.glob(f"*{TEMPORARY}*") if _UNFINISHED.fullmatch(path.name))


def temporary_name(name: str) -> str:
    """Return an unpredictable name for a checkpoint that is being written or removed."""
    return f"{name}{TEMPORARY}{token_hex(4)}"


def current_config(run_dir: Path) -> Path:
    """Return the path of the config of the newest start, which replaces that of the run at the first step."""
    started = run_dir / START / CONFIG
    return started if started.is_file() and not started.parent.is_symlink() else run_dir / CONFIG


def accept_start(run_dir: Path, attempt: int) -> None:
    """Replace config.yaml, environment.json and mesh.svg of a run by those of its newest start at its first step.

    The config, which ranks read, is the last file to be replaced. Raises OSError.
    """
    folder, logs = run_dir / START, attempt_logs(run_dir, attempt)
    if folder.is_symlink() or not folder.is_dir():
        return
    for name, mode in ((MESH_PICTURE, BY_UMASK), (RECORD, PRIVATE), (CONFIG, BY_UMASK)):
        if (folder / name).is_file():
            content = read_regular(folder / name)
            for each in (run_dir, logs) if logs.is_dir() else (run_dir,):  # the copy restores a damaged first one
                keep_only_file(each / name)
                atomic_write(each / name, content, mode)
            (folder / name).unlink()
    for kept in (folder / BEFORE / name for name in names_in(folder / BEFORE)):
        if os.path.lexists(run_dir / kept.name):
            _remove_own(kept)
        else:
            kept.rename(run_dir / kept.name)
    _remove_own(folder)


def _remove_own(path: Path) -> None:
    """Remove a file, or a folder with its contents, of a run if it exists; a link is not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse_start(run_dir: Path, attempt: int) -> bool:
    """Restore the record of a run as it was before its newest start, attempt `attempt` or an earlier one of its job.

    Returns False if there was no run before, or if the start has taken a step. Raises OSError.
    """
    folder = run_dir / START
    if folder.is_symlink() or not (folder / CONFIG).is_file():
        return False
    first = read_json(folder / RECORD).get("attempt")
    before = attempt_logs(run_dir, (first if isinstance(first, int) else attempt) - 1) / RESULT
    (folder / CONFIG).unlink()
    for kept in (folder / BEFORE / name for name in names_in(folder / BEFORE)):
        _remove_own(run_dir / kept.name)
        kept.rename(run_dir / kept.name)
    if before.is_file() and not before.is_symlink():
        keep_only_file(run_dir / RESULT)
        before.replace(run_dir / RESULT)
    _remove_own(folder)
    return True


def read_result(run_dir: Path) -> dict[str, Any]:
    """Return result.json; empty if it is missing or cannot be read."""
    return read_json(run_dir / RESULT)


def record_result(run_dir: Path, values: Mapping[str, Any]) -> None:
    """Write result.json for a run whose recipe could not write it."""
    texts = {key: masked(value) for key, value in values.items() if isinstance(value, str)}
    atomic_write_json(run_dir / RESULT, {**values, **texts})


def atomic_write(path: Path, content: bytes | str, mode: int = BY_UMASK) -> None:
    """Write a file, sync it and rename it to `path`, so that neither a reader nor a crash finds a partial file.

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
    """Open a temporary file that is renamed to `path` at the end of the context, unless an exception is raised."""
    with atomic_path(path) as temporary, open_new(temporary, mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield an unpredictable path next to `path`; the file created there is renamed to `path` at the end.

    For functions that take a path, such as those that create a link; the content is not synced to disk. Use
    `atomic_file` otherwise.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}{token_hex(8)}")
    try:
        yield temporary
        if path.is_dir() and not path.is_symlink():
            set_aside(path, "a directory")
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(path)  # errors of write and close carry no file name
        raise
    _sync_folder(path.parent)


@contextmanager
def disk_errors_named(file: Path) -> Iterator[None]:
    """Add the file and the free disk space to an OSError, since one raised by closing a file states neither."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(file.parent).free
        raise OSError(error.errno, f"{error.strerror} ({free:,} bytes are free)", str(file)) from error


def temporaries(folder: Path) -> list[Path]:
    """Return the temporary files that killed writers left in `folder`; files of others may have similar names."""
    return [folder / name for name in names_in(folder) if _LEFT_FILE.fullmatch(name)]


def is_replaceable(file: Path, mark: str) -> bool:
    """Return whether a tool may replace a file: there is none, or a regular file that begins with its `mark`."""
    if not os.path.lexists(file):
        return True
    return not file.is_symlink() and mark in read_text(file)[: len(mark) + 1000]


def open_new(path: Path, mode: int = BY_UMASK) -> IO[bytes]:
    """Create a file for writing. Raises FileExistsError if the name exists, even as a dangling link."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb")


def open_append(path: Path, mode: int = BY_UMASK) -> IO[bytes]:
    """Open a file for appending, unbuffered. Anything else at `path`, such as a link, is set aside first."""
    keep_only_file(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.fdopen(os.open(path, flags, mode), "ab", buffering=0)


def create_marker(path: Path) -> None:
    """Create an empty file unless the name exists."""
    with suppress(FileExistsError):
        open_new(path, PRIVATE).close()


def read_text(path: Path) -> str:
    """Return the text of a small file of a run; empty if it is missing or no regular file, such as a pipe."""
    try:
        return read_regular(path).decode(errors="replace")
    except OSError:
        return ""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if it is missing or cannot be read."""
    try:
        values = load_json(path)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def take_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed, and return True; return False if the file system has no locks.

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
    """Set aside a directory, link, pipe or device at the path of a file, and report it on stderr."""
    with suppress(FileNotFoundError):
        kind = stat.S_IFMT(os.lstat(path).st_mode)
        if kind != stat.S_IFREG:
            set_aside(path, {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link"}.get(kind, "no regular file"))


def keep_only_folder(path: Path) -> None:
    """Set aside anything at the path of a folder that is not one, such as a link, and report it on stderr."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
        with suppress(FileNotFoundError):  # another rank was faster
            set_aside(path, "a link" if path.is_symlink() else "no directory")


def own_folder(path: Path, mode: int = 0o777) -> Path:
    """Create a folder of a run unless it exists, and return it. Anything else there is set aside first.

    The folders above it up to the run directory must be the run's own, too: call this for each of them, outermost
    first.
    """
    keep_only_folder(path)
    path.mkdir(mode, parents=True, exist_ok=True)
    return path


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder of a run, sorted; none if there is something else at its path, such as a link."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return sorted(os.listdir(descriptor))
    finally:
        os.close(descriptor)


def numbers_in(folder: Path, prefix: str = "") -> list[int]:
    """Return the numbers of the names PREFIX0, PREFIX1, ... in a folder of a run; `names_in` lists it.

    Digits other than those of ASCII are no number of this program's, nor is one with leading zeros.
    """
    numbers = re.compile(rf"{re.escape(prefix)}(0|[1-9][0-9]*)")
    return [int(found[1]) for name in names_in(folder) if (found := numbers.fullmatch(name))]


def set_aside(path: Path, reason: str) -> Path:
    """Rename a damaged file to NAME.damaged (or NAME.damaged-2, ...), report it on stderr, and return the new path."""
    name, number = f"{path.name}.damaged", 1
    while os.path.lexists(path.with_name(name)):
        number += 1
        name = f"{path.name}.damaged-{number}"
    path.rename(path.with_name(name))
    print_text(f"{path}: is {reason}; moved to {name}", file=sys.stderr, flush=True)
    return path.with_name(name)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object as strict JSON: NaN and infinite values become null and move to the object at `nonfinite`.

    Each object within the object has a `nonfinite` of its own.
    """
    nonfinite = {
        key: str(value) for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)
    }
    finite_values = {
        key: None if key in nonfinite else finite(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }
    return finite_values | ({NONFINITE: nonfinite} if nonfinite else {})


def _sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk, if the file system supports it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
