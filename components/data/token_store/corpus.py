"""Tokenization of a corpus: each input file becomes a shard, which is kept while file and settings are the same.

Files and shards are on disk or behind URLs. An object is copied to a scratch folder before it is read, and a shard is
written there before it gets its name or is uploaded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from components.config.schema.data import BadRows, TextDataConfig
from components.data.cache import batches_of, hash_of_tokenization
from components.data.sources.files import TABLES, readable
from components.data.sources.rows import BadRowReport, each_document, train_location
from components.data.sources.split import rows_of
from components.data.sources.text import document_tokens
from components.data.token_store.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    ShardEntry,
    Vocabulary,
    manifest_text,
    write_manifest,
)
from components.data.token_store.manifest import hash_of_tokenizer as hash_of_vocabulary
from components.data.token_store.shards import open_file
from components.data.token_store.writer import id_bytes_of, read_entry, write_shard
from components.protocol.errors import ConfigError
from components.protocol.run_files import (
    TEMPORARY,
    atomic_file,
    atomic_path,
    is_replaceable,
    names_in,
    take_lock,
    temporaries,
)
from components.storage.object_store import ATTEMPTS, ObjectStore, StorageError, StoredObject, is_url, join
from components.storage.tensor_files import OpenFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD = ".safetensors"
"""Suffix of a shard; the name before it is that of the input file."""
_INPUT = "input"  # name in a shard's settings of the size and hash of its input file
_READ_AT_ONCE = 1 << 24  # bytes
_LEFT_SECONDS = 24 * 3600  # a temporary file this old was left by a process that was killed
_HEADER_BYTES = 1 << 16  # read first of a shard behind a URL: the header of one of up to 4 GB
_HEADERS_AT_ONCE = 16  # requests
_SCRATCH = re.compile(rf"\.tokenize_corpus{re.escape(TEMPORARY)}[0-9a-f]{{16}}")
_LOCK = "lock"
_COMPRESSED = (".gz", ".zst", *TABLES)
_COMPRESSION = 4  # bytes of text per byte of a compressed file, for estimates
_TOKEN_BYTES = 3  # of text per token, for estimates: English has more than 4, other languages and code about 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _CorpusSettings:
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
    """Bytes of an id: 2 if all ids are below 65,536, else 4."""

    def differences(self, other: _CorpusSettings) -> list[str]:
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

    path: str
    """Path, or URL of an object."""
    shard: str
    """Name of the shard's file."""
    bytes: int
    version: str | None = None
    """Version of an object (`StoredObject.version`); None for a file on disk."""

    @property
    def is_compressed(self) -> bool:
        """Whether the name is that of a compressed file."""
        return self.path.lower().endswith(_COMPRESSED)


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
) -> _CorpusSettings:
    """Return the settings for a tokenizer, `name` in messages. Raises ConfigError if it is a slow one."""
    hashed = hash_of_tokenization(tokenizer)
    if hashed is None:
        raise ConfigError(
            f"model.tokenizer={name}: is not a fast tokenizer (tokenizer.json), so its version cannot be recorded in "
            "the shards; convert it with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)"
        )
    return _CorpusSettings(
        tokenizer=name,
        tokenizer_hash=hashed,
        vocabulary=hash_of_vocabulary(tokenizer),
        text_column=text_column,
        bad_rows=bad_rows,
        id_bytes=id_bytes_of(tokenizer),
    )


class _StoredShard(NamedTuple):
    """What the header of a shard stores."""

    entry: ShardEntry
    settings: _CorpusSettings
    content: object
    """Size and hash of the input file, or size and version of the input object."""


class StoreFolder:
    """Folder of a token store that shards are written to, on disk or behind a URL; not to be used after a fork."""

    def __init__(self, path: str, attempts: int = ATTEMPTS) -> None:
        """`attempts`: See `ObjectStore`."""
        self.path = path
        self._store = ObjectStore(path, attempts) if is_url(path) else None

    def check(self) -> dict[str, _StoredShard]:
        """Return the shards by name. Raises ConfigError if there is a manifest or a safetensors file of others."""
        sizes = self._sizes()
        if not self._may_replace_manifest(sizes.get(MANIFEST)):
            raise ConfigError(
                f"{self.path}: {MANIFEST} exists and is no manifest of a token store; move it away, or choose another "
                "folder"
            )
        names = sorted(name for name in sizes if name.endswith(SHARD))
        with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
            shards = zip(names, pool.map(self.shard, names), strict=True)
            return {name: shard for name, shard in shards if shard is not None}

    def shard(self, name: str) -> _StoredShard | None:
        """Return what the header of a shard stores; None if it does not exist.

        Raises ConfigError if the file is no such shard, or StorageError.
        """
        try:
            found = read_entry(Path(self.path, name) if self._store is None else Path(name), self._open)
            if found is None:
                return None
            entry, stored = found
            values: dict[str, Any] = {field.name: stored[field.name] for field in fields(_CorpusSettings)}
            settings = _CorpusSettings(**values | {"bad_rows": BadRows(values["bad_rows"])})
            return _StoredShard(entry, settings, stored[_INPUT])
        except StorageError:
            raise
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{self.path.rstrip('/')}/{name}: is not a shard of a tokenized corpus ({error}); remove it, or choose "
                "another folder"
            ) from error

    def publish(self, file: Path) -> None:
        """Move a complete shard into the folder, under its own name. Raises OSError."""
        if self._store is not None:
            written, url = read_entry(file), join(self.path, file.name)
            self._store.upload(file, url)
            stored = self.shard(file.name)
            if written is None or stored is None or replace(stored.entry, path=str(file)) != written[0]:
                raise StorageError(f"{url}: is not what was uploaded; another command may write the same store")
            file.unlink()
            return
        target = Path(self.path, file.name)
        try:
            with atomic_path(target) as temporary:
                file.replace(temporary)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with file.open("rb") as content, atomic_file(target) as output:
                shutil.copyfileobj(content, output, _READ_AT_ONCE)
            file.unlink()

    def write_manifest(self, manifest: Manifest) -> str:
        """Write the manifest of the folder and return its path or URL. Raises OSError."""
        if self._store is None:
            return str(write_manifest(manifest))
        url = join(self.path, MANIFEST)
        self._store.write(url, manifest_text(manifest).encode())
        return url

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of the files directly in the folder."""
        if self._store is None:
            return {each.name: each.stat().st_size for each in Path(self.path).glob("*") if each.exists()}
        listed = self._store.list(self.path)
        if not listed and self._store.scheme != "hf":  # a folder that is not there, or a bucket
            bucket = "/".join(self.path.split("/")[:3])
            try:
                self._store.stat(bucket)
            except FileNotFoundError as error:
                raise ConfigError(f"{self.path}: there is no {bucket}; create it, or choose another folder") from error
        prefix = join(self.path, "")
        sizes = {each.url.removeprefix(prefix): each.bytes for each in listed}
        return {name: size for name, size in sizes.items() if "/" not in name}

    def _may_replace_manifest(self, size: int | None) -> bool:
        if self._store is None:
            return is_replaceable(Path(self.path, MANIFEST), FORMAT)
        stop = min(size or 0, len(FORMAT) + 1000)
        return size is None or FORMAT.encode() in self._store.read_range(join(self.path, MANIFEST), 0, stop)

    def _open(self, path: Path) -> OpenFile:
        if self._store is None:
            return open_file(path)
        return _ObjectFile(self._store, self._store.stat(join(self.path, path.name)))


class _ObjectFile(OpenFile):
    """An object that is read by ranges; its beginning is read at once."""

    def __init__(self, store: ObjectStore, source: StoredObject) -> None:
        self._store, self._source, self.size = store, source, source.bytes
        self._name, self._kind, self._remedy = source.url, "token shard", "tokenize its file again"
        self._head = store.read_range(source.url, 0, min(source.bytes, _HEADER_BYTES))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`. Raises OSError if the object is shorter or cannot be read."""
        stop = offset + len(buffer)
        if stop <= len(self._head):
            buffer[:] = self._head[offset:stop]
        else:
            buffer[:] = self._store.read_range(self._source.url, offset, stop)


def check_shards(
    files: Sequence[InputFile], settings: _CorpusSettings, folder: StoreFolder
) -> dict[InputFile, Outcome]:
    """Return the outcomes of the objects whose shards are kept. Those of files on disk are decided when they are read.

    Raises ConfigError if a shard of these files exists that was written with other settings, or if a file of the folder
    is no such shard, or OSError.
    """
    shards, kept = folder.check(), {}
    for file in files:
        if (shard := shards.get(file.shard)) is None:
            continue
        if different := shard.settings.differences(settings):
            raise ConfigError(
                f"{folder.path}: {file.shard} was written with {', and '.join(different)}; tokenize into another "
                "folder, use the same settings, or remove the shards"
            )
        if file.version is not None and shard.content == _content_of(file):
            kept[file] = Outcome(shard.entry, is_kept=True, bad_rows=0)
    return kept


def tokenize_file(
    file: InputFile,
    out: str,
    scratch: Path,
    tokenizer: PreTrainedTokenizerBase,
    settings: _CorpusSettings,
    report: Callable[[Progress], object] = lambda progress: None,
) -> Outcome:
    """Write the shard of a file, unless it exists and the file is the same.

    Rows are read as those of data=text. Memory holds a batch of documents and 8 bytes for each document of the file.

    Args:
        out: Folder or URL of the store.
        scratch: Folder for the copy of an object and for the shard until it is complete.
        report: Called after each batch of documents.

    Raises ConfigError if the file cannot be read, has invalid rows or no row, or changes meanwhile, or OSError.
    """
    folder, copy = StoreFolder(out), scratch / file.shard.removesuffix(SHARD)
    local = Path(file.path) if file.version is None else copy
    before = _file_stamp(local) if file.version is None else None
    content = _content_of(file)
    found = folder.shard(file.shard)
    if found is not None and found.content == content:
        return Outcome(found.entry, is_kept=True, bad_rows=0)
    bad = BadRowReport()

    def tokens() -> Iterator[list[list[int]]]:
        cfg = TextDataConfig(path=str(local), text_column=settings.text_column, bad_rows=settings.bad_rows)
        is_empty = True
        for batch in batches_of(each_document(cfg, rows_of(cfg, train_location(cfg)), bad)):
            ids = list(document_tokens(tokenizer, batch))
            is_empty = False
            yield ids
            report(Progress(len(batch), sum(map(len, ids)), sum(len(document.text) for document in batch)))
        if is_empty:
            raise ConfigError(f"{file.path}: has no rows; leave it out")
        if before is not None and _file_stamp(local) != before:
            raise ConfigError(f"{file.path}: was changed while it was read; start again")
        copy.unlink(missing_ok=True)  # before the shard is assembled, which takes its size once more

    shard = scratch / file.shard
    try:
        if file.version is not None:
            _download(file, copy)
        entry = write_shard(shard, tokens(), settings.id_bytes, {**asdict(settings), _INPUT: content})
        folder.publish(shard)
    except ConfigError as error:
        raise ConfigError([problem.replace(str(copy), file.path) for problem in error.problems]) from error
    finally:
        for left in (copy, shard):
            left.unlink(missing_ok=True)
    return Outcome(entry, is_kept=False, bad_rows=bad.count)


def _download(file: InputFile, copy: Path) -> None:
    """Copy an object to a new file. Raises ConfigError if it is not the version that was listed, or OSError."""
    store, source = ObjectStore(file.path), StoredObject(file.path, file.bytes, file.version or "")
    failed: OSError | None = None
    try:
        store.download(source, copy)
    except OSError as error:  # perhaps because the object is another one
        if error.errno is not None and error.filename is None:
            error.filename = str(copy)
        failed = error
    try:
        is_changed = store.stat(file.path)[1:] != source[1:]  # the store may write its URL in another way
    except FileNotFoundError:
        is_changed = True
    if is_changed:
        raise ConfigError(f"{file.path}: was changed while it was read; start again") from failed
    if failed is not None:
        raise failed


def manifest_of(folder: StoreFolder) -> Manifest:
    """Return the manifest of all shards in a folder that `tokenize_file` wrote, from their headers.

    Raises ConfigError if there is none, or if two were written with different settings, or OSError.
    """
    shards = folder.check()
    if not shards:
        raise ConfigError(f"{folder.path}: has no shards of a tokenized corpus; tokenize into this folder first")
    first, settings = next((name, shard.settings) for name, shard in shards.items())
    for name, shard in shards.items():
        if different := settings.differences(shard.settings):
            raise ConfigError(
                f"{folder.path}: {first} was written with {', and '.join(different)} as {name} was; remove the "
                "shards that do not belong to the store"
            )
    entries = [replace(shard.entry, path=name) for name, shard in shards.items()]
    vocabulary = None if settings.vocabulary is None else Vocabulary(settings.tokenizer, settings.vocabulary)
    where = (Path(), folder.path) if is_url(folder.path) else (Path(folder.path).resolve(), None)
    return Manifest(entries, vocabulary, None, *where)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of processes that were killed, unless another process may still write them."""
    for file in temporaries(folder):
        with contextlib.suppress(OSError):  # removed by another process, or owned by another user
            if time.time() - file.stat().st_mtime > _LEFT_SECONDS:
                file.unlink()


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Create a folder in `parent` for one command and the processes that it forks, and remove it in the end.

    A lock, which all of these processes hold, is what `remove_scratch` leaves it for. Raises OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = parent / f".tokenize_corpus{TEMPORARY}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)  # documents may be confidential
        with contextlib.suppress(FileNotFoundError, FileExistsError, BlockingIOError):  # removed before it was locked
            lock = (folder / _LOCK).open("xb")
            take_lock(lock.fileno())
            if (folder / _LOCK).exists():
                break
            lock.close()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def remove_scratch(parent: Path) -> None:
    """Remove the scratch folders in `parent` of commands all of whose processes have ended."""
    for folder in (parent / name for name in names_in(parent) if _SCRATCH.fullmatch(name)):
        with contextlib.suppress(OSError):  # another command uses it or removes it
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("ab") as lock:
                if take_lock(lock.fileno()) or time.time() - status.st_mtime > _LEFT_SECONDS:
                    shutil.rmtree(folder)


def check_space(files: Sequence[InputFile], settings: _CorpusSettings, scratch: Path, workers: int) -> None:
    """Raise ConfigError if the scratch file system is too small for the largest files that are processed together.

    A file takes its copy, if it is an object, and its shard; once the copy is removed, the shard twice. A shard is
    estimated by its text: a token per 3 bytes, for the byte tokenizer per byte; 4 bytes per byte of a compressed file.
    """

    def needed(file: InputFile) -> int:
        text = file.bytes * (_COMPRESSION if file.is_compressed else 1)
        shard = text * settings.id_bytes // (1 if settings.tokenizer == "bytes" else _TOKEN_BYTES)
        return max(shard + (0 if file.version is None else file.bytes), 2 * shard)

    existing = next(each for each in (scratch.absolute(), *scratch.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    sizes = sorted(map(needed, files), reverse=True)
    if sum(sizes[:workers]) > free:
        fitting = next((count for count in range(workers, 0, -1) if sum(sizes[:count]) <= free), 0)
        fewer = f"set --workers {fitting}, " if fitting else "split the largest files, "
        raise ConfigError(
            f"--scratch {scratch}: {free:,} bytes are free, but {min(workers, len(files)):,} files at a time with "
            f"their shards need about {sum(sizes[:workers]):,}, the largest {sizes[0]:,} ("
            f"{max(files, key=needed).path}); "
            f"{fewer}or set --scratch to a folder on a larger disk"
        )


def _content_of(file: InputFile) -> dict[str, object]:
    """Return the size and the hash of a file, or the size and version of an object.

    Raises ConfigError if the file cannot be read.
    """
    if file.version is not None:
        return {"bytes": file.bytes, "version": file.version}
    path, digest, size = Path(file.path), xxhash.xxh3_128(), 0
    with readable(path), path.open("rb") as content:
        while block := content.read(_READ_AT_ONCE):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "hash": digest.hexdigest()}


def _file_stamp(path: Path) -> tuple[int, int, int]:
    """Return inode, size and modification time of a file, which differ once it is written to or replaced."""
    with readable(path):
        status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns
