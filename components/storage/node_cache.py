"""Objects and parts of objects on this node's disk, below a limit in bytes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from components.storage.object_store import ObjectStore, StoredObject, name_of

FOLDER = "objects"
"""Folder below data.cache."""
_TEMPORARY = ".tmp-"
_PART = re.compile(r"[0-9a-f]{32}/[0-9a-f]{16}\.part(\.tmp-[0-9a-f]{16})?")
_TEMPORARY_SECONDS = 24 * 3600  # a temporary file this old was left by a process that died
_HASH_BYTES = 16
_LOCKS = 256
_FRESH_SECONDS = 1.0  # a time of last use this recent is not written again


class NodeCache:
    """Folder that the processes of a node share. Entries appear by a rename and are never changed."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        """`limit_bytes`: The least recently used parts are removed beyond this total; None: no limit."""
        self._folder, self._limit = folder, limit_bytes
        self._unmeasured, self._is_new = 0, True
        self._verified: dict[Path, int] = {}
        """Inodes of the parts whose hash this process has compared."""

    def object(self, store: ObjectStore, source: StoredObject) -> Path:
        """Return a local copy of an object, which is downloaded unless it exists; other processes wait for it.

        Another version of the object is another entry. Raises OSError.
        """
        file = self._folder / self._key(source) / name_of(source.url)
        if not _has_size(file, source.bytes):
            with _locked(file.parent):
                if not _has_size(file, source.bytes):
                    for killed in file.parent.glob(f"*{_TEMPORARY}*"):
                        killed.unlink()
                    temporary = file.with_name(f"{file.name}{_TEMPORARY}{secrets.token_hex(8)}")
                    store.download(source, temporary)
                    os.replace(temporary, file)
        with contextlib.suppress(OSError):
            os.utime(file)
        return file

    def part(
        self, source: StoredObject, start: int, read: Callable[[], bytes], first: int = 0, last: int | None = None
    ) -> bytes:
        """Return the bytes from `first` to `last` of a part of an object, which `read` returns unless it is cached.

        Processes and threads that need the same part wait for the one that reads it. A cached part is verified by its
        hash when this process first uses it, and read again if it is damaged. A disk that cannot be written is no
        error: the part is returned and not kept.

        Args:
            start: Byte of the object at which the part begins.

        Raises OSError of `read`.
        """
        file = self._folder / self._key(source) / f"{start:016x}.part"
        if (found := self._cached(file, first, last)) is not None:
            return found
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(
                    _locked(self._folder, f".lock-{xxhash.xxh3_64_intdigest(str(file).encode()) % _LOCKS:03}")
                )
            if (found := self._cached(file, first, last)) is not None:
                return found
            data = read()
            self._keep(file, data)
        return data[first:last]

    def _keep(self, file: Path, data: bytes) -> None:
        """Write a part; on a disk that cannot be written, remove what was written, and old parts above the limit."""
        temporary = file.with_name(f"{file.name}{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_bytes(xxhash.xxh3_128_digest(data) + data)
            os.replace(temporary, file)
            self._account(len(data))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            with contextlib.suppress(OSError):
                self._account(self._limit or 0)

    def _cached(self, file: Path, first: int, last: int | None) -> bytes | None:
        """Return bytes of a cached part; None if it does not exist, is damaged or cannot be read."""
        try:
            with file.open("rb") as stored:
                status = os.fstat(stored.fileno())
                if self._verified.get(file) == status.st_ino and last is not None:
                    stored.seek(_HASH_BYTES + first)
                    data = stored.read(last - first)
                    if len(data) < last - first:
                        return None
                else:
                    digest, whole = stored.read(_HASH_BYTES), stored.read()
                    if digest != xxhash.xxh3_128_digest(whole):
                        return None
                    self._verified[file], data = status.st_ino, whole[first:last]
            if time.time() - status.st_mtime > _FRESH_SECONDS:
                os.utime(file)  # mtime is the time of last use
        except OSError:
            return None
        return data

    def _key(self, source: StoredObject) -> str:
        return xxhash.xxh3_128(f"{source.url} {source.version} {source.bytes}".encode()).hexdigest()

    def _account(self, added: int) -> None:
        """Remove the least recently used parts if the total approaches the limit.

        Each process measures the folder after 1/64 of the limit that it has added, and an eighth of the limit is left
        free, so eight processes that add parts at the same time stay below it.
        """
        if self._limit is None:
            return
        self._unmeasured += added
        if self._unmeasured < self._limit // 64 and not self._is_new:
            return
        self._unmeasured, self._is_new = 0, False
        parts = []
        for file in self._folder.glob("*/*.part*"):
            if not _PART.fullmatch(f"{file.parent.name}/{file.name}"):
                continue
            with contextlib.suppress(OSError):  # removed by another process
                status = file.stat()
                if _TEMPORARY not in file.name:
                    parts.append((status.st_mtime, status.st_size, file))
                elif time.time() - status.st_mtime > _TEMPORARY_SECONDS:
                    file.unlink()
        total = sum(size for _, size, _ in parts)
        if total <= self._limit * 7 // 8:
            return
        for _, size, file in sorted(parts):
            with contextlib.suppress(OSError):
                file.unlink()
            total -= size
            if total <= self._limit * 3 // 4:
                return


@contextlib.contextmanager
def _locked(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Hold an exclusive lock between the processes and threads that use a folder, which is created."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # samples may be confidential
    with (folder / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size
