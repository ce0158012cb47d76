"""Token ids and document ends of shards, read in slices with pread; files are opened on first use."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from components.data.token_store.manifest import Manifest, ShardEntry, ShardFormat
from components.data.tokens import OpenFile, StoredColumn

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_ID_BYTES = {3: 2, 4: 4, 8: 2}
"""Bytes of an id by the dtype code of a .idx file: int16, int32 and uint16. Ids are not negative."""
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
_OPEN_SHARDS = 128  # each has one or two open files; the usual limit of a process is 1,024
_ENDS_AT_ONCE = 64
_REMEDY = "restore the file, or write the manifest again"


class Ends(Protocol):
    """Exclusive ends of a shard's documents in tokens, ascending; read in contiguous slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class IdColumn:
    """Ids of 2, 3 or 4 bytes in an open file, little-endian and unsigned."""

    def __init__(self, file: OpenFile, offset: int, id_bytes: int, length: int) -> None:
        self._file, self._offset, self._id_bytes, self._length = file, offset, id_bytes, length

    def __len__(self) -> int:
        return self._length

    def raw(self, start: int, stop: int) -> np.ndarray:
        """Return the bytes of the ids from `start` to `stop`, (stop - start, id_bytes) uint8. Raises OSError."""
        values = np.empty((stop - start, self._id_bytes), np.uint8)
        self._file.read_into(values.reshape(-1).data, self._offset + start * self._id_bytes)
        return values

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids from `start` to `stop`, (stop - start,) int64. Raises OSError."""
        return as_ids(self.raw(start, stop))


def as_ids(raw: np.ndarray) -> np.ndarray:
    """Return ids, (ids,) int64, from their little-endian bytes, (ids, id_bytes) uint8."""
    if raw.shape[1] == 3:  # no dtype has three bytes
        raw = np.pad(raw, ((0, 0), (0, 1)))
    return np.ascontiguousarray(raw).view(f"<u{raw.shape[1]}").reshape(-1).astype(np.int64)


class _MegatronEnds:
    """Document ends of a .idx file: the start of the sequence that follows each document."""

    def __init__(self, file: OpenFile, index: MegatronIndex, tokens: int) -> None:
        self._index, self._tokens = index, tokens
        self._pointers = StoredColumn(file, np.int64, index.pointers_at, index.sequences)
        self._documents = StoredColumn(file, np.int64, index.documents_at, index.documents + 1)

    def __len__(self) -> int:
        return self._index.documents

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        following = self._documents[start + 1 : stop + 1]  # sequence after each document, (documents,)
        if not len(following):
            return following
        first, last = int(following[0]), int(following[-1])
        pointers = self._pointers[first : last + 1] // self._index.id_bytes
        pointers = np.append(pointers, self._tokens)  # the last document is followed by no sequence
        return pointers[following - first]


class MegatronIndex(NamedTuple):
    """Header of a .idx file, and the bytes at which its arrays begin."""

    id_bytes: int
    sequences: int
    documents: int
    pointers_at: int
    documents_at: int
    size: int
    """Bytes of the file that these arrays need."""


def read_megatron_index(file: OpenFile, path: Path) -> MegatronIndex:
    """Read the header of a .idx file. Raises ValueError if its format is not supported, or OSError."""
    size = _MEGATRON_HEADER.size
    magic, version, code, sequences, entries = _MEGATRON_HEADER.unpack(file.read(size, 0))
    if magic != MEGATRON_MAGIC or version != 1:
        raise ValueError(f"{path}: is not a Megatron index of version 1")
    if code not in MEGATRON_ID_BYTES:
        raise ValueError(f"{path}: ids have the dtype code {code}; supported are int16 (3), int32 (4) and uint16 (8)")
    pointers_at = size + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    return MegatronIndex(
        MEGATRON_ID_BYTES[code], sequences, max(entries - 1, 0), pointers_at, documents_at, documents_at + 8 * entries
    )


class ShardHeader(NamedTuple):
    """Header of a shard in Meshbook's format."""

    metadata: dict[str, str]
    ids_at: int
    id_bytes: int
    tokens: int
    ends_at: int
    documents: int


def read_shard_header(file: OpenFile, path: Path) -> ShardHeader:
    """Read the header of a shard in Meshbook's format. Raises ValueError if it is none, or OSError."""
    size = int.from_bytes(file.read(8, 0), "little")
    try:
        header = json.loads(file.read(size, 8)) if size < file.size else {}
        ids, ends, metadata = header["ids"], header["ends"], header["__metadata__"]
        tokens = ids["shape"][0]
        id_bytes = (ids["data_offsets"][1] - ids["data_offsets"][0]) // max(tokens, 1)
        last = 8 + size + max(ids["data_offsets"][1], ends["data_offsets"][1])
        found = ShardHeader(
            *(metadata, 8 + size + ids["data_offsets"][0], id_bytes, tokens),
            *(8 + size + ends["data_offsets"][0], ends["shape"][0]),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: is not a shard in Meshbook's format ({error!r})") from error
    if last != file.size:
        raise ValueError(f"{path}: has {file.size:,} bytes, its header declares {last:,}")
    return found


def open_file(path: Path) -> OpenFile:
    """Open a file of a shard. Raises OSError."""
    return OpenFile(path, "token shard", _REMEDY)


def open_ends(
    format: ShardFormat, path: Path, file: OpenFile, tokens: int, open: Callable[[Path], OpenFile] = open_file
) -> Ends | None:
    """Open the document ends that are stored for the shard at `path`; None for raw shards.

    Args:
        file: The open file of the ids.
        open: Opens other files of the shard.

    Raises ValueError if their format is not supported, or OSError.
    """
    if format is ShardFormat.meshbook:
        header = read_shard_header(file, path)
        return StoredColumn(file, np.int64, header.ends_at, header.documents)
    if format is ShardFormat.megatron:
        index_file = open(path.with_suffix(".idx"))
        return _MegatronEnds(index_file, read_megatron_index(index_file, path.with_suffix(".idx")), tokens)
    if format is ShardFormat.datatrove:
        index_file = open(datatrove_index(path))
        return StoredColumn(index_file, np.int64, 0, index_file.size // 8)
    return None


def datatrove_index(path: Path) -> Path:
    """Return the file with the document ends of a .ds file."""
    return path.with_name(f"{path.name}.index")


class Shard:
    """An open shard."""

    def __init__(
        self,
        entry: ShardEntry,
        path: Path,
        document_end: int | None,
        open: Callable[[Path], OpenFile] = open_file,
    ) -> None:
        """Open the shard at `path`. Raises OSError if it is missing or has another size than in the manifest.

        Args:
            open: Opens a file of the shard.
        """
        file = open(path)
        if file.size != entry.bytes:
            raise OSError(
                errno.EIO, f"token shard has {file.size:,} bytes, the manifest {entry.bytes:,}; {_REMEDY}", str(path)
            )
        self._ids = IdColumn(file, entry.offset, entry.id_bytes, entry.tokens)
        self._document_end = document_end
        try:
            self._ends = open_ends(entry.format, path, file, entry.tokens, open)
        except ValueError as error:
            raise OSError(errno.EIO, f"{error}; {_REMEDY}", str(path)) from error

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Return the ids from `start` to `stop`, (stop - start,) int64. Raises OSError."""
        return self._ids.read(start, stop)

    def ends(self, start: int, ids: np.ndarray) -> list[int]:
        """Return the document ends e with start < e <= start + len(ids), ascending and distinct.

        Args:
            ids: The shard's ids from `start` on; searched for the id that ends documents if no ends are stored.
        """
        if self._ends is not None:
            return ends_within(self._ends, start, start + len(ids))
        if self._document_end is None:
            return []
        return (start + 1 + np.flatnonzero(ids == self._document_end)).tolist()


def ends_within(ends: Ends, start: int, stop: int) -> list[int]:
    """Return the distinct ends e with start < e <= stop, found by bisection."""
    low, high = 0, len(ends)
    while low < high:  # the first end above `start`
        middle = (low + high) // 2
        if ends[middle : middle + 1][0] > start:
            high = middle
        else:
            low = middle + 1
    found = list[int]()
    while low < len(ends):
        part = ends[low : low + _ENDS_AT_ONCE]
        found += part[part <= stop].tolist()
        if part[-1] > stop:
            break
        low += len(part)
    return list(dict.fromkeys(found))


class ShardFiles:
    """The shards of a store, each opened on first use. The least recently used ones are closed."""

    def __init__(self, manifest: Manifest, open: Callable[[Path], OpenFile] = open_file) -> None:
        """`open`: Opens a file of a shard, by its path or, in an object store, by its path below the manifest's URL."""
        self._manifest, self._open_file = manifest, open
        self.open = lru_cache(maxsize=_OPEN_SHARDS)(self._open)
        """Return the shard with a number, open. Raises OSError."""

    def _open(self, number: int) -> Shard:
        entry = self._manifest.shards[number]
        path = self._manifest.file_of(entry) if self._manifest.url is None else Path(entry.path)
        return Shard(entry, path, self._manifest.document_end, self._open_file)
