"""Tokenization of a corpus: each input file becomes a shard, which is kept while file and settings are the same."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from components.config.schema.data import BadRows, TextDataConfig
from components.data.cache import batches_of, hash_of_tokenization
from components.data.sources.files import readable
from components.data.sources.rows import BadRowReport, each_document, train_location
from components.data.sources.split import rows_of
from components.data.sources.text import document_tokens
from components.data.token_store.manifest import FORMAT, MANIFEST, Manifest, ShardEntry, Vocabulary
from components.data.token_store.manifest import hash_of_tokenizer as hash_of_vocabulary
from components.data.token_store.writer import read_entry, write_shard
from components.protocol.errors import ConfigError
from components.protocol.run_files import is_replaceable, temporaries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD = ".safetensors"
"""Suffix of a shard; the name before it is that of the input file."""
_INPUT = "input"  # name in a shard's settings of the size and hash of its input file
_READ_AT_ONCE = 1 << 24  # bytes
_LEFT_SECONDS = 24 * 3600  # a temporary file this old was left by a process that was killed


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSettings:
    """What determines the tokens of a corpus besides its files. The header of each shard stores it."""

    tokenizer: str
    """Value of model.tokenizer, for messages; shards of two names for one tokenizer belong together."""
    tokenizer_hash: str
    """Hash of everything that determines the tokenizer's output."""
    vocabulary: str | None
    """Hash of its tokens and their ids (`vocabulary.hash_of_tokens`)."""
    text_column: str
    bad_rows: BadRows
    id_bytes: int
    """Bytes of an id: 2 if the vocabulary has at most 65,536 tokens, else 4."""

    def differences(self, other: CorpusSettings) -> list[str]:
        """Return a description of each setting in which `other` differs from this one."""
        found = []
        if (self.tokenizer_hash, self.vocabulary) != (other.tokenizer_hash, other.vocabulary):
            same_name = " (its files were changed)" if self.tokenizer == other.tokenizer else ""
            found.append(f"the tokenizer {self.tokenizer}, not {other.tokenizer}{same_name}")
        for what, mine, others in (
            ("the text column", self.text_column, other.text_column),
            ("bad rows", self.bad_rows, other.bad_rows),
            ("bytes of an id", self.id_bytes, other.id_bytes),
        ):
            found += [f"{what} {mine}, not {others}"] if mine != others else []
        return found


class InputFile(NamedTuple):
    """A file of a corpus, and its shard."""

    path: Path
    shard: Path


class Progress(NamedTuple):
    """Work on a file since the last report."""

    documents: int
    tokens: int
    characters: int


class Outcome(NamedTuple):
    """Result of one input file."""

    entry: ShardEntry
    is_kept: bool
    """Whether the shard existed before."""
    bad_rows: int
    """Rows left out because they could not become a document (`data.bad_rows=drop`)."""


def settings_of(
    tokenizer: PreTrainedTokenizerBase, name: str, *, text_column: str, bad_rows: BadRows
) -> CorpusSettings:
    """Return the settings for a tokenizer, `name` in messages. Raises ConfigError if it is a slow one."""
    hashed = hash_of_tokenization(tokenizer)
    if hashed is None:
        raise ConfigError(
            f"model.tokenizer={name}: is not a fast tokenizer (tokenizer.json), so its version cannot be recorded in "
            "the shards; convert it with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)"
        )
    return CorpusSettings(
        tokenizer=name,
        tokenizer_hash=hashed,
        vocabulary=hash_of_vocabulary(tokenizer),
        text_column=text_column,
        bad_rows=bad_rows,
        id_bytes=2 if len(tokenizer) <= 1 << 16 else 4,
    )


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the folder of a corpus holds a manifest or safetensors files of others."""
    if not is_replaceable(folder / MANIFEST, FORMAT):
        raise ConfigError(
            f"{folder}: {MANIFEST} exists and is no manifest of a token store; move it away, or choose another folder"
        )
    for path in sorted(folder.glob(f"*{SHARD}")):
        _read_shard(path)


def check_shards(files: Iterable[InputFile], settings: CorpusSettings, folder: Path) -> None:
    """Raise ConfigError if a shard of these files exists that was written with other settings, or is no such shard."""
    check_folder(folder)
    for file in files:
        found = _read_shard(file.shard)
        if found is not None and (different := found[1].differences(settings)):
            raise ConfigError(
                f"{folder}: {file.shard.name} was written with {', and '.join(different)}; tokenize into another "
                "folder, use the same settings, or remove the shards"
            )


def tokenize_file(
    file: InputFile,
    tokenizer: PreTrainedTokenizerBase,
    settings: CorpusSettings,
    report: Callable[[Progress], object] = lambda progress: None,
) -> Outcome:
    """Write the shard of a file, unless it exists and the file has the same size and hash.

    Rows are read as those of data=text. Memory holds a batch of documents and 8 bytes for each document of the file.

    Args:
        report: Called after each batch of documents.

    Raises ConfigError if the file cannot be read, has invalid rows or no row, or changes meanwhile, or OSError.
    """
    before = _times(file.path)
    content = _content_of(file.path)
    found = _read_shard(file.shard)
    if found is not None and found[2] == content:
        return Outcome(found[0], is_kept=True, bad_rows=0)
    bad = BadRowReport()
    cfg = TextDataConfig(path=str(file.path), text_column=settings.text_column, bad_rows=settings.bad_rows)
    documents = each_document(cfg, rows_of(cfg, train_location(cfg)), bad)

    def tokens() -> Iterator[list[list[int]]]:
        is_empty = True
        for batch in batches_of(documents):
            ids = list(document_tokens(tokenizer, batch))
            is_empty = False
            yield ids
            report(Progress(len(batch), sum(map(len, ids)), sum(len(document.text) for document in batch)))
        if is_empty:
            raise ConfigError(f"{file.path}: has no rows; leave it out")
        if _times(file.path) != before:
            raise ConfigError(f"{file.path}: was changed while it was read; start again")

    entry = write_shard(file.shard, tokens(), settings.id_bytes, {**asdict(settings), _INPUT: content})
    return Outcome(entry, is_kept=False, bad_rows=bad.count)


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of all shards in a folder that `tokenize_file` wrote, from their headers.

    Raises ConfigError if there is none, or if two were written with different settings.
    """
    entries, first = list[ShardEntry](), None
    for path in sorted(folder.glob(f"*{SHARD}")):
        found = _read_shard(path)
        if found is None:
            continue
        entry, settings, _ = found
        first = first or (path, settings)
        if different := first[1].differences(settings):
            raise ConfigError(
                f"{folder}: {first[0].name} was written with {', and '.join(different)} as {path.name} was; remove the "
                "shards that do not belong to the store"
            )
        entries.append(replace(entry, path=path.name))
    if first is None:
        raise ConfigError(f"{folder}: has no shards of a tokenized corpus; tokenize into this folder first")
    vocabulary = first[1].vocabulary
    return Manifest(
        entries, None if vocabulary is None else Vocabulary(first[1].tokenizer, vocabulary), None, folder.resolve()
    )


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of processes that were killed, unless another process may still write them."""
    for file in temporaries(folder):
        with contextlib.suppress(OSError):  # removed by another process, or owned by another user
            if time.time() - file.stat().st_mtime > _LEFT_SECONDS:
                file.unlink()


def _read_shard(path: Path) -> tuple[ShardEntry, CorpusSettings, object] | None:
    """Return the entry of a shard, its settings and the size and hash of its input; None if it does not exist."""
    try:
        found = read_entry(path)
        if found is None:
            return None
        entry, stored = found
        values: dict[str, Any] = {each.name: stored[each.name] for each in fields(CorpusSettings)}
        settings, content = CorpusSettings(**values | {"bad_rows": BadRows(values["bad_rows"])}), stored[_INPUT]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path}: is not a shard of a tokenized corpus ({error}); remove it, or choose another folder"
        ) from error
    return entry, settings, content


def _content_of(path: Path) -> dict[str, object]:
    """Return the size and the hash of a file. Raises ConfigError if it cannot be read."""
    digest, size = xxhash.xxh3_128(), 0
    with readable(path), path.open("rb") as content:
        while block := content.read(_READ_AT_ONCE):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "hash": digest.hexdigest()}


def _times(path: Path) -> tuple[int, int, int]:
    """Return what differs once a file is written to or replaced."""
    with readable(path):
        found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
