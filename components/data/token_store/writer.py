"""Writing of shards in Meshbook's format, and of the manifest of existing shards, also of other programs.

The other programs are Megatron, nanoGPT, llm.c, OLMo (.npy) and datatrove.
"""

from __future__ import annotations

import json
import logging
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash

from components.data.examples import IGNORED, Example
from components.data.token_store.manifest import (
    DENSEST_WINDOWS,
    Manifest,
    ShardEntry,
    ShardFormat,
    Vocabulary,
    entry_of,
    hash_of_tokenizer,
    index_of,
    mask_of,
    vocabulary_problems,
    write_manifest,
)
from components.data.token_store.shards import (
    NPY_MAGIC,
    IdColumn,
    ShardHeader,
    StoredColumn,
    as_ids,
    open_ends,
    open_file,
    open_mask,
    read_megatron_index,
    read_shard_header,
)
from components.protocol.run_files import BY_UMASK, atomic_file
from components.protocol.safe_parsing import parse_json, read_regular
from components.storage.tensor_files import BlockHashes, OpenFile, SafetensorsWriter, TensorEntry

logger = logging.getLogger(__name__)
_IDS_AT_ONCE = 1 << 20
_BYTES_AT_ONCE = 1 << 22
_DTYPES = {2: "U16", 3: "U8", 4: "U32"}  # three bytes: a tensor of shape (tokens, 3)
_ENTRY, _SETTINGS = "entry", "settings"
_SUFFIXES = (".safetensors", ".bin", ".npy", ".ds")
"""Suffixes of shards. A .bin file with a .idx file next to it is Megatron's, any other nanoGPT's or llm.c's."""
_LLMC_HEADER = 1024  # bytes: 256 int32, of which the first three are magic, version and number of tokens
_LLMC_ID_BYTES = {(20240520, 1): 2, (20240801, 7): 4}
_LARGEST_METADATA = 1 << 20  # bytes of the .metadata file of a .ds file
_GIVE_SIZE = "give id_bytes=2 for uint16 or 4 for uint32"


class _Summary:
    """Hash, largest id, document ends and loss mask of a shard, from its ids in order."""

    def __init__(self, document_end: int | None = None) -> None:
        self.max_id = 0
        self._digest, self._document_end = xxhash.xxh3_128(), document_end
        self._mask: xxhash.xxh3_128 | None = None
        self._ends: list[np.ndarray] = []
        self.tokens = 0

    def add(self, raw: np.ndarray) -> None:
        """Count further ids, given as bytes (ids, id_bytes)."""
        if not len(raw):
            return
        self._digest.update(np.ascontiguousarray(raw).data)
        ids = as_ids(raw)
        self.max_id = max(self.max_id, int(ids.max()))
        if self._document_end is not None:
            self._ends.append(self.tokens + 1 + np.flatnonzero(ids == self._document_end))
        self.tokens += len(ids)

    def add_mask(self, mask: np.ndarray) -> None:
        """Hash a further part of the loss mask (tokens,)."""
        self._mask = self._mask or xxhash.xxh3_128()
        self._mask.update(np.ascontiguousarray(mask != 0).data)

    @property
    def found_ends(self) -> np.ndarray:
        """Ends of the documents that end with `document_end`, (ends,) int64."""
        return np.concatenate([np.zeros(0, np.int64), *self._ends])

    def numbers(self, ends: np.ndarray) -> dict[str, object]:
        """Return the manifest's numbers of the shard with these document ends, (ends,) int64."""
        digest = self._digest.copy()
        digest.update(np.ascontiguousarray(ends, np.int64).data)
        digest.update(b"" if self._mask is None else self._mask.digest())
        distinct = np.unique(ends[(ends > 0) & (ends <= self.tokens)])
        open_end = self.tokens > 0 and (len(distinct) == 0 or distinct[-1] < self.tokens)
        return {
            "tokens": self.tokens,
            "documents": len(distinct) + int(open_end),
            "max_id": self.max_id,
            "hash": digest.hexdigest(),
            "densest": _densest_windows(distinct),
        }


def _densest_windows(ends: np.ndarray) -> list[int]:
    """Return the largest number of `ends` (ends,), distinct and ascending, in any window of each manifest length."""
    numbers = np.arange(len(ends))
    return [
        int((np.searchsorted(ends, ends + length) - numbers).max()) if len(ends) else 0 for length in DENSEST_WINDOWS
    ]


def _scan_shard(
    path: Path,
    *,
    format: ShardFormat,
    offset: int,
    id_bytes: int,
    tokens: int,
    document_end: int | None,
    report: Callable[[int], None] = lambda ids: None,
) -> ShardEntry:
    """Read a whole shard, its index and its loss mask, and return its manifest entry, with `path` as given.

    Args:
        document_end: Id that ends the documents of a raw shard.
        report: Called with the number of ids after each part.

    Raises ValueError if the document ends are not ascending or not within the ids, or OSError.
    """
    file = open_file(path)
    column = IdColumn(file, offset, id_bytes, tokens)
    stored, mask = open_ends(format, path, file, tokens), open_mask(format, path, file, tokens)
    summary = _Summary(document_end if format is ShardFormat.raw else None)
    hashes, index_hashes, mask_hashes = BlockHashes(), BlockHashes(), BlockHashes()
    if stored is not None and format is ShardFormat.meshbook:
        hashes.update(stored[:].data)  # in the order of the file
    elif stored is not None:
        index = open_file(index_of(format, path))
        for start in range(0, index.size, _BYTES_AT_ONCE):
            index_hashes.update(index.read(min(_BYTES_AT_ONCE, index.size - start), start))
    # In parts, since a shard may be larger than the memory.
    for start in range(0, tokens, _IDS_AT_ONCE):
        raw = column.raw(start, min(start + _IDS_AT_ONCE, tokens))
        summary.add(raw)
        hashes.update(raw.data)
        report(len(raw))
    if mask is not None:
        mask_column = StoredColumn(*mask, tokens)
        for start in range(0, tokens, _BYTES_AT_ONCE):
            part = mask_column[start : start + _BYTES_AT_ONCE]
            summary.add_mask(part)
            mask_hashes.update(part.data)
    ends = summary.found_ends if stored is None else stored[: len(stored)]
    if len(ends) and (ends[0] < 0 or ends[-1] > tokens or (np.diff(ends) < 0).any()):
        raise ValueError(f"{path}: its document ends are not ascending, or not within its {tokens:,} tokens")
    where = {"path": str(path), "format": format, "bytes": file.size, "offset": offset, "id_bytes": id_bytes}
    blocks = {"hashes": hashes, "index_hashes": index_hashes, "mask_hashes": mask_hashes}
    return entry_of(summary.numbers(ends) | where | {name: each.hexdigest() for name, each in blocks.items()})


def rescanned(path: Path, entry: ShardEntry) -> ShardEntry:
    """Return the entry of the shard at `path`, which has the layout of `entry`, from all of its content."""
    layout = _ShardLayout(entry.format, entry.offset, entry.id_bytes, entry.tokens)
    return _scan_shard(path, **layout._asdict(), document_end=None)


def has_foreign_shards(folder: Path) -> bool:
    """Return whether a folder directly holds files that may be shards of another program."""
    return any(each.suffix in _SUFFIXES[1:] for each in folder.glob("*.*"))


def index_folder(
    folder: Path,
    tokenizer: Any,
    *,
    document_end: int | None = None,
    id_bytes: int | None = None,
    report: Callable[[ShardEntry], object] = lambda entry: None,
) -> Path:
    """Write the manifest of the shards in a folder, sorted by name, and return its file. Reads every shard once.

    Args:
        tokenizer: The transformers tokenizer that the ids are of; runs compare its vocabulary with theirs.
        document_end: Id that ends documents in shards that store no ends: nanoGPT's, llm.c's, OLMo's.
        id_bytes: See `layout_of`.
        report: Called after each shard.

    Files that look like shards and are not listed are named in a warning.

    Raises ValueError if a shard is damaged or not supported, holds ids beyond the vocabulary, or if there is none, or
    OSError.
    """
    folder = folder.resolve()
    entries, unread = [], {each for each in folder.rglob("*") if each.suffix.lower() in _SUFFIXES and each.is_file()}
    unread -= {mask_of(each) for each in unread}  # read with their shards
    for file in sorted(each for each in unread if each.suffix in _SUFFIXES and each.parent == folder):
        if file.suffix == ".safetensors":
            stored = read_entry(file)
            entry = None if stored is None else stored[0]
        else:
            entry = _scan_shard(file, **layout_of(file, id_bytes)._asdict(), document_end=document_end)
        if entry is not None:
            entries.append(replace(entry, path=file.name))
            unread.discard(file)
            report(entries[-1])
    if unread:
        listed = ", ".join(sorted(str(each.relative_to(folder)) for each in unread))
        logger.warning(
            "%s: not in the manifest, as they are no shards or not directly in the folder: %s", folder, listed
        )
    if not entries:
        raise ValueError(f"{folder}: has no shards, files that end in {', '.join(_SUFFIXES)}")
    hashed = hash_of_tokenizer(tokenizer)
    vocabulary = None if hashed is None else Vocabulary(tokenizer.name_or_path, hashed)
    manifest = Manifest(entries, vocabulary, document_end, folder)
    if problems := vocabulary_problems(manifest, str(folder), size=len(tokenizer), tokenizer_hash=None):
        raise ValueError(problems[0])
    return write_manifest(manifest)


def id_bytes_of(tokenizer: Any) -> int:
    """Return the bytes that hold every id of a transformers tokenizer, 2 or 4; ids may have gaps."""
    return 2 if max(tokenizer.get_vocab().values(), default=0) < 1 << 16 else 4


def write_shard(
    path: Path,
    documents: Iterable[Sequence[list[int]] | Sequence[Example]],
    id_bytes: int,
    settings: Mapping[str, object],
    mode: int = BY_UMASK,
) -> ShardEntry:
    """Write a shard in Meshbook's format, atomically, and return its manifest entry.

    Args:
        documents: Ids of the documents, in batches; those without a token are left out. Or samples: all of them are
            documents of the shard, and a loss mask marks the tokens that have a label.
        id_bytes: 2, 3 or 4.
        settings: What determines the content, stored in the header (`read_entry`); read after the last document.
        mode: Permissions of the file.

    Raises ValueError if an id does not fit into `id_bytes`, or OSError.
    """
    summary, ends, has_mask = _Summary(), [np.zeros(0, np.int64)], False
    with ExitStack() as stack:
        # In temporary files, since the header, which comes first, has the sizes of all tensors.
        ids_file, mask_file = (stack.enter_context(tempfile.TemporaryFile(dir=path.parent)) for _ in range(2))
        for batch in documents:
            samples = [each for each in batch if isinstance(each, Example)]
            lists = [each.input_ids if isinstance(each, Example) else each for each in batch if each]
            lengths = np.fromiter(map(len, lists), np.int64, len(lists))
            ends.append(summary.tokens + np.cumsum(lengths))
            ids = np.fromiter(chain.from_iterable(lists), np.int64, int(lengths.sum()))
            if len(ids) and (ids.min() < 0 or ids.max() >= 1 << 8 * id_bytes):
                raise ValueError(f"the id {ids.max():,} does not fit into {id_bytes} bytes")
            raw = ids.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :id_bytes]
            ids_file.write(np.ascontiguousarray(raw).data)
            summary.add(raw)
            if samples:
                has_mask = True
                labels = np.fromiter(chain.from_iterable(sample.labels for sample in samples), np.int64, len(ids))
                mask_file.write((labels != IGNORED).data)
                summary.add_mask(labels != IGNORED)
        all_ends = np.concatenate(ends)
        shape = (summary.tokens, 3) if id_bytes == 3 else (summary.tokens,)
        tensors = {"ends": TensorEntry("I64", (len(all_ends),)), "ids": TensorEntry(_DTYPES[id_bytes], shape)}
        tensors |= {"mask": TensorEntry("BOOL", (summary.tokens,))} if has_mask else {}
        content: dict[str, Iterable[bytes | memoryview]] = {
            "ends": [all_ends.data], "ids": _blocks_of(ids_file), "mask": _blocks_of(mask_file)
        }  # fmt: skip
        with atomic_file(path, mode) as output:
            _write_tensors(
                output, tensors, content, summary.numbers(all_ends), json.dumps(dict(settings), sort_keys=True)
            )
    entry = read_entry(path)
    if entry is None:
        raise OSError(f"{path}: disappeared while it was written")
    return entry[0]


def _write_tensors(
    output: IO[bytes],
    tensors: Mapping[str, TensorEntry],
    content: Mapping[str, Iterable[bytes | memoryview]],
    numbers: Mapping[str, object],
    settings: str,
) -> None:
    """Write a shard's tensors, then the hashes of their blocks into the space reserved in the header."""
    mask_bytes = tensors["mask"].bytes if "mask" in tensors else 0
    sizes = {"hashes": sum(tensor.bytes for tensor in tensors.values()) - mask_bytes, "mask_hashes": mask_bytes}
    hashes = {name: BlockHashes() for name in sizes}

    def metadata(texts: Mapping[str, str]) -> dict[str, str]:
        return {_ENTRY: json.dumps({**numbers, **texts}), _SETTINGS: settings}

    writer = SafetensorsWriter(
        output, tensors, metadata({n: BlockHashes.placeholder(size) for n, size in sizes.items()})
    )
    for name in tensors:
        writer.write(name, content[name], hashes["mask_hashes" if name == "mask" else "hashes"])
    writer.replace_metadata(metadata({name: each.hexdigest() for name, each in hashes.items()}))


def read_entry(path: Path, open: Callable[[Path], OpenFile] = open_file) -> tuple[ShardEntry, dict[str, object]] | None:
    """Return the manifest entry and the settings in the header of a shard in Meshbook's format.

    Args:
        open: Opens the file.

    Returns None if the file does not exist. Raises ValueError if it is no such shard, or OSError.
    """
    try:
        file = open(path)
    except FileNotFoundError:
        return None
    return entry_in(read_shard_header(file, path), file.size, path)


def entry_in(header: ShardHeader, size: int, path: Path) -> tuple[ShardEntry, dict[str, object]]:
    """Return the manifest entry and the settings in the header of the shard at `path`, a file of `size` bytes.

    Raises ValueError if they are damaged.
    """
    try:
        numbers, settings = (parse_json(header.metadata[name]) for name in (_ENTRY, _SETTINGS))
        where = {"path": str(path), "format": ShardFormat.meshbook, "bytes": size, "index_hashes": ""}
        entry = entry_of({**numbers, **where, "offset": header.ids_at, "id_bytes": header.id_bytes})
        if (header.mask_at is not None) != bool(entry.mask_hashes) and entry.tokens:
            raise ValueError("its loss mask and the hashes of it do not belong together")
        return entry, settings
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: is not a shard in Meshbook's format ({error!r})") from error


def _blocks_of(content: IO[bytes]) -> Iterator[bytes]:
    content.seek(0)
    while block := content.read(_BYTES_AT_ONCE):
        yield block


class _ShardLayout(NamedTuple):
    """Format of a shard, and where its ids are."""

    format: ShardFormat
    offset: int
    """Byte of the first id."""
    id_bytes: int
    tokens: int


def layout_of(path: Path, id_bytes: int | None = None) -> _ShardLayout:
    """Return the layout of a shard that another program wrote, from its suffix, its header and the files next to it.

    Args:
        id_bytes: Bytes of an id in files that do not store them; None: 2 for nanoGPT, unknown for others.

    Raises ValueError if the file is damaged or not supported, or OSError.
    """
    file = open_file(path)
    if path.suffix == ".bin" and path.with_suffix(".idx").exists():
        return _megatron(path, file)
    if path.suffix == ".ds":
        return _datatrove(path, file, id_bytes)
    if path.suffix == ".npy":
        if file.size >= len(NPY_MAGIC) and file.read(len(NPY_MAGIC), 0) == NPY_MAGIC:
            return _npy(path, file)
        mask = mask_of(path)
        if id_bytes is None and mask is not None and mask.is_file() and mask.stat().st_size:
            id_bytes = file.size // mask.stat().st_size  # the mask has a byte per token
        if id_bytes not in (2, 4):  # OLMo's .npy files are the bare ids
            raise ValueError(f"{path}: has no NumPy header, so the size of its ids is unknown; {_GIVE_SIZE}")
    return _llmc(path, file) or _raw(path, file, ShardFormat.raw, id_bytes or 2)


def _megatron(path: Path, file: OpenFile) -> _ShardLayout:
    index_path = index_of(ShardFormat.megatron, path)
    index_file = open_file(index_path)
    index = read_megatron_index(index_file, index_path)
    layout = _raw(path, file, ShardFormat.megatron, index.id_bytes)
    if index.sequences:
        length = struct.unpack("<i", index_file.read(4, index.pointers_at - 4))[0]
        pointer = struct.unpack("<q", index_file.read(8, index.documents_at - 8))[0]
        declared = pointer // index.id_bytes + length
        if declared != layout.tokens:
            raise ValueError(f"{path}: has {layout.tokens:,} tokens, {index_path.name} declares {declared:,}")
    return layout


def _datatrove(path: Path, file: OpenFile, id_bytes: int | None) -> _ShardLayout:
    metadata = path.with_name(f"{path.name}.metadata")
    if metadata.exists():  # the first line is TOKENIZER|BYTES
        stated = read_regular(metadata, _LARGEST_METADATA).partition(b"\n")[0].rpartition(b"|")[2]
        id_bytes = int(stated) if stated in (b"2", b"4") else id_bytes
    if id_bytes is None:
        raise ValueError(f"{path}: has no {metadata.name}, so the size of its ids is unknown; {_GIVE_SIZE}")
    has_ends = index_of(ShardFormat.datatrove, path).exists()
    return _raw(path, file, ShardFormat.datatrove if has_ends else ShardFormat.raw, id_bytes)


def _npy(path: Path, file: OpenFile) -> _ShardLayout:
    with path.open("rb") as content:
        version = np.lib.format.read_magic(content)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(content)
        offset = content.tell()
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.itemsize not in (2, 4) or dtype.byteorder == ">":
        raise ValueError(
            f"{path}: holds an array of shape {shape} and dtype {dtype}; must be one-dimensional, of integers with 2 "
            "or 4 bytes"
        )
    if file.size != offset + shape[0] * dtype.itemsize:
        raise ValueError(f"{path}: has {file.size:,} bytes, its header declares {offset + shape[0] * dtype.itemsize:,}")
    return _ShardLayout(ShardFormat.raw, offset, dtype.itemsize, shape[0])


def _llmc(path: Path, file: OpenFile) -> _ShardLayout | None:
    """Return the layout of a file with llm.c's header, or None if it has none. Raises ValueError if it is truncated."""
    if file.size < _LLMC_HEADER:
        return None
    magic, version, tokens = struct.unpack("<iii", file.read(12, 0))
    id_bytes = _LLMC_ID_BYTES.get((magic, version))
    if id_bytes is None:
        return None
    if file.size != (declared := _LLMC_HEADER + tokens * id_bytes):
        raise ValueError(f"{path}: has {file.size:,} bytes, its header declares {declared:,}")
    return _ShardLayout(ShardFormat.raw, _LLMC_HEADER, id_bytes, tokens)


def _raw(path: Path, file: OpenFile, format: ShardFormat, id_bytes: int) -> _ShardLayout:
    if file.size % id_bytes:
        raise ValueError(f"{path}: has {file.size:,} bytes, not a multiple of the {id_bytes} bytes of an id")
    return _ShardLayout(format, 0, id_bytes, file.size // id_bytes)
