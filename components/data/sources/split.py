"""What is on one side, training or held-out: read from the source as often as needed, never all at once.

So a file may be larger than memory: what is kept of a row while the sides are told apart is a hash of its prompt.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain, compress, islice
from typing import TYPE_CHECKING, Any

import xxhash

from components.config.errors import ConfigError
from components.config.schema.data import CustomDataConfig, DataConfig, DocsDataConfig, RowsDataConfig, TextDataConfig
from components.data.examples import IGNORED, Example
from components.data.sources import pydocs
from components.data.sources.files import (
    Location,
    Row,
    check_columns,
    columns_of,
    files_of_split,
    is_local,
    read_rows,
    readable,
)
from components.data.sources.hub_rows import hub_columns, hub_files, hub_rows
from components.data.sources.rows import (
    ASSISTANT,
    BadRowsSeen,
    Conversation,
    Document,
    Message,
    columns_optional,
    columns_wanted,
    each_conversation,
    each_document,
    eval_location,
    text_of,
    train_location,
)
from components.data.sources.text import STDLIB, first_line, split_document, stdlib_rows

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

Record = Conversation | Document

_READ_AT_ONCE = 1 << 24  # bytes
_CACHED_CHARACTERS = 1 << 26  # characters: less text is read from its source once


class SourceSplit:
    """One side of a source: an iterable of its conversations or documents, which reads the source each time."""

    def __init__(self, cfg: DataConfig, is_eval: bool) -> None:
        self.is_eval = is_eval
        self.bad_rows = 0
        """Rows left out because they could not become a sample; known once the source was read."""
        self.characters = 0
        """Of the whole source; known once it was read."""
        self._cfg = cfg
        self._kept: np.ndarray | None = None
        self._columns: set[str] = set()
        self._cached_records: list[Record] | None = None

    def __iter__(self) -> Iterator[Record]:
        kept = self._in_split
        those = compress(self._all_records(), kept)
        if not holds_out_ends(self._cfg, len(kept)):
            return those
        return (split_document(each, self._cfg.eval_fraction, self.is_eval) for each in those if isinstance(each, Document))

    def __len__(self) -> int:
        return int(self._in_split.sum())

    def identity(self) -> tuple[str, int]:
        """Return a hash of all that the source holds, and its size in bytes: of files, without parsing them."""
        digest, size = xxhash.xxh3_128(), 0
        files = self._files()
        for file in files:
            with readable(file), file.open("rb") as content:
                while block := content.read(_READ_AT_ONCE):
                    digest.update(block)
                    size += len(block)
            digest.update(f"{file.suffix} {size}".encode())
        for record in () if files else self._all_records():
            text = json.dumps(record.text if isinstance(record, Document) else _as_json(record), default=str).encode()
            digest.update(text)
            size += len(text)
        return digest.hexdigest(), size

    @property
    def unused_columns(self) -> list[str]:
        """Columns of the source that the config does not read; known once it was read."""
        if not isinstance(self._cfg, RowsDataConfig):
            return []
        return sorted(self._columns - {*columns_wanted(self._cfg).values(), *columns_optional(self._cfg)})

    @property
    def _in_split(self) -> np.ndarray:
        """Which of all that the source holds is on this side; for that it is read. Raises ConfigError for bad rows."""
        if self._kept is None:
            by_hash = held_out_by_hash(self._cfg)
            hashes = array("Q", (hash_of_prompt(each) if by_hash else 0 for each in self._all_records()))
            self._kept = split_mask(hashes, self._cfg, self.is_eval)
        return self._kept

    def _files(self) -> list[Path]:
        """The files that hold the source, those that `datasets` made of the hub's too; none: it is no file."""
        if not isinstance(self._cfg, RowsDataConfig):
            return []
        location = location_of(self._cfg, self.is_eval)
        if location.path == STDLIB:
            return []
        return files_of_split(location) if is_local(location.path) else hub_files(location, self._cfg.subset, self._cfg.revision)

    def _all_records(self) -> Iterator[Record]:
        """Yield what the source holds, also of the other side where it has both; a little is remembered."""
        if self._cached_records is not None:
            yield from self._cached_records
            return
        bad, few, size = BadRowsSeen(), list[Record](), 0
        for record in self._read(bad):
            size += characters_of(record)
            if size < _CACHED_CHARACTERS:
                few.append(record)
            else:
                few.clear()
            yield record
        self.bad_rows, self.characters = bad.count, size
        self._cached_records = few if size < _CACHED_CHARACTERS else None

    def _read(self, bad: BadRowsSeen) -> Iterator[Record]:
        if isinstance(self._cfg, TextDataConfig):
            return each_document(self._cfg, self._rows(self._cfg), bad)
        if isinstance(self._cfg, RowsDataConfig):
            return each_conversation(self._cfg, self._rows(self._cfg), bad)
        if isinstance(self._cfg, DocsDataConfig):
            return iter(pydocs.conversations(split_of(self._cfg, self.is_eval)))
        raise TypeError(f"no source is known of {type(self._cfg).__name__}")

    def _rows(self, cfg: RowsDataConfig) -> Iterator[Row]:
        location = location_of(cfg, self.is_eval)
        if isinstance(cfg, TextDataConfig) and location.path == STDLIB:
            rows = stdlib_rows(cfg.text_column)
        else:
            rows = rows_of(cfg, location)
            self._columns.update(_columns_of_tables(cfg, location))
        for row in rows:
            self._columns.update(row.values)
            yield row


def split_mask(hashes: array[int], cfg: DataConfig, is_eval: bool) -> np.ndarray:
    """Return which samples are on a side, at most as many as asked for: (samples,) bool.

    Those with the smallest hashes are held out. A share and not a chance for each: at least one of two is held out, and
    one is left.
    """
    import numpy as np

    values = np.asarray(hashes, dtype=np.uint64)
    if len(values) == 0:
        source = "data.factory" if isinstance(cfg, CustomDataConfig) else "data.path"
        raise ConfigError(f"data: {describe(cfg, is_eval)}: has no rows; name others by {source} or data.split")
    kept = np.ones(len(values), dtype=bool)
    if held_out_by_hash(cfg) and not holds_out_ends(cfg, len(values)):
        fraction = cfg.eval_fraction
        held_out = min(max(round(len(values) * fraction), 1), len(values) - 1) if fraction else 0
        largest = np.partition(values, held_out - 1)[held_out - 1] if held_out > 0 else None
        kept = np.full(len(values), not is_eval) if largest is None else (values <= largest) == is_eval
    most = sample_limit(cfg, is_eval)  # of documents, each of which makes at least one sample: more than enough
    return kept if most is None else kept & (np.cumsum(kept) <= most)


def holds_out_ends(cfg: DataConfig, documents: int) -> bool:
    """Whether the end of each document is held out, because they are too few to hold out whole ones."""
    is_asked_for = isinstance(cfg, TextDataConfig) and held_out_by_hash(cfg) and cfg.eval_fraction > 0
    return is_asked_for and min(round(documents * cfg.eval_fraction), documents - 1) < 1


def sample_limit(cfg: DataConfig, is_eval: bool) -> int | None:
    """Return how many samples a side may have."""
    return cfg.max_eval_samples if is_eval else cfg.max_samples


def characters_of(record: Record) -> int:
    """Return how long the text of a conversation or document is."""
    return len(record.text) if isinstance(record, Document) else sum(map(_length, record.messages))


def hash_of_prompt(sample: Record | Example) -> int:
    """Return a hash of what comes before the first answer, of a document of all: 64 bits."""
    if isinstance(sample, Document):
        prompt = sample.text
    elif isinstance(sample, Conversation):
        roles = [message["role"] for message in sample.messages]
        prompt = json.dumps(sample.messages[: roles.index(ASSISTANT)], default=str)
    else:
        first_target = next((i for i, label in enumerate(sample.labels) if label != IGNORED), None)
        prompt = json.dumps(sample.input_ids[:first_target])
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest(), "big")


def first_prompts(side: SourceSplit, count: int) -> list[str]:
    """Return what was record right before the first answer, of documents their first line, of the first few."""
    found = []
    for record in islice(side, count):
        if isinstance(record, Document):
            found.append(first_line(record))
        else:
            roles = [message["role"] for message in record.messages]
            found.append(text_of(record.messages[roles.index(ASSISTANT) - 1].get("content")))
    return found


def held_out_by_hash(cfg: DataConfig) -> bool:
    """Whether the held-out samples are a part of the training source."""
    return cfg.eval_split is None and not (isinstance(cfg, RowsDataConfig) and cfg.eval_path)


def holds_out(cfg: DataConfig) -> bool:
    """Whether anything is held out."""
    return not held_out_by_hash(cfg) or cfg.eval_fraction > 0


def split_of(cfg: DataConfig, is_eval: bool) -> str:
    """Return the name of the split that a side comes from."""
    return (cfg.eval_split if is_eval else None) or cfg.split


def location_of(cfg: RowsDataConfig, is_eval: bool) -> Location:
    """Return where the rows of a side are."""
    return (eval_location(cfg) if is_eval else None) or train_location(cfg)


def describe(cfg: DataConfig, is_eval: bool) -> str:
    """Return where a side comes from, for people."""
    split = split_of(cfg, is_eval)
    if isinstance(cfg, RowsDataConfig):
        source = f"{cfg.eval_path if is_eval and cfg.eval_path else cfg.path} ({split})"
    elif isinstance(cfg, DocsDataConfig):
        source = f"documentation of Python's standard library ({split})"
    else:
        source = f"{cfg.factory if isinstance(cfg, CustomDataConfig) else cfg.kind} ({split})"
    return f"held out of {source}" if is_eval and held_out_by_hash(cfg) else source


def rows_of(cfg: RowsDataConfig, location: Location) -> Iterator[Row]:
    """Yield the rows of a location with the columns that `cfg` reads. Raises ConfigError where it has no such columns."""
    wanted = columns_wanted(cfg)
    optional = columns_optional(cfg)
    if not is_local(location.path):
        return hub_rows(location, cfg.subset, cfg.revision, wanted, optional)
    files = files_of_split(location)
    columns = columns_of(files[0])
    problems = check_columns(wanted, columns, str(files[0])) if columns else []
    if problems:
        raise ConfigError(problems)
    return chain.from_iterable(read_rows(file, [*wanted.values(), *optional]) for file in files)


def _columns_of_tables(cfg: RowsDataConfig, location: Location) -> list[str]:
    """Return the columns of what stores them apart from its rows, of which only those that are read have them all."""
    if not is_local(location.path):
        return hub_columns(location, cfg.subset, cfg.revision)
    return [name for file in files_of_split(location) if file.suffix == ".parquet" for name in columns_of(file)]


def _as_json(conversation: Conversation) -> list[Any]:
    return [
        conversation.messages,
        conversation.tools,
        dict(conversation.template_kwargs),
        sorted(conversation.untrained),
    ]


def _length(message: Message) -> int:
    """Return how long a message is, about."""
    return sum(
        len(value) if isinstance(value, str) else len(json.dumps(value, default=str)) for value in message.values()
    )
