"""The manifest of a checkpoint: which files it consists of, down to their bits. Written last, trusted alone."""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from components.protocol.run_files import read_regular

MANIFEST = "manifest.json"
FORMAT = 2
BLOCK_BYTES = 64 * 1024**2
"""Bytes per hash: the unit in which ranks share the work of verifying."""
READ_BYTES = 1024**2
"""Read at once to verify."""


class ManifestError(ValueError):
    """A folder whose manifest is missing or damaged: not a complete checkpoint."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint."""

    bytes: int
    xxh3: list[str]
    """One hash of 128 bits per block of 64 MiB. It finds what happened to a file, not who wants to deceive; whoever can
    write the file can write the manifest too, so that a cryptographic hash would promise no more, and cost half a save.
    """


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of, and where it comes from."""

    step: int
    serial: int
    """Checkpoints of a run in the order of their publication; the highest is the newest."""
    mesh: dict[str, int]
    """Axes of the device mesh that wrote it, and the number of processes as `world`."""
    versions: dict[str, str]
    files: dict[str, FileRecord]
    saved: str = ""
    """When, in UTC."""
    eval_loss: float | None = None
    """Evaluation loss of this very step; None where it was not evaluated."""
    ephemeral: bool = False
    """Saved because time had passed: not needed once there is a newer one."""

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(record.bytes for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Write it to `folder`, durably."""
        body = {"format": FORMAT, **self.body()}
        write_json(folder / MANIFEST, {"sha256": _digest(body), "body": body})

    def body(self) -> dict[str, Any]:
        """Return it as JSON values, of which `from_body` makes an equal one."""
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Manifest:
        """Return the manifest with these values. Raises KeyError or TypeError where they are not a manifest's."""
        files = {name: FileRecord(**record) for name, record in body["files"].items()}
        return cls(**{**body, "files": files})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read that of `folder`. Raises ManifestError."""
        try:
            written = json.loads(read_regular(folder / MANIFEST))
            body = written["body"]
            if written["sha256"] != _digest(body):
                raise ManifestError(f"{MANIFEST} does not match its own hash")
            if body.pop("format") != FORMAT:
                raise ManifestError(f"{MANIFEST} has a format that this version does not know")
            manifest = cls.from_body(body)
        except FileNotFoundError as error:
            missing = f"{MANIFEST} is missing" if folder.is_dir() else "there is no such folder"
            raise ManifestError(missing) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
        if any(Path(name).name != name for name in manifest.files):
            raise ManifestError(f"{MANIFEST} names files outside the folder")
        return manifest

    def check_sizes(self, folder: Path) -> list[str]:
        """Return what is wrong with the files of `folder` without reading them, file by file."""
        problems = []
        for name, record in self.files.items():
            path = folder / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != record.bytes:
                problems.append(f"{name} has {path.stat().st_size} bytes instead of {record.bytes}")
        known = {MANIFEST, *self.files}
        strangers = sorted(
            path.name
            for path in folder.iterdir()
            if path.suffix in (".safetensors", ".json") and path.name not in known
        )
        return problems + [f"{name} does not belong to it" for name in strangers]

    def check_hashes(self, folder: Path, rank: int, world: int) -> list[str]:
        """Return which files of `folder` have other contents, looking at every `world`-th block from `rank` on."""
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
                damaged.append(f"{name} cannot be read ({error})")
                continue
            if not same:
                damaged.append(f"{name} is damaged")
        return list(dict.fromkeys(damaged))


class HashedFile(io.BufferedWriter):
    """A new file that is hashed on its way to the disk, and recorded when it is closed.

    What is recorded is what was meant to be written, not what can be read back right after (from the same memory: the
    page cache answers). So a write that went wrong anywhere below is found by whoever verifies, and costs no reading.
    """

    def __init__(self, path: Path, records: dict[str, FileRecord]) -> None:
        super().__init__(io.FileIO(path, "xb"))  # x: never through a link that somebody planted
        self._records, self._file_name = records, path.name
        self._size = 0
        self._hashes: list[xxhash.xxh3_128] = []

    def write(self, data: Any) -> int:
        """Write bytes, like any file."""
        view = memoryview(data).cast("B")
        count = super().write(view)
        self._hash(view)
        return count

    def fileno(self) -> int:
        """Return the descriptor; what was written is with the system by then, not in Python's buffer.

        torch asks for it to fsync and does not flush before: of a file shorter than the buffer nothing was there yet.
        """
        self.flush()
        return super().fileno()

    def _hash(self, left: memoryview) -> None:
        while left:
            if self._size % BLOCK_BYTES == 0:
                self._hashes.append(xxhash.xxh3_128())
            part = left[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            self._hashes[-1].update(part)
            self._size += len(part)
            left = left[len(part) :]

    def close(self) -> None:
        """Close and record it."""
        super().close()
        self._records[self._file_name] = FileRecord(self._size, [each.hexdigest() for each in self._hashes])


def write_json(path: Path, value: Any) -> dict[str, FileRecord]:
    """Write a file of JSON, wait until it is on disk, and return its record by its name."""
    records: dict[str, FileRecord] = {}
    with HashedFile(path, records) as file:
        file.write(json.dumps(value).encode())
        os.fsync(file.fileno())
    return records


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_of(file: BinaryIO, count: int) -> str:
    """Hash the next `count` bytes, or what is left, without holding them all."""
    digest = xxhash.xxh3_128()
    while count and (part := file.read(min(count, READ_BYTES))):
        digest.update(part)
        count -= len(part)
    return digest.hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
