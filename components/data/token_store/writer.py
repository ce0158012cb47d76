"""Writing of shards in Meshbook's format, and of the manifest of existing shards."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from components.data.token_store.formats import SUFFIXES, layout_of
from components.data.token_store.manifest import (
    DENSEST_WINDOWS,
    Manifest,
    ShardEntry,
    ShardFormat,
    Vocabulary,
    entry_of,
    write_manifest,
)
from components.data.token_store.shards import IdColumn, as_ids, index_of, open_ends, open_file, read_shard_header
from components.data.token_store.vocabulary import hash_of_tokenizer
from components.protocol.run_files import atomic_file
from components.protocol.safe_json import parse_json
from components.safetensors_writer import SafetensorsWriter, TensorEntry
from components.storage.stored_file import BlockHashes

logger = logging.getLogger(__name__)

_IDS_AT_ONCE = 1 << 22
_BYTES_AT_ONCE = 1 << 22
_DTYPES = {2: "U16", 3: "U8", 4: "U32"}  # three bytes: a tensor of shape (tokens, 3)
_ENTRY, _SETTINGS = "entry", "settings"


class _Summary:
    """Hash, largest id and document ends of a shard, from its ids in order."""

    def __init__(self, document_end: int | None = None) -> None:
        self.max_id = 0
        self._digest, self._document_end = xxhash.xxh3_128(), document_end
        self._ends: list[np.ndarray] = []
        self._tokens = 0

    def add(self, raw: np.ndarray) -> None:
        """Count further ids, given as bytes (ids, id_bytes)."""
        if not len(raw):
            return
        self._digest.update(np.ascontiguousarray(raw).data)
        ids = as_ids(raw)
        self.max_id = max(self.max_id, int(ids.max()))
        if self._document_end is not None:
            self._ends.append(self._tokens + 1 + np.flatnonzero(ids == self._document_end))
        self._tokens += len(ids)

    @property
    def found_ends(self) -> np.ndarray:
        """Ends of the documents that end with `document_end`, (ends,) int64."""
        return np.concatenate([np.zeros(0, np.int64), *self._ends])

    def numbers(self, ends: np.ndarray) -> dict[str, object]:
        """Return the manifest's numbers of the shard with these document ends, (ends,) int64."""
        digest = self._digest.copy()
        digest.update(np.ascontiguousarray(ends, np.int64).data)
        distinct = np.unique(ends[(ends > 0) & (ends <= self._tokens)])
        open_end = self._tokens > 0 and (len(distinct) == 0 or distinct[-1] < self._tokens)
        return {
            "tokens": self._tokens,
            "documents": len(distinct) + int(open_end),
            "max_id": self.max_id,
            "hash": digest.hexdigest(),
            "densest": densest_windows(distinct),
        }


def densest_windows(ends: np.ndarray) -> list[int]:
    """Return the largest number of `ends` (ends,), distinct and ascending, in any window of each manifest length."""
    numbers = np.arange(len(ends))
    return [
        int((np.searchsorted(ends, ends + length) - numbers).max()) if len(ends) else 0 for length in DENSEST_WINDOWS
    ]


def scan_shard(
    path: Path,
    *,
    format: ShardFormat,
    offset: int,
    id_bytes: int,
    tokens: int,
    document_end: int | None,
    report: Callable[[int], None] = lambda ids: None,
) -> ShardEntry:
    """Read a whole shard and its index and return its manifest entry, with `path` as given.

    Args:
        document_end: Id that ends the documents of a raw shard.
        report: Called with the number of ids after each part.

    Raises ValueError if the document ends are not ascending or not within the ids, or OSError.
    """
    file = open_file(path)
    column = IdColumn(file, offset, id_bytes, tokens)
    stored = open_ends(format, path, file, tokens)
    summary = _Summary(document_end if format is ShardFormat.raw else None)
    hashes, index_hashes = BlockHashes(), BlockHashes()
    if stored is not None and format is ShardFormat.meshbook:
        hashes.update(stored[:].data)  # in the order of the file
    elif stored is not None:
        index = open_file(index_of(format, path))
        for start in range(0, index.size, _BYTES_AT_ONCE):
            index_hashes.update(index.read(min(_BYTES_AT_ONCE, index.size - start), start))
    for start in range(0, tokens, _IDS_AT_ONCE):
        raw = column.raw(start, min(start + _IDS_AT_ONCE, tokens))
        summary.add(raw)
        hashes.update(raw.data)
        report(len(raw))
    ends = summary.found_ends if stored is None else stored[: len(stored)]
    if len(ends) and (ends[0] < 0 or ends[-1] > tokens or (np.diff(ends) < 0).any()):
        raise ValueError(f"{path}: its document ends are not ascending, or not within its {tokens:,} tokens")
    where = {"path": str(path), "format": format, "bytes": file.size, "offset": offset, "id_bytes": id_bytes}
    blocks = {"hashes": hashes.hexdigest(), "index_hashes": index_hashes.hexdigest()}
    return entry_of(summary.numbers(ends) | where | blocks)


def with_hashes(entry: ShardEntry) -> ShardEntry:
    """Return the entry of a shard in Meshbook's format with the hashes of its blocks.

    A shard of an earlier version, whose header has none, is read once. Raises ValueError if it is damaged, or OSError.
    """
    if entry.hashes or not entry.tokens:
        return entry
    scanned = scan_shard(
        Path(entry.path),
        format=entry.format,
        offset=entry.offset,
        id_bytes=entry.id_bytes,
        tokens=entry.tokens,
        document_end=None,
    )
    if scanned.hash != entry.hash:
        raise ValueError(
            f"{entry.path}: is damaged: its ids are not those that were written; remove it and write it again"
        )
    return scanned


def index_folder(folder: Path, tokenizer: Any, *, document_end: int | None = None, id_bytes: int | None = None) -> Path:
    """Write the manifest of the shards in a folder, sorted by name, and return its file. Reads every shard once.

    Args:
        tokenizer: The transformers tokenizer that the ids are of; runs compare its vocabulary with theirs.
        document_end: Id that ends documents in shards that store no ends: nanoGPT's, llm.c's, OLMo's.
        id_bytes: See `layout_of`.

    Files that look like shards and are not listed are named in a warning.

    Raises ValueError if a shard is damaged or not supported, or if there is none, or OSError.
    """
    folder = folder.resolve()
    entries, unread = [], {each for each in folder.rglob("*") if each.suffix.lower() in SUFFIXES and each.is_file()}
    for file in sorted(each for each in folder.iterdir() if each.suffix in SUFFIXES):
        if file.suffix == ".safetensors":
            stored = read_entry(file)
            entry = None if stored is None else with_hashes(stored[0])
        else:
            entry = scan_shard(file, **layout_of(file, id_bytes)._asdict(), document_end=document_end)
        if entry is not None:
            entries.append(replace(entry, path=file.name))
            unread.discard(file)
    if unread:
        listed = ", ".join(sorted(str(each.relative_to(folder)) for each in unread))
        logger.warning(
            "%s: not in the manifest, as they are no shards or not directly in the folder: %s", folder, listed
        )
    if not entries:
        raise ValueError(f"{folder}: has no shards, files that end in {', '.join(SUFFIXES)}")
    hashed = hash_of_tokenizer(tokenizer)
    vocabulary = None if hashed is None else Vocabulary(tokenizer.name_or_path, hashed)
    return write_manifest(Manifest(entries, vocabulary, document_end, folder))


def write_shard(
    path: Path, documents: Iterable[Iterable[list[int]]], id_bytes: int, settings: Mapping[str, object]
) -> ShardEntry:
    """Write a shard in Meshbook's format, atomically, and return its manifest entry.

    Args:
        documents: Ids of the documents, in batches.
        id_bytes: 2, 3 or 4.
        settings: What determines the content, stored in the header (`read_entry`).

    Raises ValueError if an id does not fit into `id_bytes`, or OSError.
    """
    summary, ends = _Summary(), [np.zeros(0, np.int64)]
    with ExitStack() as stack:
        ids_file = stack.enter_context(tempfile.TemporaryFile(dir=path.parent))
        for batch in documents:
            lists = [each for each in batch if each]
            if not lists:
                continue
            lengths = np.fromiter(map(len, lists), np.int64, len(lists))
            ids = np.fromiter(chain.from_iterable(lists), np.int64, int(lengths.sum()))
            if ids.min() < 0 or ids.max() >= 1 << 8 * id_bytes:
                raise ValueError(f"the id {ids.max():,} does not fit into {id_bytes} bytes")
            raw = ids.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :id_bytes]
            ids_file.write(np.ascontiguousarray(raw).data)
            ends.append(summary._tokens + np.cumsum(lengths))
            summary.add(raw)
        all_ends = np.concatenate(ends)
        numbers = summary.numbers(all_ends)
        tokens = summary._tokens
        shape = (tokens, 3) if id_bytes == 3 else (tokens,)
        entries = {"ids": TensorEntry(_DTYPES[id_bytes], shape), "ends": TensorEntry("I64", (len(all_ends),))}
        settings_text, hashes = json.dumps(dict(settings), sort_keys=True), BlockHashes()

        def metadata(hashes: str) -> dict[str, str]:
            return {_ENTRY: json.dumps({**numbers, "hashes": hashes}), _SETTINGS: settings_text}

        def hashed(blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
            for block in blocks:
                hashes.update(block)
                yield block

        with atomic_file(path) as output:
            size = sum(tensor.bytes for tensor in entries.values())
            writer = SafetensorsWriter(output, entries, metadata(BlockHashes.placeholder(size)))
            writer.write("ends", hashed([all_ends.data]))
            writer.write("ids", hashed(_blocks_of(ids_file)))
            writer.replace_metadata(metadata(hashes.hexdigest()))
    entry = read_entry(path)
    if entry is None:
        raise OSError(f"{path}: disappeared while it was written")
    return entry[0]


def read_entry(path: Path) -> tuple[ShardEntry, dict[str, object]] | None:
    """Return the manifest entry and the settings in the header of a shard in Meshbook's format.

    Returns None if the file does not exist. Raises ValueError if it is no such shard, or OSError.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return None
    header = read_shard_header(file, path)
    try:
        numbers, settings = (parse_json(header.metadata[name]) for name in (_ENTRY, _SETTINGS))
        where = {"path": str(path), "format": ShardFormat.meshbook, "bytes": file.size}
        return entry_of({**numbers, **where, "offset": header.ids_at, "id_bytes": header.id_bytes}), settings
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: is not a shard in Meshbook's format ({error!r})") from error


def _blocks_of(content: IO[bytes]) -> Iterator[bytes]:
    content.seek(0)
    while block := content.read(_BYTES_AT_ONCE):
        yield block
