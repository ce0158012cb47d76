"""The manifest of a checkpoint: which files it consists of, down to their bits. Written last, trusted alone."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "manifest.json"
FORMAT = 1
BLOCK_BYTES = 64 * 1024**2
"""Bytes per hash: the unit in which ranks share the work of verifying."""


class ManifestError(ValueError):
    """A folder whose manifest is missing or damaged: not a complete checkpoint."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint."""

    bytes: int
    sha256: list[str]
    """One hash per block of 64 MiB."""


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
        body = {"format": FORMAT, **asdict(self)}
        write_json(folder / MANIFEST, {"sha256": _digest(body), "body": body})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read that of `folder`. Raises ManifestError."""
        try:
            written = json.loads((folder / MANIFEST).read_text())
            body = written["body"]
            if written["sha256"] != _digest(body):
                raise ManifestError(f"{MANIFEST} does not match its own hash")
            if body.pop("format") != FORMAT:
                raise ManifestError(f"{MANIFEST} has a format that this version does not know")
            files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
            manifest = cls(**body, files=files)
        except FileNotFoundError as error:
            raise ManifestError(f"{MANIFEST} is missing") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
        if any(Path(name).name != name for name in files):
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
        strangers = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in self.files)
        return problems + [f"{name} does not belong to it" for name in strangers]

    def check_hashes(self, folder: Path, rank: int, world: int) -> list[str]:
        """Return which files of `folder` have other contents, looking at every `world`-th block from `rank` on."""
        blocks = [
            (name, index, digest) for name, record in self.files.items() for index, digest in enumerate(record.sha256)
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


def record_file(path: Path) -> FileRecord:
    """Hash a file as it is on disk now."""
    return FileRecord(path.stat().st_size, [hashlib.sha256(block).hexdigest() for block in _blocks(path)])


def write_json(path: Path, value: Any) -> None:
    """Write a file of JSON and wait until it is on disk."""
    with path.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_of(file: BinaryIO, count: int) -> str:
    """Hash the next `count` bytes, or what is left, without holding them all."""
    digest = hashlib.sha256()
    while count and (part := file.read(min(count, 1024**2))):
        digest.update(part)
        count -= len(part)
    return digest.hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block
