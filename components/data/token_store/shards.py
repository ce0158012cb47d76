"""Token ids, document ends and loss masks of shards, read in slices with pread; files are opened on first use."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from components.data.token_store.manifest import Manifest, ShardEntry, ShardFormat, index_of, mask_of
from components.protocol.errors import ConfigError
from components.storage.tensor_files import OpenFile, VerifiedFile, read_header

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_ID_BYTES = {3: 2, 4: 4, 8: 2}
"""Bytes of an id by the dtype code of a .idx file: int16, int32 and uint16. Ids are not negative."""
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
NPY_MAGIC = b"\x93NUMPY"
_ID_BYTES = {("U16",): 2, ("U8", 3): 3, ("U32",): 4}  # by dtype of the ids, and their shape behind the first dim
_OPEN_SHARDS = 128  # each has one or two open files; the usual limit of a process is 1,024
_ENDS_AT_ONCE = 64
_REMEDY = "restore the file, or write the manifest again"


class _Ends(Protocol):
    """Exclusive ends of a shard's documents in tokens, ascending; read in contiguous slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class StoredColumn:
    """A one-dimensional array in an open file, read in slices.

    The file is not memory-mapped: truncation of a mapped file kills its reader with SIGBUS and without a message.
    Processes share the page cache either way.
    """

    def __init__(self, file: OpenFile, offset: int, length: int, dtype: type[np.generic] = np.uint8) -> None:
        self._dtype = np.dtype(dtype)
        self._file, self._offset, self._length = file, offset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(self._length)
        if step != 1:
            raise ValueError(f"step {step}: a stored column can only be read in contiguous slices (step 1)")
        values = np.empty(max(stop - start, 0), self._dtype)
        self._file.read_into(values.view(np.uint8).data, self._offset + start * self._dtype.itemsize)
        return values


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

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return the ids of a contiguous slice, (ids,) int64. Raises OSError."""
        start, stop, _ = part.indices(self._length)
        if self._id_bytes == 3:
            return as_ids(self.raw(start, max(start, stop)))
        values = np.empty(max(stop - start, 0), f"<u{self._id_bytes}")
        self._file.read_into(values.view(np.uint8).data, self._offset + start * self._id_bytes)
        return values.astype(np.int64)


def as_ids(raw: np.ndarray) -> np.ndarray:
    """Return ids, (ids,) int64, from their little-endian bytes, (ids, id_bytes) uint8."""
    if raw.shape[1] == 3:  # no dtype has three bytes
        raw = np.pad(raw, ((0, 0), (0, 1)))
    return np.ascontiguousarray(raw).view(f"<u{raw.shape[1]}").reshape(-1).astype(np.int64)


class _MegatronEnds:
    """Document ends of a .idx file: the start of the sequence that follows each document."""

    def __init__(self, file: OpenFile, index: _MegatronIndex, tokens: int) -> None:
        self._file, self._index, self._tokens = file, index, tokens
        self._pointers = StoredColumn(file, index.pointers_at, index.sequences, np.int64)
        self._documents = StoredColumn(file, index.documents_at, index.documents + 1, np.int64)

    def __len__(self) -> int:
        return self._index.documents

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        following = self._documents[start + 1 : stop + 1]  # sequence after each document, (documents,)
        if not len(following):
            return following
        first, last = int(following[0]), int(following[-1])
        if first < 0 or last > self._index.sequences or (np.diff(following) < 0).any():
            raise self._file.damaged("its documents do not consist of its sequences")
        pointers = self._pointers[first : last + 1] // self._index.id_bytes
        pointers = np.append(pointers, self._tokens)  # the last document is followed by no sequence
        return pointers[following - first]


class _MegatronIndex(NamedTuple):
    """Header of a .idx file, and the bytes at which its arrays begin."""

    id_bytes: int
    sequences: int
    documents: int
    pointers_at: int
    documents_at: int


def read_megatron_index(file: OpenFile, path: Path) -> _MegatronIndex:
    """Read the header of a .idx file. Raises ValueError if its format is not supported, or OSError."""
    size = _MEGATRON_HEADER.size
    magic, version, code, sequences, entries = _MEGATRON_HEADER.unpack(file.read(size, 0))
    if magic != _MEGATRON_MAGIC or version != 1:
        raise ValueError(f"{path}: is not a Megatron index of version 1")
    if code not in _MEGATRON_ID_BYTES:
        raise ValueError(f"{path}: ids have the dtype code {code}; supported are int16 (3), int32 (4) and uint16 (8)")
    pointers_at = size + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    if file.size < (declared := documents_at + 8 * entries):
        raise ValueError(f"{path}: has {file.size:,} bytes, its header declares {declared:,}")
    return _MegatronIndex(_MEGATRON_ID_BYTES[code], sequences, max(entries - 1, 0), pointers_at, documents_at)


class ShardHeader(NamedTuple):
    """Header of a shard in Meshbook's format."""

    metadata: dict[str, str]
    data_at: int
    """Byte at which the tensors begin."""
    ids_at: int
    id_bytes: int
    tokens: int
    ends_at: int
    documents: int
    mask_at: int | None
    """Byte at which the loss mask begins; it is the last tensor. None: there is none."""


def read_shard_header(file: OpenFile, path: Path) -> ShardHeader:
    """Read the header of a shard in Meshbook's format. Raises ValueError if it is none, or OSError."""
    try:
        header = read_header(file)
        ids, ends, mask = header.tensors.pop("ids"), header.tensors.pop("ends"), header.tensors.pop("mask", None)
    except (ValueError, LookupError) as error:
        raise ValueError(f"{path}: is not a shard in Meshbook's format ({error})") from error
    id_bytes = _ID_BYTES.get((ids.dtype, *ids.shape[1:]))
    if (
        id_bytes is None or not ids.shape or ends.dtype != "I64" or len(ends.shape) != 1 or header.tensors
        or (mask is not None and (mask.dtype != "BOOL" or mask.shape != ids.shape[:1] or mask.end != file.size))
    ):  # fmt: skip
        raise ValueError(
            f"{path}: is not a shard in Meshbook's format (ids of dtype {ids.dtype} and shape {ids.shape}, ends of "
            f"dtype {ends.dtype} and shape {ends.shape}, loss mask {mask and (mask.dtype, mask.shape)}, "
            f"{len(header.tensors)} other tensors)"
        )
    mask_at = None if mask is None else mask.begin
    sizes = (ids.begin, id_bytes, ids.shape[0], ends.begin, ends.shape[0])
    return ShardHeader(header.metadata, header.data_at, *sizes, mask_at)


def open_file(path: Path) -> OpenFile:
    """Open a file of a shard. Raises OSError."""
    return OpenFile(path, "token shard", _REMEDY)


def open_ends(
    format: ShardFormat, path: Path, file: OpenFile, tokens: int, open: Callable[[Path], OpenFile] = open_file
) -> _Ends | None:
    """Open the document ends that are stored for the shard at `path`; None for raw shards.

    Args:
        file: The open file of the ids.
        open: Opens other files of the shard.

    Raises ValueError if their format is not supported, or OSError.
    """
    if format is ShardFormat.meshbook:
        header = read_shard_header(file, path)
        return StoredColumn(file, header.ends_at, header.documents, np.int64)
    if format is ShardFormat.megatron:
        index_file = open(index_of(format, path))
        return _MegatronEnds(index_file, read_megatron_index(index_file, index_of(format, path)), tokens)
    if format is ShardFormat.datatrove:
        index_file = open(index_of(format, path))
        return StoredColumn(index_file, 0, index_file.size // 8, np.int64)
    return None


def open_mask(
    format: ShardFormat, path: Path, file: OpenFile, tokens: int, open: Callable[[Path], OpenFile] = open_file
) -> tuple[OpenFile, int] | None:
    """Open the loss mask of the shard at `path` and return its file, and the byte at which it begins; None without one.

    Arguments and errors are those of `open_ends`.
    """
    if format is ShardFormat.meshbook:
        begin = read_shard_header(file, path).mask_at
        return None if begin is None else (file, begin)
    mask_path = mask_of(path)
    try:
        mask = None if mask_path is None else open(mask_path)
    except FileNotFoundError:
        return None
    if mask is None:
        return None
    begin = mask.size - tokens
    header = mask.read(begin, 0) if 10 < begin < 1 << 16 else b""
    is_npy = header[:7] == NPY_MAGIC + b"\1" and begin == 10 + int.from_bytes(header[8:10], "little")
    if begin and not (is_npy and re.search(rb"'\|[bu]1'", header)):
        raise ValueError(f"{mask_path}: has {mask.size:,} bytes; the loss mask of {path.name} must have {tokens:,}")
    return mask, begin


class Shard:
    """An open shard."""

    def __init__(
        self,
        entry: ShardEntry,
        path: Path,
        document_end: int | None,
        open: Callable[[Path], OpenFile] = open_file,
    ) -> None:
        """Open the shard at `path`. Raises ConfigError if it is not that of the manifest, or OSError.

        Args:
            open: Opens a file of the shard.
        """
        file = open(path)
        if file.size != entry.bytes:
            raise file.damaged(f"it has {file.size:,} bytes, the manifest {entry.bytes:,}")

        def open_index(path: Path) -> OpenFile:
            index = open(path)
            return VerifiedFile(index, 0, index.size, entry.index_hashes)

        try:
            begin, end = entry.offset, entry.offset + entry.tokens * entry.id_bytes
            if entry.format is ShardFormat.meshbook:
                header = read_shard_header(file, path)
                if (header.ids_at, header.id_bytes, header.tokens) != (entry.offset, entry.id_bytes, entry.tokens):
                    raise ValueError("the ids of its header are not those of the manifest")
                begin, end = header.data_at, header.mask_at or file.size
            mask = open_mask(entry.format, path, file, entry.tokens, open) if entry.mask_hashes else None
            if entry.mask_hashes and mask is None:
                raise ValueError("the loss mask of the manifest is missing")
            self._mask = None
            if mask is not None:
                mask_file, at = mask
                mask_file = VerifiedFile(mask_file, at, at + entry.tokens, entry.mask_hashes)
                self._mask = StoredColumn(mask_file, at, entry.tokens)
            file = VerifiedFile(file, begin, end, entry.hashes)
            self._ends = open_ends(entry.format, path, file, entry.tokens, open_index)
        except ConfigError:
            raise
        except ValueError as error:
            raise file.damaged(str(error)) from error
        self._ids, self._file, self._entry = IdColumn(file, entry.offset, entry.id_bytes, entry.tokens), file, entry
        self._document_end = document_end
        for end in [] if self._ends is None or not len(self._ends) else [self._ends[:1][0], self._ends[-1:][0]]:
            if not 0 <= end <= entry.tokens:
                raise file.damaged(f"a document ends at token {end:,} of {entry.tokens:,}")

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Return the ids from `start` to `stop`, (stop - start,) int64. Raises ConfigError if damaged, or OSError."""
        ids = self._ids[start:stop]
        if len(ids) and ids.max() > self._entry.max_id:
            raise self._file.damaged(
                f"it holds the id {ids.max():,}, the largest of the manifest is {self._entry.max_id:,}"
            )
        return ids

    def is_target(self, start: int, stop: int) -> np.ndarray | None:
        """Return whether the loss mask marks each token from `start` to `stop` as a target, (stop - start,) bool.

        None: all are. Raises ConfigError if damaged, or OSError.
        """
        return None if self._mask is None else self._mask[start:stop] != 0

    def ends(self, start: int, ids: np.ndarray) -> list[int]:
        """Return the document ends e with start < e <= start + len(ids), ascending and distinct.

        Args:
            ids: The shard's ids from `start` on; searched for the id that ends documents if no ends are stored.

        Raises ConfigError if the stored ends do not ascend, or OSError.
        """
        if self._ends is not None:
            found = _ends_within(self._ends, start, start + len(ids))
            if any(last >= following for last, following in pairwise([start, *found])):
                raise self._file.damaged("its document ends do not ascend")
            return found
        if self._document_end is None:
            return []
        return (start + 1 + np.flatnonzero(ids == self._document_end)).tolist()


def _ends_within(ends: _Ends, start: int, stop: int) -> list[int]:
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
