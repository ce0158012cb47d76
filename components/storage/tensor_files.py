"""Files of tensors (safetensors): written as a stream, verified as they are read; numbers known about unchanged files.

Exports, adapters, token shards and stored teachers are written here: safetensors' `save_file` writes the same bytes,
but from memory. Checkpoints use the writer of torch.distributed.checkpoint. Imports no numpy.

Numbers computed from files, such as hashes, are kept on disk next to the token cache, so that a start need not read
unchanged files again. A number is valid while size, inode and time of modification of its file do not change. A change
within the resolution of the clock of a file system would be missed, so numbers about a file that was modified in the
last seconds are not kept. Damage of a disk that changes none of them is not noticed either.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import xxhash

from components.protocol.errors import ConfigError
from components.protocol.run_files import PRIVATE, atomic_write_json, read_json
from components.protocol.safe_parsing import parse_json

_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
"""Bytes per element, by dtype name in a safetensors header."""
_HASHED_BYTES = 1 << 20
"""Bytes of a block with a hash of its own, which is verified before any of its bytes is used."""
_DIGITS = 16  # of a 64-bit hash
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library
SUFFIX = ".known.json"
_RECENT_SECONDS = 5.0
"""Age below which a file may be modified again without a change of its time of modification (NFS, FAT: 2 s)."""


class OpenFile:
    """Read-only file that is closed when the last reference to it is gone."""

    def __init__(
        self, path: Path, kind: str = "token cache", remedy: str = "start the run again, which rebuilds it"
    ) -> None:
        """Open a file. Raises OSError, also for a pipe or a device, from which a read may never return.

        Args:
            kind, remedy: What the file is and what to do if it is damaged, for messages.
        """
        self._name, self._kind, self._remedy = str(path), kind, remedy
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", self._name)
        self.size = status.st_size

    def read(self, count: int, offset: int) -> bytes:
        """Return `count` bytes. Raises OSError if the file is shorter."""
        content = bytearray(count)
        self.read_into(memoryview(content), offset)
        return bytes(content)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`. Raises OSError with the file name if it is shorter or cannot be read."""
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[filled:]], offset + filled)
            except OSError as error:
                raise OSError(error.errno, f"{self._kind}: {error.strerror}", self._name) from error
            if count == 0:
                raise OSError(
                    errno.EIO,
                    f"{self._kind} truncated: it has {offset + filled:,} bytes, at least {offset + len(buffer):,} were "
                    f"written; {self._remedy}",
                    self._name,
                )
            filled += count

    def damaged(self, what: str) -> ConfigError:
        """Return the error for content that cannot be what was written."""
        return ConfigError(f"{self._name}: {self._kind} damaged: {what}; {self._remedy}")


class BlockHashes:
    """Hashes of the consecutive blocks of _HASHED_BYTES of data that is written or read in any pieces."""

    def __init__(self) -> None:
        self._digest, self._open = xxhash.xxh3_64(), 0
        self._complete: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        """Hash further data."""
        view = memoryview(data).cast("B")
        while view:
            part = view[: _HASHED_BYTES - self._open]
            self._digest.update(part)
            self._open += len(part)
            view = view[len(part) :]
            if self._open == _HASHED_BYTES:
                self._complete.append(self._digest.hexdigest())
                self._digest, self._open = xxhash.xxh3_64(), 0

    def hexdigest(self) -> str:
        """Return the hashes of all blocks, 16 digits each; the last block may be shorter."""
        return "".join(self._complete) + (self._digest.hexdigest() if self._open else "")

    @staticmethod
    def placeholder(size: int) -> str:
        """Return a text as long as the hashes of `size` bytes."""
        return "0" * (_DIGITS * -(-size // _HASHED_BYTES))


class VerifiedFile(OpenFile):
    """File of which each block is compared with its hash when it is first read.

    A read of a few rows thus costs a read of their blocks: about 0.2 s per GB that is used for the first time, and
    nothing for what is not used.
    """

    def __init__(self, file: OpenFile, begin: int, end: int, hashes: str) -> None:
        """Verify the bytes from `begin` to `end`, whose hashes `BlockHashes` returned; others are read as they are.

        Raises ConfigError if there are not as many hashes as blocks.
        """
        self._file, self._begin, self._end, self._hashes = file, begin, end, hashes
        self._verified = set[int]()
        self.size = file.size
        if len(hashes) != len(BlockHashes.placeholder(end - begin)):
            raise file.damaged(f"it has {end - begin:,} bytes of values, and {len(hashes) // _DIGITS:,} hashes of them")

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`. Raises ConfigError for a damaged block, or OSError."""
        first = max(offset - self._begin, 0) // _HASHED_BYTES
        last = min(offset + len(buffer), self._end) - self._begin - 1
        for number in range(first, last // _HASHED_BYTES + 1):
            if number not in self._verified:
                begin = self._begin + number * _HASHED_BYTES
                end = min(begin + _HASHED_BYTES, self._end)
                block = bytearray(end - begin)
                self._file.read_into(memoryview(block), begin)
                if xxhash.xxh3_64_hexdigest(block) != self._hashes[number * _DIGITS : (number + 1) * _DIGITS]:
                    raise self.damaged(f"its bytes {begin:,} to {end:,} are not those that were written")
                self._verified.add(number)
        self._file.read_into(buffer, offset)

    def damaged(self, what: str) -> ConfigError:
        """Return the error for content that cannot be what was written."""
        return self._file.damaged(what)


class TensorEntry(NamedTuple):
    """Shape of a tensor, and its dtype as named in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, and the bytes of the file that hold it, [begin, end)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _SafetensorsHeader(NamedTuple):
    """Header of a safetensors file."""

    metadata: dict[str, str]
    tensors: dict[str, StoredTensor]
    data_at: int
    """Byte at which the tensors begin."""


def read_header(file: OpenFile) -> _SafetensorsHeader:
    """Read the header of a safetensors file, as strictly as the safetensors library.

    Raises ValueError if it is damaged or the file has not the bytes that it declares, or OSError.
    """
    size = int.from_bytes(file.read(8, 0), "little") if file.size >= 8 else 0
    if not 0 < size <= min(file.size - 8, _LARGEST_HEADER):
        raise ValueError("it is not a safetensors file")
    header = parse_json(file.read(size, 8))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata are no texts")
    tensors = {name: _stored_tensor(name, entry, 8 + size) for name, entry in header.items()}
    end = 8 + size
    for name, tensor in sorted(tensors.items(), key=lambda each: each[1][2:]):
        if tensor.begin != end:
            raise ValueError(f"its header declares a gap or an overlap before the tensor {name!r}")
        end = tensor.end
    if end != file.size:
        raise ValueError(f"it has {file.size:,} bytes, its header declares {end:,}")
    return _SafetensorsHeader(metadata, tensors, 8 + size)


def _stored_tensor(name: str, entry: Any, data_at: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        sizes = (*shape, begin, end)
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
            raise ValueError("must be integers of at least 0")
        if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise ValueError(f"{end - begin} bytes are not those of its shape")
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"its header declares an invalid tensor {name!r} ({error})") from error
    return StoredTensor(dtype, shape, data_at + begin, data_at + end)


class SafetensorsWriter:
    """Writer of one file. The header comes first and declares all tensors; their values may be written in any order."""

    def __init__(self, file: IO[bytes], entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
        """Write the header for `entries`, by tensor name. Raises OSError.

        Larger dtypes come first in the file, so that every tensor is aligned when the file is memory-mapped.
        """
        self._file, self._entries = file, entries
        self._offsets: dict[str, int] = {}
        end = 0
        for name in sorted(entries, key=lambda name: (-_ITEM_BYTES[entries[name].dtype], name)):
            self._offsets[name], end = end, end + entries[name].bytes
        self._header_bytes = self._write_header(metadata)

    def write(self, name: str, blocks: Iterable[bytes | memoryview], hashes: BlockHashes | None = None) -> None:
        """Write the values of a tensor, given as consecutive blocks, and add them to `hashes`.

        Raises:
            OSError: The file could not be written.
            ValueError: The total size of the blocks differs from the size of the declared tensor.
        """
        start, size = self._header_bytes + self._offsets[name], self._entries[name].bytes
        self._file.seek(start)
        for block in blocks:
            self._file.write(block)
            if hashes is not None:
                hashes.update(block)
        if self._file.tell() != start + size:
            raise ValueError(f"{name}: got {self._file.tell() - start} bytes, expected {size}")

    def write_part(self, name: str, begin: int, part: bytes | memoryview) -> None:
        """Write a part of a tensor from its byte `begin` on. The caller writes all parts of all tensors.

        Raises:
            OSError: The file could not be written.
            ValueError: The part does not end within the declared tensor.
        """
        if begin + len(part) > self._entries[name].bytes:
            raise ValueError(
                f"{name}: bytes {begin} to {begin + len(part)} are not within its {self._entries[name].bytes}"
            )
        self._file.seek(self._header_bytes + self._offsets[name] + begin)
        self._file.write(part)

    def replace_metadata(self, metadata: Mapping[str, str]) -> None:
        """Write the header again with other metadata. Raises OSError, or ValueError if the header's length changes."""
        if self._write_header(metadata) != self._header_bytes:
            raise ValueError("new metadata must have the same encoded length as the metadata that it replaces")

    def _write_header(self, metadata: Mapping[str, str]) -> int:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        for name, start in self._offsets.items():
            entry = self._entries[name]
            offsets = [start, start + entry.bytes]
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._file.seek(0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        return 8 + len(text)


class KnownNumbers:
    """Cached numbers of some files. If its file does not exist or cannot be written, nothing is cached."""

    def __init__(self, store: Path, files: Iterable[Path]) -> None:
        """`store`: Path of the file with the numbers; its time of modification is that of its last use.

        Raises OSError if one of `files` is missing.
        """
        self._store, self._files = store, [*files]
        self._stamps = self._stamps_now()
        stored = read_json(store)
        values = stored.get("values")
        self._values: dict[str, Any] = {}
        if isinstance(values, dict) and stored == self._stored(values):
            self._values = values
        with contextlib.suppress(OSError):  # it does not exist, or the folder is read-only
            os.utime(store)

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the JSON value with this name, after computing and storing it if it is not known.

        Raises whatever `compute` raises.
        """
        if name not in self._values:
            self._values[name] = compute()
            with contextlib.suppress(OSError):
                if self._stamps == self._stamps_now() and time.time() - self._last_change > _RECENT_SECONDS:
                    atomic_write_json(self._store, self._stored(self._values), PRIVATE)
        return self._values[name]

    def _stored(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the content of the file with these values, whose hash detects damage."""
        content = {"stamps": self._stamps, "values": values}
        return content | {"hash": xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())}

    def _stamps_now(self) -> list[list[Any]]:
        stamps, self._last_change = [], 0.0
        for file in self._files:
            status = file.stat()
            stamps.append([str(file), status.st_size, status.st_ino, status.st_mtime_ns])
            self._last_change = max(self._last_change, status.st_mtime)
        return stamps
