"""The manifest of a token store: everything that a start needs, without opening a shard. Imports no numpy.

It holds the hash of the tokenizer's vocabulary: two tokenizers with the same hash give an id the same meaning. The hash
covers the tokens of tokenizer.json's model and their ids. Added tokens are left out: a chat model often renames
reserved ids of its base model, and may be trained on the base model's tokens.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from components.config.model_files import locate
from components.config.schema.model import ModelConfig
from components.protocol.errors import ConfigError
from components.protocol.run_files import atomic_write, is_replaceable
from components.protocol.safe_parsing import load_json, parse_json
from components.storage.object_store import ObjectStore, is_url, join

MANIFEST = "manifest.json"
"""File name of the manifest in the folder of a store."""
FORMAT = "meshbook token store"
"""Value of the key `format` in each manifest."""
_VERSION, _MASKED_VERSION = 1, 2
"""Versions of manifests without and with a loss mask, which readers of version 1 would not apply."""
_MASKS = {"token_ids": "labels_mask", "input_ids": "label_mask"}
"""Names of OLMo's files: ids -> loss mask."""
_WINDOW_BITS = range(4, 25)
DENSEST_WINDOWS = tuple(1 << bits for bits in _WINDOW_BITS)
"""Lengths in tokens of the windows in which a shard's document ends are counted."""
_HASH_OF_BYTES = "10f4878bace996e3bf5360c36043a0d6"
"""Hash of the vocabulary of model.tokenizer=bytes."""


class ShardFormat(StrEnum):
    """Where a shard's document ends come from. meshbook: a tensor of the file; megatron: the .idx file; datatrove: the
    .ds.index file; raw: ids only (nanoGPT, llm.c, OLMo, .npy), each document ends with `Manifest.document_end`."""

    meshbook = "meshbook"
    megatron = "megatron"
    datatrove = "datatrove"
    raw = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard of a store."""

    path: str
    """Path of the file with the ids, relative to the manifest's folder or absolute."""
    format: ShardFormat
    bytes: int
    """Size of the file."""
    offset: int
    """Byte of the first id."""
    id_bytes: int
    """Bytes of an id, little-endian and unsigned: 2, 3 or 4."""
    tokens: int
    """Number of ids."""
    documents: int
    """Number of documents that are not empty."""
    max_id: int
    """Largest id."""
    hash: str
    """xxh3_128 of the bytes of all ids, then of all document ends as int64, then of the loss mask if there is one."""
    densest: Sequence[int]
    """Largest number of document ends in any window of each length in `DENSEST_WINDOWS`."""
    hashes: str
    """Hashes of the blocks of the file's tensors, or of its ids if it is of another program (`BlockHashes`)."""
    index_hashes: str
    """Hashes of the blocks of the .idx or .index file; empty if there is none."""
    mask_hashes: str = ""
    """Hashes of the blocks of the loss mask, a byte per token, which is a target unless it is 0; empty: all tokens are
    targets."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary of the tokenizer that a store was written with."""

    tokenizer: str
    """Name or path of the tokenizer, for messages."""
    hash: str
    """Hash of its tokens and their ids (`vocabulary.hash_of_tokens`)."""


@dataclass(frozen=True)
class Manifest:
    """All shards of a store in reading order."""

    shards: Sequence[ShardEntry]
    vocabulary: Vocabulary | None
    """None: unknown, for shards that another program wrote."""
    document_end: int | None
    """Id that ends each document of raw shards; None: each raw shard is one document."""
    folder: Path
    """Folder that relative paths of shards start from."""
    url: str | None = None
    """URL of the folder, in an object store; None: it is on disk."""

    @property
    def tokens(self) -> int:
        """Ids of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents of all shards that are not empty."""
        return sum(shard.documents for shard in self.shards)

    @property
    def max_id(self) -> int:
        """Largest id of all shards."""
        return max(shard.max_id for shard in self.shards)

    @cached_property
    def hash(self) -> str:
        """Hash of the content of all shards in their order, computed from the hashes of the shards."""
        content = [[shard.hash, shard.tokens, shard.id_bytes] for shard in self.shards]
        return xxhash.xxh3_128(json.dumps([content, self.document_end]).encode()).hexdigest()

    def max_documents(self, seq_len: int) -> int:
        """Return an upper bound on the documents that any `seq_len` consecutive tokens belong to."""
        window = next((i for i, length in enumerate(DENSEST_WINDOWS) if length >= seq_len), None)
        if window is None:
            windows = -(-seq_len // DENSEST_WINDOWS[-1])
            ends = windows * max(shard.densest[-1] for shard in self.shards)
        else:
            ends = max(shard.densest[window] for shard in self.shards)
        return min(ends + 1, seq_len)

    def file_of(self, shard: ShardEntry) -> Path:
        """Return the path of a shard's file."""
        return self.folder / shard.path


def _manifest_file(path: str) -> Path:
    """Return the manifest that a config's path names: a file, or the folder that holds it."""
    expanded = Path(os.path.expanduser(path))
    return expanded / MANIFEST if expanded.is_dir() else expanded


def read_manifest(path: str, key: str = "data.path") -> Manifest:
    """Read the manifest of the store at `path`. Raises ConfigError, naming `key`, if there is none or it is damaged."""
    url = _url_of_manifest(path) if is_url(path) else None
    file = Path(MANIFEST) if url else _manifest_file(path)
    write = "docs/data.md shows how to write it"
    try:
        stored = load_json(file) if url is None else parse_json(ObjectStore(url).read(url))
        if stored["format"] != FORMAT or stored["version"] not in (_VERSION, _MASKED_VERSION):
            raise ConfigError(
                f"{key}={path}: {file.name} is a {stored['format']!r} of version {stored['version']}; this version of "
                f"Meshbook reads a {FORMAT!r} of version {_VERSION} or {_MASKED_VERSION}"
            )
        # Before any value is used: an edited list of shards would train on other ids without an error.
        if stored.pop("checksum", None) != _checksum(stored):
            raise ConfigError(f"{key}={path}: {file} is damaged or was edited: it does not match its checksum; {write}")
        shards = [entry_of(values) for values in stored["shards"]]
        vocabulary = None if stored["vocabulary"] is None else Vocabulary(**stored["vocabulary"])
        texts = [] if vocabulary is None else [vocabulary.tokenizer, vocabulary.hash]
        if not all(isinstance(text, str) for text in texts) or not _is_size(stored["document_end"] or 0):
            raise ValueError("invalid vocabulary or document_end")
        folder = None if url is None else url.rpartition("/")[0]
        manifest = Manifest(shards, vocabulary, stored["document_end"], file.resolve().parent, folder)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(f"{key}={path}: there is no {MANIFEST}; give the folder of a token store; {write}") from error
    except OSError as error:
        raise ConfigError(f"{key}={path}: {file} cannot be read: {error.strerror or error}") from error
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        reason = error if type(error) is ValueError else repr(error)
        raise ConfigError(f"{key}={path}: {file} is damaged or not a manifest ({reason}); {write}") from error
    if not shards:
        raise ConfigError(f"{key}={path}: the store has no shards; {write}")
    if stored["hash"] != manifest.hash:
        raise ConfigError(f"{key}={path}: {file} is damaged: its hash is not that of its shards; {write}")
    return manifest


def write_manifest(manifest: Manifest) -> Path:
    """Write a manifest into its folder, atomically, and return the file. Raises OSError, also if it is another file.

    Paths of shards within the folder become relative to it, so that the store may be moved. Links to files are kept:
    the other files of a shard are found by its name.
    """
    folder = manifest.folder.resolve()
    shards = [
        replace(shard, path=str(path.relative_to(folder) if path.is_relative_to(folder) else path))
        for shard in manifest.shards
        for path in [manifest.file_of(shard).parent.resolve() / Path(shard.path).name]
    ]
    file = manifest.folder / MANIFEST
    if not is_replaceable(file, FORMAT):
        raise FileExistsError(errno.EEXIST, "it exists and is no manifest of a token store; move it away", str(file))
    atomic_write(file, manifest_text(replace(manifest, shards=shards)))
    return file


def manifest_text(manifest: Manifest) -> str:
    """Return the content of a manifest's file, with the paths of the shards as they are."""
    values = {
        "format": FORMAT,
        "version": _MASKED_VERSION if any(shard.mask_hashes for shard in manifest.shards) else _VERSION,
        "vocabulary": None if manifest.vocabulary is None else asdict(manifest.vocabulary),
        "document_end": manifest.document_end,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "hash": manifest.hash,
    }
    entries = [asdict(shard) for shard in manifest.shards]
    values["checksum"] = _checksum(values | {"shards": entries})
    head = json.dumps(values, indent=1)[:-2]  # one line per shard, so that two manifests can be compared with diff
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    return f'{head},\n "shards": [\n{lines}\n ]\n}}\n'


def index_of(format: ShardFormat, path: Path) -> Path:
    """Return the file with the document ends of a shard of another program that stores them."""
    return path.with_suffix(".idx") if format is ShardFormat.megatron else path.with_name(f"{path.name}.index")


def mask_of(path: Path) -> Path | None:
    """Return where another program writes the loss mask of a shard, a byte per token; None if it writes none.

    datatrove: SHARD.ds.loss; OLMo: labels_mask_part_0.npy for token_ids_part_0.npy, label_mask.npy for input_ids.npy.
    """
    if path.suffix == ".ds":
        return path.with_name(f"{path.name}.loss")
    names = [path.name.replace(ids, mask, 1) for ids, mask in _MASKS.items() if ids in path.name]
    return path.with_name(names[0]) if names and path.suffix == ".npy" else None


def _files_of(shard: ShardEntry) -> dict[str, int | None]:
    """Return the sizes of a shard's files by path; None: the manifest does not state it."""
    path = Path(shard.path)
    index = index_of(shard.format, path) if shard.index_hashes else None
    mask = mask_of(path) if shard.mask_hashes and shard.format is not ShardFormat.meshbook else None
    return {shard.path: shard.bytes, **{str(each): None for each in (index, mask) if each is not None}}


def entry_of(values: dict[str, Any]) -> ShardEntry:
    """Return a manifest entry from its JSON values. Raises ValueError, LookupError or TypeError if they are invalid."""
    values = {"mask_hashes": "", **values}  # a manifest of version 1 has none
    names = [field.name for field in fields(ShardEntry)]
    entry = ShardEntry(**{name: values[name] for name in names} | {"format": ShardFormat(values["format"])})
    texts = (entry.path, entry.hash, entry.hashes, entry.index_hashes, entry.mask_hashes)
    if not all(isinstance(text, str) for text in texts) or not entry.path or "\0" in entry.path:
        raise ValueError(f"invalid path or hashes of shard {entry.path!r}")
    if entry.tokens and not entry.hashes:
        raise ValueError(f"no hashes of shard {entry.path!r}")
    sizes = (entry.bytes, entry.offset, entry.id_bytes, entry.tokens, entry.documents, entry.max_id, *entry.densest)
    if (
        not all(map(_is_size, sizes))
        or len(entry.densest) != len(DENSEST_WINDOWS)
        or entry.id_bytes not in (2, 3, 4)
        or entry.max_id >= 1 << 8 * entry.id_bytes
        or entry.offset + entry.tokens * entry.id_bytes > entry.bytes
    ):
        raise ValueError(f"invalid numbers of shard {entry.path!r}")
    return entry


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _checksum(values: Mapping[str, Any]) -> str:
    """Return the hash of all values of a manifest but this hash itself."""
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _url_of_manifest(path: str) -> str:
    return path if path.endswith(".json") else join(path, MANIFEST)


def shard_problems(manifest: Manifest, key: str) -> list[str]:
    """Return the problems of a store's files: those that are missing or have another size than in the manifest."""
    missing, changed = dict[str, str](), list[str]()  # missing: by shard
    if manifest.url is not None:
        try:
            sizes = {each.url: each.bytes for each in ObjectStore(manifest.url).list(manifest.url)}
        except OSError as error:
            return [f"{key}: its shards cannot be listed: {error}"]
    files = {
        (join(manifest.url, path) if manifest.url else str(manifest.folder / path)): (shard.path, size)
        for shard in manifest.shards
        for path, size in _files_of(shard).items()
    }
    if manifest.url is None:
        sizes = _listed_sizes(files)
    for file, (shard, expected) in files.items():
        if manifest.url is not None and file not in sizes:
            missing.setdefault(shard, f"{file} (no such object)")
            continue
        try:
            size = sizes[file] if file in sizes else _size_of(os.stat(file))
        except OSError as error:
            missing.setdefault(shard, f"{file} ({error.strerror})")
            continue
        if expected not in (size, None):
            changed.append(f"{file} has {size:,} bytes, the manifest {expected:,}")
    total, again = len(manifest.shards), "or write the manifest again"
    problems = []
    if missing:
        first = next(iter(missing.values()))
        problems.append(
            f"{key}: {len(missing):,} of {total:,} shards cannot be read, such as {first}; restore them, {again}"
        )
    if changed:
        problems.append(
            f"{key}: {len(changed):,} of {total:,} shards were changed, such as {changed[0]}; restore them, {again}"
        )
    return problems


def _listed_sizes(files: Iterable[str]) -> dict[str, int]:
    """Return the sizes of files in bytes, from one listing of each folder.

    A network file system returns attributes with a listing (NFS: READDIRPLUS), so that the sizes take no request per
    file. Files that a listing lacks, and all of a folder that cannot be listed, are left out.
    """
    wanted, sizes = set(files), dict[str, int]()
    for folder in {os.path.dirname(file) for file in files}:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.path in wanted:
                    with suppress(OSError):  # the caller's own request reports why
                        sizes[entry.path] = _size_of(entry.stat())
    return sizes


def _size_of(status: os.stat_result) -> int:
    """Return the size of a file. Raises OSError for a pipe, a device or a folder."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return status.st_size


def vocabulary_problems(manifest: Manifest, key: str, *, size: int | None, tokenizer_hash: str | None) -> list[str]:
    """Return the problems of a store's ids with a model and its tokenizer; None: unknown, not compared.

    Args:
        key: KEY=PATH of the store, for messages.
        size: Size of the vocabulary: ids are below it.
    """
    vocabulary, problems = manifest.vocabulary, list[str]()
    if vocabulary is not None and tokenizer_hash is not None and tokenizer_hash != vocabulary.hash:
        problems.append(
            f"{key}: was written with the tokenizer {vocabulary.tokenizer}, whose ids mean other tokens than those of "
            f"this run's tokenizer; set model.tokenizer={vocabulary.tokenizer}, or tokenize the corpus again"
        )
    elif size is not None and manifest.max_id >= size:
        shard = next(each for each in manifest.shards if each.max_id >= size)
        problems.append(
            f"{key}: holds the id {shard.max_id:,} ({shard.path}), but the vocabulary has {size:,} tokens; choose the "
            "model that the store was tokenized for, or tokenize the corpus again"
        )
    return problems


def _hash_of_tokens(vocabulary: Mapping[str, int] | Sequence[Any]) -> str:
    """Return the hash of a vocabulary of tokenizer.json: ids by token, or a list of (token, score) in order of ids."""
    ids = vocabulary if isinstance(vocabulary, Mapping) else {entry[0]: id for id, entry in enumerate(vocabulary)}
    pairs = sorted((id, token) for token, id in ids.items())
    return xxhash.xxh3_128(json.dumps(pairs).encode()).hexdigest()


def hash_of_tokenizer(tokenizer: Any) -> str | None:
    """Return the hash of the vocabulary of a transformers tokenizer; None if it is a slow one, which stores none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else _hash_of_tokens(json.loads(backend.to_str())["model"]["vocab"])


def hash_of_files(model: ModelConfig) -> str | None:
    """Return the hash of the vocabulary of a run's tokenizer, read without transformers.

    None if it needs the hub or a GGUF file, or has no tokenizer.json: then the ranks compare.
    """
    if model.tokenizer == "bytes":
        return _HASH_OF_BYTES
    path = model.tokenizer or model.path
    try:
        files = None if path is None else locate(path)
        if files is None or not files.is_local or files.gguf_file:
            return None
        stored = load_json(Path(files.name_or_folder, "tokenizer.json"))
        return _hash_of_tokens(stored["model"]["vocab"])
    except (ConfigError, OSError, ValueError, LookupError, TypeError):
        return None  # a missing or damaged tokenizer has its own message
