"""The manifest of a checkpoint, written last, and the checkpoints of a run directory: problems, retention, removal.

The manifest lists files with sizes and hashes. Imports no torch. CheckpointError is raised on all ranks. The names of
checkpoints and of their files are in components/protocol/run_files.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from components.config.schema.run import CheckpointConfig
from components.protocol.errors import ConfigError
from components.protocol.failures import StatedFailure
from components.protocol.run_files import (
    CHECKPOINT_MANIFEST,
    CHECKPOINTS,
    TEMPORARY,
    checkpoint_folders,
    temporary_name,
    unfinished_checkpoints,
)
from components.protocol.safe_parsing import LARGEST, parse_json, read_regular
from components.storage.object_store import is_plain_name, shown_names
from components.watch.faults import fault_point

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FORMAT = 2
BLOCK_BYTES = 64 * 1024**2
"""Bytes per hash, and the unit in which ranks share the work of verifying."""
_READ_BYTES = 1024**2
"""Bytes per read while verifying."""
_DAMAGE = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EFBIG}
"""Errors of opening a path that is no file. After others (EIO, ESTALE, EACCES) the file may be intact."""
_Bytes = bytes  # within the class, `bytes` is a property
BASE_FINGERPRINT = "frozen"
"""Key in state.json of the fingerprint of a LoRA run's base weights, which are neither trained nor saved."""


class ManifestError(ValueError):
    """A missing or damaged manifest: the folder is not a complete checkpoint."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and hashes of one file."""

    bytes: int
    xxh3: list[str]
    """A 128-bit xxh3 hash per block of 64 MiB. It detects corruption, not tampering: whoever can change a file can
    change the manifest too. A cryptographic hash would add no protection and take half the time of a save.
    """


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents and origin of a checkpoint."""

    step: int
    serial: int
    """Position of the checkpoint in the run's order of publication; the highest is the newest."""
    mesh: dict[str, int]
    """Size of each axis of the device mesh that wrote it, and the number of processes as `world`."""
    versions: dict[str, str]
    """Versions of python and torch."""
    files: dict[str, FileRecord]
    """Every file but the manifest, by name."""
    saved: str = ""
    """UTC time of the save, in ISO 8601."""
    eval_loss: float | None = None
    """Held-out loss at this step; None if this step was not evaluated."""
    ephemeral: bool = False
    """Saved by checkpoint.every_minutes: removed once a newer checkpoint is complete."""
    eval_reward: float | None = None
    """Held-out reward at this step; None if this step was not evaluated, or by its loss."""

    @property
    def bytes(self) -> int:
        """Total size of the files, without the manifest."""
        return sum(record.bytes for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Write the manifest to `folder` and fsync it."""
        body = {"format": _FORMAT, **self.body()}
        write_json(folder / CHECKPOINT_MANIFEST, {"sha256": _digest(body), "body": body})

    def body(self) -> dict[str, Any]:
        """Return the fields as JSON values; `from_body` is the inverse."""
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Manifest:
        """Return the manifest with these fields. Raises KeyError or TypeError for missing or unknown fields."""
        files = {name: FileRecord(**record) for name, record in body["files"].items()}
        return cls(**{**body, "files": files})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and validate the manifest of `folder`. Raises ManifestError."""
        try:
            text = read_regular(folder / CHECKPOINT_MANIFEST, LARGEST)
        except FileNotFoundError as error:
            missing = f"{CHECKPOINT_MANIFEST} is missing" if folder.is_dir() else "there is no such folder"
            raise ManifestError(missing) from error
        except OSError as error:
            raise ManifestError(f"{CHECKPOINT_MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
        return cls.parse(text)

    @classmethod
    def parse(cls, text: str | _Bytes) -> Manifest:
        """Validate the text of a manifest. Raises ManifestError."""
        try:
            written = parse_json(text)
            body = written["body"]
            if written["sha256"] != _digest(body):
                raise ManifestError(f"{CHECKPOINT_MANIFEST} does not match its own hash")
            if body.pop("format") != _FORMAT:
                raise ManifestError(f"{CHECKPOINT_MANIFEST} has a format that this version of Meshbook cannot read")
            manifest = cls.from_body(body)
            manifest._check_values()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError(f"{CHECKPOINT_MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
        return manifest

    def _check_values(self) -> None:
        """Raise ManifestError for names of files elsewhere, and ValueError for values that no save writes."""
        if strange := [name for name in self.files if not is_plain_name(name) or name == CHECKPOINT_MANIFEST]:
            raise ManifestError(f"{CHECKPOINT_MANIFEST} lists what no save writes: {shown_names(strange)}")
        sizes = {"step": self.step, "serial": self.serial, **self.mesh}
        sizes |= {name: record.bytes for name, record in self.files.items()}
        if wrong := [name for name, size in sizes.items() if type(size) is not int or not 0 <= size < 1 << 63]:
            raise ValueError(f"no valid size: {shown_names(wrong)}")
        for name, record in self.files.items():
            if [type(digest) for digest in record.xxh3] != [str] * -(-record.bytes // BLOCK_BYTES):
                raise ValueError(f"not one hash per block: {shown_names([name])}")
        for name, value in (("eval_loss", self.eval_loss), ("eval_reward", self.eval_reward)):
            if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
                raise ValueError(f"{name} is no finite number")
        if type(self.ephemeral) is not bool:
            raise ValueError("ephemeral is not true or false")
        if self.saved:
            datetime.fromisoformat(self.saved)

    def check_sizes(self, folder: Path, rank: int = 0, world: int = 1) -> list[str]:
        """Return a line for each file of `folder` that is missing or of another size; nothing is read.

        Checks every `world`-th file, starting with number `rank`.
        """
        problems = []
        for name, record in list(self.files.items())[rank::world]:
            path = folder / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != record.bytes:
                problems.append(f"{name} has {path.stat().st_size} bytes instead of {record.bytes}")
        return problems

    def strangers(self, folder: Path) -> list[str]:
        """Return the names in `folder` that are not of the checkpoint; nothing reads them."""
        return sorted(path.name for path in folder.iterdir() if path.name not in {CHECKPOINT_MANIFEST, *self.files})

    def check_hashes(self, folder: Path, rank: int, world: int) -> list[str]:
        """Return the damaged files of `folder`; verify every `world`-th block, starting at block `rank`.

        Raises OSError, which names the file, if one cannot be read although it may be intact.
        """
        blocks = [
            (name, index, digest) for name, record in self.files.items() for index, digest in enumerate(record.xxh3)
        ]
        damaged: list[str] = []
        for name, index, digest in blocks[rank::world]:
            try:
                with (folder / name).open("rb") as file:
                    file.seek(index * BLOCK_BYTES)
                    same = _hash_of(file, BLOCK_BYTES) == digest
            except OSError as error:
                if may_be_intact(error):
                    raise OSError(error.errno, error.strerror, str(folder / name)) from error
                damaged.append(f"{name} cannot be read ({error})")
                continue
            if not same:
                damaged.append(f"{name} is damaged")
        return list(dict.fromkeys(damaged))


def may_be_intact(error: BaseException | None) -> bool:
    """Return whether a file that could not be read for this reason may be intact; a failed read is no damage."""
    return isinstance(error, OSError) and error.errno not in _DAMAGE


class HashedFile(io.BufferedWriter):
    """New file that hashes the data as it is written, and adds its record to `records` when it is closed.

    The hashes are those of the intended data, so that a later verification detects a write that went wrong on its way
    to the disk. Reading the file back right after the write would only return the page cache.
    """

    def __init__(self, path: Path, records: dict[str, FileRecord]) -> None:
        super().__init__(io.FileIO(path, "xb"))  # x: fails if the path exists, so no planted symlink is followed
        self._records, self._file_name = records, path.name
        self._size = 0
        self._hashes: list[xxhash.xxh3_128] = []

    def write(self, data: Any) -> int:
        """Write and hash bytes; return their number."""
        view = memoryview(data).cast("B")
        count = super().write(view)
        self._hash(view)
        return count

    def fileno(self) -> int:
        """Flush Python's buffer and return the file descriptor.

        torch calls os.fsync(file.fileno()) without flushing first: a file shorter than the buffer would be synced
        empty.
        """
        self.flush()
        return super().fileno()

    def _hash(self, data: memoryview) -> None:
        while data:
            if self._size % BLOCK_BYTES == 0:
                self._hashes.append(xxhash.xxh3_128())
            chunk = data[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            self._hashes[-1].update(chunk)
            self._size += len(chunk)
            data = data[len(chunk) :]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        """Close the file; after an error without flushing, which would often raise a second error."""
        if error is None:
            self.close()
        else:
            self.raw.close()

    def close(self) -> None:
        """Close the file and add its record."""
        super().close()
        self._records[self._file_name] = FileRecord(self._size, [each.hexdigest() for each in self._hashes])


def write_json(path: Path, value: Any) -> dict[str, FileRecord]:
    """Write a JSON file, fsync it, and return its record by file name."""
    records: dict[str, FileRecord] = {}
    with HashedFile(path, records) as file:
        file.write(json.dumps(value).encode())
        os.fsync(file.fileno())
    return records


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that new names in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_of(file: BinaryIO, count: int) -> str:
    """Hash the next `count` bytes, or fewer at the end of the file, _READ_BYTES at a time."""
    digest = xxhash.xxh3_128()
    while count and (chunk := file.read(min(count, _READ_BYTES))):
        digest.update(chunk)
        count -= len(chunk)
    return digest.hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def saved_at(folder: Path) -> float | None:
    """Return when a checkpoint was saved, in seconds since the epoch; None for early manifests, which lack it."""
    saved = Manifest.read(folder).saved
    return datetime.fromisoformat(saved).timestamp() if saved else None


def random_file(rank: int) -> str:
    """Return the name of the file with the random state of `rank`."""
    return f"random-{rank:05}.json"


def published(folder: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints of a folder that have a valid manifest; the files it lists are not checked."""
    found = []
    for path in checkpoint_folders(folder):
        try:
            found.append((path, Manifest.read(path)))
        except ManifestError:
            continue
    return found


class CheckpointError(StatedFailure, RuntimeError):
    """A checkpoint could not be written or read; raised on every rank with every rank's reason."""


@contextlib.contextmanager
def fail_together(summary: str | Callable[[], str], group: ProcessGroup | None = None) -> Iterator[None]:
    """Run the body on all ranks of `group`; if it raises on any of them, raise CheckpointError on all.

    A CheckpointError from the body must be one that every rank raises: it is passed on without a collective.

    Args:
        summary: Start of the message, such as "checkpoint PATH could not be read", or a function that returns it. The
            function is called on all ranks, after a failure only, and may use collectives.
        group: Process group for the exchange of errors; None: the default group.
    """
    from components.json_collectives import all_gather_json  # here because it imports torch

    problem: Exception | None = None
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{_text(summary)}: {error}") from error
    except Exception as error:  # raised below, on every rank
        problem = error
    mine = None if problem is None else f"{type(problem).__name__}: {problem}"
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(all_gather_json(mine, group)) if text is not None]
    if failures:
        raise CheckpointError(f"{_text(summary)}: {'; '.join(failures)}") from problem


def _text(summary: str | Callable[[], str]) -> str:
    return summary if isinstance(summary, str) else summary()


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ListedCheckpoint:
    """A folder that is named like a checkpoint."""

    path: Path
    manifest: Manifest | None
    """None if it is missing or damaged."""
    problems: list[str]
    """Missing or damaged files; empty if the checkpoint is complete."""
    reasons: list[str]
    """Why the policy keeps it. Empty: it may be removed, or it is incomplete and so never removed."""


def list_checkpoints(run_dir: Path, policy: CheckpointConfig) -> list[ListedCheckpoint]:
    """Return an entry for each checkpoint folder, oldest first; only the sizes of files are checked."""
    entries = [_entry(path) for path in checkpoint_folders(run_dir / CHECKPOINTS)]
    entries.sort(key=lambda entry: (entry.manifest.serial if entry.manifest else 0, entry.path.name))
    _apply_policy(entries, policy)
    return entries


def newest_complete(run_dir: Path) -> tuple[Path, list[str]]:
    """Return the newest complete checkpoint of a run, and a line for each incomplete one, which might be newer.

    Only the sizes of files are checked. Raises ConfigError if no checkpoint is complete.
    """
    entries = list_checkpoints(run_dir, CheckpointConfig())
    incomplete = [
        f"checkpoint {entry.path} is skipped: {'; '.join(entry.problems)}" for entry in entries if entry.problems
    ]
    complete = [entry.path for entry in entries if not entry.problems]
    if not complete:
        found = f"; {'; '.join(incomplete)}" if incomplete else ""
        raise ConfigError(
            f"{run_dir}: no complete checkpoint in {CHECKPOINTS}/{found}; wait for the run's first save, or give "
            "another run"
        )
    return complete[-1], incomplete


def reasons_to_keep(complete: Sequence[Manifest], policy: CheckpointConfig) -> list[list[str]]:
    """Return the reasons to keep each complete checkpoint of a run, in the given order; empty: it may be removed.

    The newest checkpoint is always kept. An ephemeral one (checkpoint.every_minutes) is kept for no other reason, and
    does not count towards `policy.keep`. The best one has the highest held-out reward or, if none has a reward, the
    lowest held-out loss; of equal ones it is the earliest.
    """
    permanent = sorted((manifest for manifest in complete if not manifest.ephemeral), key=lambda m: -m.serial)
    newest = max((manifest.serial for manifest in complete), default=0)
    last = {manifest.serial for manifest in permanent[: policy.keep]}
    losses = [(manifest.eval_loss, manifest.serial) for manifest in permanent if manifest.eval_loss is not None]
    rewards = [(-manifest.eval_reward, manifest.serial) for manifest in permanent if manifest.eval_reward is not None]
    best = min(rewards or losses, default=(0.0, -1))[1] if policy.keep_best else None

    def reasons(manifest: Manifest) -> list[str]:
        eligible = policy.keep_every > 0 and not manifest.ephemeral
        conditions = {
            "newest": manifest.serial == newest,
            f"last {policy.keep}": manifest.serial in last,
            f"every {policy.keep_every}": eligible and manifest.step % policy.keep_every == 0,
            "best": manifest.serial == best,
        }
        return [reason for reason, holds in conditions.items() if holds]

    return [reasons(manifest) for manifest in complete]


def _apply_policy(entries: list[ListedCheckpoint], policy: CheckpointConfig) -> None:
    """Set `reasons` of each entry; only complete checkpoints count."""
    complete = [(entry, entry.manifest) for entry in entries if entry.manifest and not entry.problems]
    reasons = reasons_to_keep([manifest for _, manifest in complete], policy)
    for entry in entries:
        entry.reasons = []
    for (entry, _), reason in zip(complete, reasons, strict=True):
        entry.reasons = reason


def check_contents(entry: ListedCheckpoint) -> list[str]:
    """Compare every block of a checkpoint with its hash; store the problems in the entry and return them."""
    if entry.manifest and not entry.problems:
        try:
            entry.problems = entry.manifest.check_hashes(entry.path, rank=0, world=1)
        except OSError as error:
            entry.problems = [f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"]
    return entry.problems


def removable(run_dir: Path, policy: CheckpointConfig) -> tuple[list[ListedCheckpoint], list[Path]]:
    """Return the complete checkpoints that `policy` does not keep, and the leftovers of killed attempts.

    The newest checkpoint is verified block by block before the policy is applied. A damaged one is not counted, and the
    one before it is verified as the newest.
    """
    entries = list_checkpoints(run_dir, policy)
    for entry in reversed(entries):
        if entry.manifest and not check_contents(entry):
            break
    _apply_policy(entries, policy)
    return [e for e in entries if not e.problems and not e.reasons], unfinished_checkpoints(run_dir / CHECKPOINTS)


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints and the leftovers of killed attempts.

    Each folder is renamed first: a removal that is killed leaves no incomplete checkpoint under a published name, and
    the next removal deletes the rest. Files that no save wrote are kept, in a folder step_N.others.
    """
    renamed = []
    for path in paths:
        if TEMPORARY not in path.name:
            path = path.rename(path.with_name(temporary_name(path.name)))
        renamed.append(path)
    for path in renamed:
        fault_point("while_pruning")
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        elif manifest := _manifest_with_strangers(path):
            # The manifest last: the next removal needs it if this one is killed.
            for name in (*manifest.files, CHECKPOINT_MANIFEST):
                (path / name).unlink(missing_ok=True)
            kept, again = path.with_name(f"{path.name.partition(TEMPORARY)[0]}.others"), 1
            while os.path.lexists(kept):
                again += 1
                kept = kept.with_suffix(f".others-{again}")
            path.rename(kept)
            logger.warning("%s: kept what is not of the removed checkpoint: %s", kept, shown_names(os.listdir(kept)))
        else:
            shutil.rmtree(path)


def _manifest_with_strangers(path: Path) -> Manifest | None:
    """Return the manifest of a folder that also holds other files than those of the checkpoint; None otherwise."""
    try:
        manifest = Manifest.read(path)
    except ManifestError:
        return None
    return manifest if manifest.strangers(path) else None


def _entry(path: Path) -> ListedCheckpoint:
    try:
        manifest = Manifest.read(path)
    except ManifestError as error:
        return ListedCheckpoint(path, None, [str(error)], [])
    return ListedCheckpoint(path, manifest, manifest.check_sizes(path), [])
