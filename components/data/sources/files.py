"""Local data files: the files of a split, their columns and their rows. Imports no torch.

JSON and CSV are read with the standard library and Parquet with pyarrow, not through `datasets`: this needs no
conversion into a disk cache that several processes would have to share, and no network access. Importing `datasets`
takes 750 ms of CPU time against 11 ms for this module (pyarrow: 140 ms). For a bad line of JSON, `datasets` and pyarrow
report neither the file nor the line, only a row number that starts at 0 and skips empty lines.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from components.config.errors import ConfigError
from components.storage.urls import is_url

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""Suffixes of readable files. A .txt file is one row with the column `text`."""
_GZIP = ".gz"
"""Further suffix of a compressed file, such as .jsonl.gz; Parquet files have their own compression."""
_SUPPORTED = f"{', '.join(SUFFIXES)}, or compressed with gzip, such as .jsonl{_GZIP}"

_NOT_UTF8 = "is not UTF-8 text; convert the file to UTF-8"
_SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test")
_ROWS_FOR_COLUMNS = 100  # rows scanned for column names, because JSON rows may have different keys
_ROWS_AT_ONCE = 1000  # Parquet rows per batch: bounds memory if rows are long documents


class Row(NamedTuple):
    """One row of a source."""

    where: str
    """Origin of the row for error messages, such as `train.jsonl:17`."""
    values: dict[str, Any]
    """Values by column name."""
    problem: str = ""
    """Reason why the row has no values; it is a bad row then (`data.bad_rows`)."""


class Location(NamedTuple):
    """Location of the rows of one split (train or held-out)."""

    key: str
    """Config key of the path: data.path or data.eval_path."""
    path: str
    """File, folder or hub name."""
    split: str
    """Name of the split."""
    is_further_split: bool = False
    """Whether this is another split of data.path than the training split, so that data.path cannot be a single file."""
    cache: str | None = None
    """Folder that objects of a store are copied to; None: `path` is not a URL."""


STDLIB = "python:stdlib"
"""Value of `data.path` for the source code of the standard library: 12 MB of Python, available offline."""


def is_hub_name(path: str) -> bool:
    """Return whether `path` is the name of a hub dataset."""
    return path != STDLIB and not is_local(path)


def is_local(path: str) -> bool:
    """Return whether `path` is a URL, or a local file or folder (exists or looks like one), not a hub name."""
    return path.startswith((".", "/", "~")) or is_url(path) or bool(format_of(Path(path))) or Path(path).exists()


def format_of(file: Path) -> str:
    """Return the suffix of a file's format, without that of its compression; "" if it is not supported."""
    suffix = Path(file.stem).suffix if file.suffix == _GZIP else file.suffix
    is_readable = suffix in SUFFIXES and not (file.suffix == _GZIP and suffix == ".parquet")
    return suffix if is_readable else ""


def files_of_split(location: Location) -> list[Path]:
    """Return the files of a split: the path itself, or the files of a folder sorted by name.

    The split of a file is the prefix of its name or of its folder's name: train.jsonl,
    test-00000-of-00002.parquet, train/part-1.csv. If no file name has such a prefix, all files belong to train. A
    path to a single file is one split, whatever its name. Files of an object store are copied to `location.cache`,
    unless they are there.

    Raises ConfigError, with `location.key`, if there are no readable files of the split.
    """
    if is_url(location.path):
        from components.data.sources.objects import copies_of_split

        return copies_of_split(location)
    folder = Path(os.path.expanduser(location.path))
    setting = f"{location.key}={location.path}"
    if folder.is_file():
        check_single_file(location, folder)
        return [folder]
    if not folder.is_dir():
        raise ConfigError(
            f"{setting}: no such file or folder; set {location.key} to a JSONL, JSON, CSV, TSV or Parquet file, a "
            "folder of them, or the name of a hub dataset (owner/name)"
        )
    return [folder / name for name in names_of_split(location, names_in(folder))]


def names_in(folder: Path) -> list[Path]:
    """Return the readable files of a folder, relative to it and sorted by name."""
    found = sorted(file for file in folder.rglob("*") if format_of(file) and file.is_file())
    return [file.relative_to(folder) for file in found]


def names_without_split(location: Location) -> list[str]:
    """Return the files of a folder that are in no split, because only other files' names have a split's prefix."""
    folder = Path(os.path.expanduser(location.path))
    if is_url(location.path):
        from components.data.sources.objects import names_below

        found = names_below(location)
    else:
        found = names_in(folder) if folder.is_dir() else []
    splits = _splits_of(location, found)
    return [str(file) for file, name in splits.items() if name is None]


def check_single_file(location: Location, file: Path) -> None:
    """Require a supported suffix of a path that is one file, and no other split of it. Raises ConfigError."""
    if not format_of(file):
        raise ConfigError(
            f"{location.key}={location.path}: files with suffix {file.suffix!r} are not supported; use {_SUPPORTED}"
        )
    if location.is_further_split:
        raise ConfigError(
            f"data.eval_split={location.split}: data.path={location.path} is a single file, which has no other "
            "split; set data.eval_path to a file, or data.eval_split=null to hold out data.eval_fraction"
        )


def names_of_split(location: Location, found: Sequence[Path]) -> list[Path]:
    """Return the files of a folder that belong to a split; paths are relative to the folder. Raises ConfigError."""
    setting = f"{location.key}={location.path}"
    splits = _splits_of(location, found)
    if not splits:
        raise ConfigError(f"{setting}: the folder contains no file of a supported format ({_SUPPORTED})")
    chosen = [file for file, name in splits.items() if name == location.split]
    if not chosen:
        available = _listed(sorted({name for name in splits.values() if name}))
        raise ConfigError(
            f"{setting}: the folder has no split {location.split!r}, it has {available}; choose one of these, or "
            f"name a file {location.split}.jsonl"
        )
    return chosen


def columns_of(file: Path) -> list[str]:
    """Return the column names of a file; for JSON, the keys of its first rows."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        with readable(file):
            return pyarrow.parquet.read_schema(file).names
    names: dict[str, None] = {}
    problem = ""
    for row in islice(read_rows(file), _ROWS_FOR_COLUMNS):
        names.update(dict.fromkeys(row.values))
        problem = problem or row.problem and f"{row.where}: {row.problem}"
    if problem and not names:
        raise ConfigError(problem)
    return list(names)


def check_columns(wanted: dict[str, str], columns: Sequence[str], where: str) -> list[str]:
    """Return a problem for every entry of `wanted` (config key: column) whose column is not in `columns`."""
    problems = []
    for key, column in wanted.items():
        if column not in columns:
            close = get_close_matches(column, columns, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            problems.append(f"data.{key}={column}: {where} has no such column, it has {_listed(columns)}{hint}")
    return problems


def read_rows(file: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file; from Parquet, read only `columns`. Raises ConfigError with file and line."""
    with readable(file):
        if format_of(file) == ".parquet":
            yield from _parquet_rows(file, columns)
        elif format_of(file) in (".csv", ".tsv"):
            yield from _csv_rows(file)
        elif format_of(file) == ".txt":
            with _open_text(file) as text:
                yield Row(str(file), {"text": text.read()})
        else:
            yield from _json_rows(file)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Convert errors of reading a file into a ConfigError with its name."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_undecodable(file)}: {_NOT_UTF8}") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{file}: is damaged: its compressed data is incomplete or invalid ({error})") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: is damaged or has another format: {error}") from error


def _undecodable(file: Path) -> str:
    """Return the file with its first line that is not UTF-8, which errors of buffered reading do not hold."""
    if format_of(file) == ".parquet":  # has no lines
        return str(file)
    with gzip.open(file) if file.suffix == _GZIP else file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{file}:{number}"
    return str(file)


def _open_text(file: Path, newline: str | None = None, errors: str = "strict") -> TextIO:
    if file.suffix == _GZIP:
        return gzip.open(file, "rt", encoding="utf-8-sig", errors=errors, newline=newline)
    return file.open(encoding="utf-8-sig", errors=errors, newline=newline)


def _json_rows(file: Path) -> Iterator[Row]:
    with _open_text(file, errors="surrogateescape") as lines:
        first = next((line for line in lines if line.strip()), "")
        lines.seek(0)
        if first.lstrip().startswith("["):
            with _open_text(file) as text:
                yield from _json_array(file, text.read())
            return
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield _json_row(f"{file}:{number}", line)


def _json_row(where: str, line: str) -> Row:
    if not _is_utf8(line):
        return Row(where, {}, _NOT_UTF8)
    try:
        return _object_row(where, json.loads(line))
    except json.JSONDecodeError as error:
        problem = (
            f"not valid JSON ({error.msg}, column {error.colno}); every line must be one object such as "
            '{"prompt": "...", "response": "..."}'
        )
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        problem = f"JSON that cannot be read ({error})"
    return Row(where, {}, problem)


def _is_utf8(text: str) -> bool:
    """Return whether text that was decoded with surrogateescape had only valid bytes."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _json_array(file: Path, text: str) -> Iterator[Row]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: JSON that cannot be read ({error})") from error
    for number, values in enumerate(rows, start=1):
        yield _object_row(f"{file} row {number}", values)


def _object_row(where: str, values: Any) -> Row:
    if isinstance(values, dict):
        return Row(where, values)
    return Row(where, {}, f"is a {type(values).__name__}; must be an object with the columns as keys")


def _csv_rows(file: Path) -> Iterator[Row]:
    previous = csv.field_size_limit(2**31 - 1)  # global setting: a long document is one field
    try:
        with _open_text(file, newline="", errors="surrogateescape") as lines:
            reader = csv.DictReader(lines, delimiter="\t" if format_of(file) == ".tsv" else ",", strict=True)
            header = [name for name in reader.fieldnames or [] if name]
            if not all(map(_is_utf8, header)):
                raise ConfigError(f"{file}:1: {_NOT_UTF8}")
            if repeated := sorted({name for name in header if header.count(name) > 1}):
                raise ConfigError(f"{file}:1: the header has the column {repeated[0]!r} more than once; rename one")
            yield from (
                _csv_row(f"{file}:{line}", values, len(reader.fieldnames or [])) for line, values in _records(reader)
            )
    except csv.Error as error:
        raise ConfigError(f"{file}:{reader.reader.line_num}: not valid CSV ({error})") from error
    finally:
        csv.field_size_limit(previous)


def _records(reader: csv.DictReader[str]) -> Iterator[tuple[int, dict[Any, Any] | str]]:
    """Yield the last line of each record with its fields, or with the reason why the line cannot be split into fields.

    Raises csv.Error if a record of several lines is invalid: the lines after it may then be parts of a field.
    """
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            if reader.reader.line_num > line:  # that of DictReader is of the last record
                raise
            yield line, f"not valid CSV ({error})"
            continue
        if values is None:
            return
        yield reader.line_num, values


def _csv_row(where: str, values: dict[Any, Any] | str, size: int) -> Row:
    if isinstance(values, str):
        return Row(where, {}, values)
    texts = [each for each in values.values() if isinstance(each, str)]
    problem = "" if all(map(_is_utf8, texts)) else _NOT_UTF8
    if None in values or None in values.values():
        compared = "more" if None in values else "fewer"
        problem = (
            f"{compared} fields than the {size} of the header; put a field that contains the separator or a line break "
            "in double quotes"
        )
    return Row(where, {} if problem else values, problem)


def _parquet_rows(file: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    import pyarrow.parquet

    number = 0
    with pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=None if columns is None else list(columns)):
            for values in batch.to_pylist():
                number += 1
                yield Row(f"{file} row {number}", {name: without_null_keys(value) for name, value in values.items()})


def without_null_keys(value: Any) -> Any:
    """Remove null keys from a value of an Arrow table, where all structs of a column share the union of their keys."""
    if isinstance(value, dict):
        return {key: without_null_keys(kept) for key, kept in value.items() if kept is not None}
    if isinstance(value, list):
        return [without_null_keys(entry) for entry in value]
    return value


def _splits_of(location: Location, found: Sequence[Path]) -> Mapping[Path, str | None]:
    """Return the split of each visible file, None if it has none: all are train if no name has a split's prefix."""
    visible = [file for file in found if not any(part.startswith(".") for part in file.parts)]
    splits = {file: _split_of(file, location.split) for file in visible}
    return splits if any(splits.values()) else dict.fromkeys(visible, "train")


def _split_of(relative: Path, wanted: str) -> str | None:
    for part in (*relative.parts[:-1], relative.stem):
        for split in (wanted, *_SPLITS):
            if part == split or part.startswith((f"{split}-", f"{split}_", f"{split}.")):
                return split
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
