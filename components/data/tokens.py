"""Tokenized samples concatenated in flat arrays, in memory or in a safetensors file.

Files are written incrementally and read in slices with pread, so that neither needs memory for all tokens.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import xxhash

from components.data.examples import IGNORED, Example
from components.protocol.run_files import PRIVATE, atomic_file
from components.safetensors_writer import ITEM_BYTES, SafetensorsWriter, TensorEntry
from components.storage.stored_file import SUFFIX, KnownNumbers, OpenFile, read_header

logger = logging.getLogger(__name__)

_VALUES_AT_ONCE = 1 << 20
"""Values per read when a whole column is scanned."""
_COPIED_AT_ONCE = 1 << 22  # bytes
_ENTRY, _TEMPORARY = (
    re.compile(r"[0-9a-f]{32}\.safetensors"),
    re.compile(r"\.[0-9a-f]{32}\.(tmp|safetensors\.tmp-[0-9a-f]{16})"),
)
_KNOWN = re.compile(r"[0-9a-f]{32}" + re.escape(SUFFIX))
_TEMPORARY_SECONDS = 24 * 3600  # a temporary file this old was left by a process that died


class Column(Protocol):
    """1-D array of integers, in memory or in a file from which each slice is read."""

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class Tokens(NamedTuple):
    """Samples after `trimmed`: sample i is `[starts[i] : stops[i]]` of both columns. 8 bytes per token."""

    ids: Column  # (tokens,) int32
    labels: Column  # (tokens,) int32
    starts: np.ndarray  # (samples,) int64
    stops: np.ndarray  # (samples,) int64
    known: KnownNumbers | None = None
    """Numbers about the file that holds the columns, so that a start reads no token; None: in memory."""

    @property
    def runs(self) -> Iterator[slice]:
        """Token ranges in which samples are contiguous."""
        gaps = np.flatnonzero(self.starts[1:] != self.stops[:-1]) + 1
        for first, last in zip([0, *gaps.tolist()], [*gaps.tolist(), len(self.starts)], strict=True):
            if last > first:
                yield slice(int(self.starts[first]), int(self.stops[last - 1]))

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids, labels and sample boundaries, independent of how the samples are stored."""
        return self._from_known("fingerprint", self._hash)

    @property
    def targets(self) -> int:
        """Number of tokens that contribute to the loss."""
        return self._from_known("targets", self._count_targets)

    def _from_known(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a number about these samples of the file, which may have been truncated or dropped."""
        if self.known is None:
            return compute()
        bounds = xxhash.xxh3_128(self.starts.tobytes())
        bounds.update(self.stops.tobytes())
        return self.known.get(f"{name} {bounds.hexdigest()}", compute)

    def _hash(self) -> str:
        digest = xxhash.xxh3_128()
        for column in (self.ids, self.labels):
            for piece in self._pieces:
                digest.update(column[piece].data)
        digest.update(np.concatenate([[0], np.cumsum(self.stops - self.starts)]).astype(np.int64).data)
        return digest.hexdigest()

    def _count_targets(self) -> int:
        return sum(int(np.count_nonzero(self.labels[piece] != IGNORED)) for piece in self._pieces)

    @property
    def _pieces(self) -> Iterator[slice]:
        """The runs, in slices of at most _VALUES_AT_ONCE tokens."""
        for run in self.runs:
            for start in range(run.start, run.stop, _VALUES_AT_ONCE):
                yield slice(start, min(start + _VALUES_AT_ONCE, run.stop))


def flattened(examples: Iterable[Example]) -> Tokens:
    """Concatenate samples."""
    ids, labels, ends = array("i"), array("i"), array("q", [0])
    for example in examples:
        ids.extend(example.input_ids)
        labels.extend(example.labels)
        ends.append(len(ids))
    bounds = np.asarray(ends, dtype=np.int64)
    return Tokens(np.asarray(ids, dtype=np.int32), np.asarray(labels, dtype=np.int32), bounds[:-1], bounds[1:])


def shortened(tokens: Tokens, seq_len: int, drop: bool) -> tuple[Tokens, np.ndarray]:
    """Truncate samples to `seq_len` tokens, or drop longer ones.

    A truncated sample ends at its last target token; one without a target is dropped. Only the boundaries change, no
    token is copied.

    Returns:
        The remaining samples, and the new length of every original sample, (samples,) int64; 0: dropped.
    """
    after = tokens.stops - tokens.starts
    long = np.flatnonzero(after > seq_len)
    after[long] = 0
    for sample in [] if drop else long.tolist():
        start = tokens.starts[sample]
        targets = np.flatnonzero(tokens.labels[start : start + seq_len] != IGNORED)
        after[sample] = targets[-1] + 1 if len(targets) else 0
    kept = after > 0
    starts = tokens.starts[kept]
    return Tokens(tokens.ids, tokens.labels, starts, starts + after[kept], tokens.known), after


class StoredColumn:
    """A one-dimensional array in an open file, read in slices.

    The file is not memory-mapped: truncation of a mapped file kills its reader with SIGBUS and without a message.
    Processes share the page cache either way.
    """

    def __init__(self, file: OpenFile, dtype: type[np.generic], offset: int, length: int) -> None:
        self.dtype = np.dtype(dtype)
        self._file, self._offset, self._length = file, offset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(self._length)
        if step != 1:
            raise ValueError(f"step {step}: a stored column can only be read in contiguous slices (step 1)")
        values = np.empty(max(stop - start, 0), self.dtype)
        self._file.read_into(values.view(np.uint8).data, self._offset + start * self.dtype.itemsize)
        return values

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)


def write_tokens(file: Path, parts: Iterable[Tokens], summary: Callable[[], str]) -> None:
    """Concatenate parts into a temporary file and rename it to `file`, with only one part in memory at a time.

    Args:
        summary: Returns text for the header, which `read_tokens` returns; called after the last part.

    Raises OSError if the folder cannot be written or its disk is full.
    """
    with contextlib.ExitStack() as stack:
        ids, labels, ends = (stack.enter_context(tempfile.TemporaryFile(dir=file.parent)) for _ in range(3))
        written = 0
        ends.write(np.zeros(1, np.int64).data)
        for part in parts:
            ids.write(part.ids[:].data)
            labels.write(part.labels[:].data)
            ends.write((part.stops + written).data)
            written += len(part.ids)
        columns: dict[str, tuple[str, IO[bytes]]] = {
            "ends": ("I64", ends),
            "ids": ("I32", ids),
            "labels": ("I32", labels),
        }
        with atomic_file(file, PRIVATE) as output:  # private because samples may be confidential
            _write_columns(output, columns, summary())


def read_tokens(file: Path) -> tuple[Tokens, str] | None:
    """Return the tokens and the summary of a file; ids and labels stay on disk and are read in slices.

    The content is only hashed if the file has changed since it was last read. Returns None if the file does not exist
    or is damaged; damage is logged.
    """
    try:
        known, content = KnownNumbers(file.with_suffix(SUFFIX), [file]), OpenFile(file)
        header = read_header(content)
        columns: dict[str, StoredColumn] = {}
        for name, code, dtype in (("ends", "I64", np.int64), ("ids", "I32", np.int32), ("labels", "I32", np.int32)):
            tensor = header.tensors[name]
            if tensor.dtype != code or len(tensor.shape) != 1:
                raise ValueError(f"{name} is a tensor of shape {tensor.shape} and dtype {tensor.dtype}")
            columns[name] = StoredColumn(content, dtype, tensor.begin, tensor.shape[0])
        metadata = header.metadata
        if metadata["hash"] == known.get("hash", lambda: _hash_of(metadata["summary"], columns.values())):
            ends = columns["ends"][:]
            return Tokens(columns["ids"], columns["labels"], ends[:-1], ends[1:], known), metadata["summary"]
        logger.warning("%s is damaged: its samples are tokenized again", file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("%s is damaged (%r): its samples are tokenized again", file, error)
    return None


def _hash_of(summary: str, columns: Iterable[StoredColumn]) -> str:
    digest = xxhash.xxh3_128(summary.encode())
    for column in columns:
        for start in range(0, len(column), _VALUES_AT_ONCE):
            digest.update(column[start : start + _VALUES_AT_ONCE].data)
    return digest.hexdigest()


def remove_expired(folder: Path, seconds: float) -> None:
    """Remove token files and known numbers unused for `seconds`, and temporary files of writers that were killed.

    A run that has such a file open continues: on Linux the content exists until the last process of the machine closes
    it. (NFS does not keep it for other machines, so a run there fails if it opened the file more than `seconds` ago.)

    Raises OSError if the folder cannot be listed.
    """
    now = time.time()
    for file in folder.iterdir():
        limit = (
            seconds
            if _ENTRY.fullmatch(file.name) or _KNOWN.fullmatch(file.name)
            else _TEMPORARY_SECONDS
            if _TEMPORARY.fullmatch(file.name)
            else math.inf
        )
        with contextlib.suppress(OSError):  # removed by another process, or owned by another user
            used = file.stat().st_mtime
            if _ENTRY.fullmatch(file.name) and (known := file.with_suffix(SUFFIX)).exists():
                used = max(used, known.stat().st_mtime)
            if now - used > limit:
                file.unlink()


def _write_columns(output: IO[bytes], columns: dict[str, tuple[str, IO[bytes]]], summary: str) -> None:
    """Write header and columns, then replace the zeros reserved in the header by the hash of the content."""
    digest = xxhash.xxh3_128(summary.encode())
    entries = {
        name: TensorEntry(dtype, (content.tell() // ITEM_BYTES[dtype],)) for name, (dtype, content) in columns.items()
    }
    writer = SafetensorsWriter(output, entries, {"summary": summary, "hash": "0" * 32})

    def blocks_of(content: IO[bytes]) -> Iterator[bytes]:
        content.seek(0)
        while block := content.read(_COPIED_AT_ONCE):
            digest.update(block)
            yield block

    for name, (_, content) in columns.items():
        writer.write(name, blocks_of(content))
    writer.replace_metadata({"summary": summary, "hash": digest.hexdigest()})
