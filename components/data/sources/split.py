"""One split (train or held-out) of a source, streamed rather than loaded.

Sources may be larger than memory: selecting the held-out samples stores only a 64-bit hash of each prompt.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import chain, compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from components.config.schema.data import (
    BadRows,
    CustomDataConfig,
    DataConfig,
    DocsDataConfig,
    LabelsDataConfig,
    RowsDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from components.config.schema.rollouts import PromptsDataConfig
from components.data.examples import IGNORED, Example
from components.data.sources.columns import COMPARED, AnswerConfig, PromptRow, each_answer, each_prompt, fitted
from components.data.sources.files import (
    STDLIB,
    TABLES,
    Location,
    Row,
    check_columns,
    columns_of,
    content_format,
    format_of,
    is_local,
    read_rows,
    readable,
    without_null_keys,
)
from components.data.sources.rows import (
    ASSISTANT,
    BadRowReport,
    Conversation,
    Document,
    LabeledText,
    Message,
    columns_optional,
    columns_wanted,
    each_conversation,
    each_document,
    each_labeled_text,
    eval_location,
    no_good_row,
    refused_rows,
    train_location,
)
from components.data.sources.split_files import files_of_split, folder_notes
from components.data.sources.text import pydocs_conversations, split_document, stdlib_rows
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

Record = Conversation | Document | LabeledText | PromptRow

_ROWS_FOR_HINT = 100  # of a file that lacks a column
_READ_AT_ONCE = 1 << 24  # bytes
_CACHED_CHARACTERS = 1 << 26  # size of the largest source that is kept in memory rather than read again
_EXACT_BITS = 1 << 28  # memory for the exact selection of held-out groups; beyond, it is nearly exact


class SourceSplit:
    """Iterable of the conversations or documents of one split; iterating reads the source again."""

    def __init__(self, cfg: DataConfig, is_eval: bool) -> None:
        self.is_eval = is_eval
        self.bad = BadRowReport()
        """Rows of the whole source that could not become a record; empty until the source was read."""
        self.characters = 0
        """Characters of the whole source; 0 until it was read."""
        self._cfg = cfg
        self._mask: np.ndarray | None = None
        self._columns: set[str] = set()
        self._cached_records: list[Record] | None = None

    def __iter__(self) -> Iterator[Record]:
        mask = self._in_split
        records = compress(self._all_records(), mask)
        if not _holds_out_ends(self._cfg, len(mask)):
            return records
        fraction = self._cfg.eval_fraction
        return (split_document(record, fraction, self.is_eval) for record in records if isinstance(record, Document))

    def __len__(self) -> int:
        return int(self._in_split.sum())

    def identity(self) -> tuple[str, int]:
        """Return a hash of the content of the source and its size in bytes; files are hashed without parsing them."""
        digest, size = xxhash.xxh3_128(), 0
        files = self.files
        for file in files:
            with readable(file), file.open("rb") as content:
                while block := content.read(_READ_AT_ONCE):
                    digest.update(block)
                    size += len(block)
            digest.update(f"{format_of(file)} {size}".encode())
        for record in () if files else self._all_records():
            text = json.dumps(_as_json(record), default=str).encode()
            digest.update(text)
            size += len(text)
        return digest.hexdigest(), size

    @property
    def unused_columns(self) -> list[str]:
        """Sorted columns of the source that the config does not use; complete once the source was read."""
        if not isinstance(self._cfg, RowsDataConfig) or isinstance(self._cfg, PromptsDataConfig):
            return []
        return sorted(self._columns - {*columns_wanted(self._cfg).values(), *columns_optional(self._cfg)})

    @property
    def folder_notes(self) -> list[str]:
        """Notes on the source's folder, such as its files that are not read."""
        if not isinstance(self._cfg, RowsDataConfig):
            return []
        path = location_of(self._cfg, self.is_eval).path
        both = (train_location(self._cfg), eval_location(self._cfg))
        return folder_notes(path, [each for each in both if each is not None]) if is_local(path) else []

    @property
    def _in_split(self) -> np.ndarray:
        """Mask of the source's records that are in this split, (records,) bool. The first access reads the source.

        Raises ConfigError if there are no records, or too few to hold out any.
        """
        if self._mask is None:
            by_hash = held_out_by_hash(self._cfg)
            hashes = array("Q", (hash_of_prompt(record) if by_hash else 0 for record in self._all_records()))
            try:
                self._mask = split_mask(hashes, self._cfg, self.is_eval)
            except ConfigError as error:  # bad rows may be why there are too few
                if self.bad.count and isinstance(self._cfg, RowsDataConfig) and self._cfg.bad_rows is BadRows.refuse:
                    raise ConfigError(refused_rows(self.bad, len(hashes))) from error
                if self.bad.count and not hashes:
                    raise ConfigError(no_good_row(describe(self._cfg, self.is_eval), self.bad)) from error
                raise
        return self._mask

    @cached_property
    def files(self) -> list[Path]:
        """The files of the source, including the Arrow files of a hub dataset; empty if it has no files."""
        if not isinstance(self._cfg, RowsDataConfig):
            return []
        location = location_of(self._cfg, self.is_eval)
        if location.path == STDLIB:
            return []
        if is_local(location.path):
            return files_of_split(location)
        return _hub_files(location, self._cfg.subset, self._cfg.revision)

    def _all_records(self) -> Iterator[Record]:
        """Yield all records of the source, of both splits if they share it; small sources are cached in memory."""
        if self._cached_records is not None:
            yield from self._cached_records
            return
        bad, cached, size = BadRowReport(), list[Record](), 0
        for record in self._read(bad):
            size += characters_of(record)
            if size < _CACHED_CHARACTERS:
                cached.append(record)
            else:
                cached.clear()
            yield record
        self.bad, self.characters = bad, size
        self._cached_records = cached if size < _CACHED_CHARACTERS else None

    def _read(self, bad: BadRowReport) -> Iterator[Record]:
        if isinstance(self._cfg, TextDataConfig):
            return each_document(self._cfg, self._rows(self._cfg), bad)
        if isinstance(self._cfg, LabelsDataConfig):
            return each_labeled_text(self._cfg, self._rows(self._cfg), bad)
        if isinstance(self._cfg, AnswerConfig):
            return each_answer(self._cfg, self._rows(self._cfg), bad)
        if isinstance(self._cfg, PromptsDataConfig):
            return each_prompt(self._cfg, self._rows(self._cfg), bad)
        if isinstance(self._cfg, RowsDataConfig):
            return each_conversation(self._cfg, self._rows(self._cfg), bad)
        if isinstance(self._cfg, DocsDataConfig):
            return iter(pydocs_conversations(split_of(self._cfg, self.is_eval)))
        raise TypeError(f"unsupported data config {type(self._cfg).__name__}: it has no reader")

    def _rows(self, cfg: RowsDataConfig) -> Iterator[Row]:
        """Yield the rows of the source and collect the names of its columns."""
        location = location_of(cfg, self.is_eval)
        if isinstance(cfg, TextDataConfig) and location.path == STDLIB:
            rows = stdlib_rows(cfg.text_column)
        else:
            rows = rows_of(cfg, location, self.files)
            self._columns.update(_columns_of_tables(cfg, location, self.files))
        for row in rows:
            self._columns.update(row.values)
            yield row


def split_mask(hashes: array[int], cfg: DataConfig, is_eval: bool) -> np.ndarray:
    """Return the mask of samples in a split, up to its sample limit, (samples,) bool.

    Raises ConfigError if there is no sample, or if the share of `eval_fraction` cannot be held out.
    """
    values = np.asarray(hashes, dtype=np.uint64)
    if len(values) == 0:
        source = "data.factory" if isinstance(cfg, CustomDataConfig) else "data.path"
        raise ConfigError(f"data: {describe(cfg, is_eval)}: has no rows; set {source} or data.split to one with rows")
    kept = np.ones(len(values), dtype=bool)
    if held_out_by_hash(cfg) and not _holds_out_ends(cfg, len(values)):
        kept = _held_out(values, cfg) == is_eval
    limit = sample_limit(cfg, is_eval)  # enough for documents too, each of which becomes at least one sample
    return kept if limit is None else kept & (np.cumsum(kept) <= limit)


def _held_out(hashes: np.ndarray, cfg: DataConfig) -> np.ndarray:
    """Return the mask of the samples that `eval_fraction` holds out, (samples,) bool; equal hashes stay together.

    These are the samples with the smallest hashes. This quantile, unlike a fixed threshold, always leaves at least one
    sample in each split of two or more. If it ends within a large group of equal hashes, groups are selected instead.

    Raises ConfigError if groups allow neither half nor twice the number of samples, or less.
    """
    count, fraction = len(hashes), cfg.eval_fraction
    wanted = min(max(round(count * fraction), 1), count - 1) if fraction else 0
    if wanted < 1:
        return np.zeros(count, dtype=bool)
    smallest = hashes <= np.partition(hashes, wanted - 1)[wanted - 1]
    if smallest.sum() <= wanted + wanted // 10:
        return smallest
    _, group_of, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    remedy = "data.eval_split or data.eval_path" if isinstance(cfg, RowsDataConfig) else "data.eval_split"
    if len(sizes) == 1:
        raise ConfigError(
            f"data: {describe(cfg, False)}: all {count:,} samples have the same prompt; holding out "
            f"data.eval_fraction={fraction} requires at least two different prompts; add samples, or set {remedy}"
        )
    chosen = _groups_of_total(sizes, wanted)
    total = int(sizes[chosen].sum())
    if max(wanted, total) > 2 * min(wanted, total) or count - wanted > 2 * (count - total):
        raise ConfigError(
            f"data.eval_fraction={fraction}: would hold out {wanted:,} of {count:,} samples of {describe(cfg, False)}, "
            f"but samples with equal prompts stay in one split, and the largest of {len(sizes):,} such groups has "
            f"{sizes.max():,} samples; the nearest possible number is {total:,}; set "
            f"data.eval_fraction={total / count:.4g}, or {remedy}"
        )
    return chosen[group_of]


def _groups_of_total(sizes: np.ndarray, wanted: int) -> np.ndarray:
    """Return the mask of the first groups whose sizes add up to `wanted`, or as nearly as possible, (groups,) bool.

    The result is never empty and never contains all groups. Many groups are taken in their order, without those that
    would exceed `wanted`, which misses by less than the size of the smallest one left out.
    """
    chosen, count = np.zeros(len(sizes), dtype=bool), int(sizes.sum())
    if len(sizes) * count > _EXACT_BITS:
        left = np.arange(len(sizes))
        while len(left := left[sizes[left] <= wanted]):
            totals = np.cumsum(sizes[left])
            fitting = int(np.searchsorted(totals, wanted, side="right"))
            chosen[left[:fitting]], wanted = True, wanted - int(totals[fitting - 1])
            left = left[fitting:]
        chosen[np.argmin(sizes)] |= not chosen.any()
        return chosen
    # Subset sums as bits of one integer: the sums with one more group are the old ones, or the old ones shifted by it.
    totals_from = [1]  # bit i of each: whether some of the last groups have i samples together
    for size in reversed(sizes.tolist()):
        totals_from.append(totals_from[-1] | totals_from[-1] << size)
    possible = bin(totals_from[-1])[:1:-1]
    below, above = possible.rfind("1", 1, wanted + 1), possible.find("1", wanted, count)
    missing = below if above < 0 or (below > 0 and wanted - below <= above - wanted) else above
    for group, size in enumerate(sizes.tolist()):  # take a group if the later ones can add up to the rest
        totals_from.pop()
        if size <= missing and totals_from[-1] >> (missing - size) & 1:
            chosen[group], missing = True, missing - size
    return chosen


def _holds_out_ends(cfg: DataConfig, documents: int) -> bool:
    """Return whether the end of each document is held out, because there are too few to hold out whole ones."""
    holds_out_text = isinstance(cfg, TextDataConfig) and held_out_by_hash(cfg) and cfg.eval_fraction > 0
    return holds_out_text and min(round(documents * cfg.eval_fraction), documents - 1) < 1


def sample_limit(cfg: DataConfig, is_eval: bool) -> int | None:
    """Return the maximum number of samples of a split, or None for no limit."""
    return cfg.max_eval_samples if is_eval else cfg.max_samples


def characters_of(record: Record) -> int:
    """Return the approximate length of a conversation or document in characters."""
    if isinstance(record, Document):
        return len(record.text)
    content = record.content if isinstance(record, LabeledText | PromptRow) else record.messages
    return len(content) if isinstance(content, str) else sum(map(_length, content))


def hash_of_prompt(sample: Record | Example) -> int:
    """Return a 64-bit hash of everything before the first answer, or of a whole document or labeled text."""
    if isinstance(sample, Document):
        prompt = sample.text
    elif isinstance(sample, LabeledText | PromptRow):
        prompt = sample.content if isinstance(sample.content, str) else _as_prompt(sample.content)
    elif isinstance(sample, Conversation):
        roles = [message["role"] for message in sample.messages]
        prompt = _as_prompt(sample.messages[: roles.index(ASSISTANT)])
    else:
        first_target = next((i for i, label in enumerate(sample.labels) if label != IGNORED), None)
        # Without a prompt, the sample is a document. The first token is never a target, so one token is no prompt.
        prompt = json.dumps(sample.input_ids[: None if first_target in (0, 1) else first_target])
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest(), "big")


def _as_prompt(messages: Sequence[Message]) -> str:
    """Return messages as text without their metadata, such as an id, which equal prompts need not share."""
    kept = [{key: value for key, value in message.items() if key in COMPARED} for message in messages]
    return json.dumps(kept, default=str)


def held_out_by_hash(cfg: DataConfig) -> bool:
    """Return whether the held-out samples are selected from the training source by `eval_fraction`."""
    return cfg.eval_split is None and not (isinstance(cfg, RowsDataConfig | TokensDataConfig) and cfg.eval_path)


def holds_out(cfg: DataConfig) -> bool:
    """Return whether there is a held-out split."""
    return not held_out_by_hash(cfg) or cfg.eval_fraction > 0


def split_of(cfg: DataConfig, is_eval: bool) -> str:
    """Return the name of the source's split for training or evaluation."""
    return (cfg.eval_split if is_eval else None) or cfg.split


def location_of(cfg: RowsDataConfig, is_eval: bool) -> Location:
    """Return the location of the rows for training or evaluation."""
    return (eval_location(cfg) if is_eval else None) or train_location(cfg)


def describe(cfg: DataConfig, is_eval: bool) -> str:
    """Return a description of a split's source, for logs and errors."""
    split = split_of(cfg, is_eval)
    if isinstance(cfg, RowsDataConfig):
        source = f"{cfg.eval_path if is_eval and cfg.eval_path else cfg.path} ({split})"
    elif isinstance(cfg, DocsDataConfig):
        source = f"documentation of Python's standard library ({split})"
    else:
        source = f"{cfg.factory if isinstance(cfg, CustomDataConfig) else cfg.kind} ({split})"
    return f"held out of {source}" if is_eval and held_out_by_hash(cfg) else source


def columns_at(cfg: RowsDataConfig, location: Location) -> list[str]:
    """Return the columns of the rows at a location. Raises ConfigError if there are no rows."""
    if not is_local(location.path):
        return _hub_columns(location, cfg.subset, cfg.revision)
    if columns := columns_of(files_of_split(location)[0]):
        return columns
    raise ConfigError(f"{location.key}={location.path}: has no rows; set {location.key} to a source with rows")


def rows_of(cfg: RowsDataConfig, location: Location, files: Sequence[Path] | None = None) -> Iterator[Row]:
    """Return an iterator over the rows at a location, with the columns that `cfg` uses.

    Args:
        files: Files of the location; None: look them up, which downloads objects that were changed.

    Raises ConfigError if a required column is missing.
    """
    wanted = columns_wanted(cfg)
    optional = columns_optional(cfg)
    if not is_local(location.path):
        return _hub_rows(location, cfg.subset, cfg.revision, wanted, optional, cfg)
    files = files_of_split(location) if files is None else files
    columns = columns_of(files[0])
    problems = check_columns(wanted, columns, str(files[0])) if columns else []
    if problems:
        first = [row.values for row in islice(read_rows(files[0]), _ROWS_FOR_HINT)]
        raise ConfigError(fitted(problems, cfg, location.key, columns, first))
    names = None if isinstance(cfg, PromptsDataConfig) else [*wanted.values(), *optional]  # rewards use all columns
    return chain.from_iterable(read_rows(file, names) for file in files)


def _columns_of_tables(cfg: RowsDataConfig, location: Location, files: Sequence[Path]) -> list[str]:
    """Return all columns of hub datasets and Parquet files, whose rows are read with only the required columns."""
    if not is_local(location.path):
        return _hub_columns(location, cfg.subset, cfg.revision)
    return [name for file in files if content_format(file) in TABLES for name in columns_of(file)]


def _as_json(record: Record) -> Any:
    """Return everything of a record that determines its tokens."""
    if isinstance(record, Document):
        return record.text
    if isinstance(record, LabeledText):
        return [record.content, record.label]
    if isinstance(record, PromptRow):
        return [record.content, dict(record.columns)]
    return [record.messages, record.tools, dict(record.template_kwargs), sorted(record.untrained)]


def _length(message: Message) -> int:
    """Return the approximate length of a message in characters."""
    return sum(
        len(value) if isinstance(value, str) else len(json.dumps(value, default=str)) for value in message.values()
    )


def _hub_rows(
    location: Location,
    subset: str | None,
    revision: str | None,
    wanted: dict[str, str],
    optional: Sequence[str] = (),
    cfg: RowsDataConfig | None = None,
) -> Iterator[Row]:
    """Stream the rows of a split with the columns of `wanted` (config key: column) from disk.

    Columns of `optional` are read if they exist. With `cfg`, the error of a missing column says what to write.

    Raises ConfigError if the dataset cannot be downloaded, or if its name, subset, split or a column does not exist.
    """
    from datasets import ClassLabel

    rows = _on_disk(location, subset, revision)
    problems = check_columns(wanted, rows.column_names, location.path)
    if problems:
        raise ConfigError(
            problems if cfg is None else fitted(problems, cfg, location.key, rows.column_names, list(rows.take(20)))
        )
    names = [*wanted.values(), *(name for name in optional if name in rows.column_names)]
    if isinstance(cfg, PromptsDataConfig):
        names = list(rows.column_names)
    features = {name: rows.features[name] for name in names}
    classes = {name: each.names for name, each in features.items() if isinstance(each, ClassLabel)}
    for number, values in enumerate(rows.select_columns(names), start=1):
        values = {name: without_null_keys(value) for name, value in values.items()}
        yield Row(f"{location.path} row {number}", values, classes=classes)


def _hub_columns(location: Location, subset: str | None, revision: str | None) -> list[str]:
    """Return the column names of a split. Raises ConfigError like `_hub_rows`."""
    return list(_on_disk(location, subset, revision).column_names)


def _hub_files(location: Location, subset: str | None, revision: str | None) -> list[Path]:
    """Return the Arrow files that contain a split, possibly with other rows. Raises ConfigError like `_hub_rows`."""
    return [Path(file["filename"]) for file in _on_disk(location, subset, revision).cache_files]


def _on_disk(location: Location, subset: str | None, revision: str | None) -> Dataset:
    """Return a split as memory-mapped Arrow files, even if `datasets` would by default load a small one.

    `datasets` downloads once into its own cache (HF_HOME or HF_DATASETS_CACHE) under file locks, so several
    processes may call this at the same time. From the cache it works without a network (HF_HUB_OFFLINE=1).
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return datasets.load_dataset(
            location.path, subset, split=location.split, revision=revision, keep_in_memory=False
        )
    except (DatasetsError, OSError, ValueError) as error:
        raise ConfigError(
            f"{location.key}={location.path}: is not a local file, and loading its split {location.split!r} from the "
            f"hub failed (data.subset={subset or 'null'}): {' '.join(str(error).split())}"
        ) from error
