"""Local data files: their formats, columns and rows. Imports no torch.

JSON and CSV are read with the standard library and Parquet with pyarrow, not through `datasets`: this needs no
conversion into a disk cache that several processes would have to share, and no network access. Importing `datasets`
takes 750 ms of CPU time against 11 ms for this module (pyarrow: 140 ms). For a bad line of JSON, `datasets` and pyarrow
report neither the file nor the line, only a row number that starts at 0 and skips empty lines.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

from components.protocol.errors import ConfigError
from components.protocol.safe_parsing import DEEPEST, check_depth, parse_json, read_regular
from components.storage.object_store import is_url

_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_COMPRESSED = (".gz", ".zst")
SUPPORTED = f"{', '.join(_FORMATS)}, or compressed with gzip or zstd, such as .jsonl.gz and .jsonl.zst"
"""Suffixes of readable files, in any case, for messages. A .txt file is one row with the column `text`."""
TABLES = (".parquet", ".arrow")
"""Formats that have a schema and compress their columns, not the file."""
_TABLE_STARTS = {b"PAR1": ".parquet", b"\xff\xff\xff\xff": ".arrow"}
_OTHER_STARTS = {
    b"BZh": "bzip2",
    b"\xfd7zX": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "a ZIP archive (.xlsx, .npz)",
}
"""First bytes of files, which decide how a file is read if they contradict its name."""
_JSON = "extension<arrow.json>"
_NOT_UTF8 = "is not UTF-8 text; convert the file to UTF-8"
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
    classes: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Names of the numbers in a column of type ClassLabel of `datasets`, by column."""


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
    other_split: str | None = None
    """Name of the other split that the run reads from the path, whose files do not belong to this one."""


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
    name = Path(file.name.lower())
    is_compressed = name.suffix in _COMPRESSED
    suffix = Path(name.stem).suffix if is_compressed else name.suffix
    if suffix not in _FORMATS or (is_compressed and suffix in TABLES):
        return ""
    return ".jsonl" if suffix == ".ndjson" else suffix


def without_format(file: Path) -> str:
    """Return the name of a data file in lower case without its suffixes."""
    name = Path(file.name.lower())
    return Path(name.stem).stem if name.suffix in _COMPRESSED else name.stem


def content_format(file: Path) -> str:
    """Return the suffix of the format that a file has, by its name or, for tables, its first bytes. Raises OSError."""
    return _TABLE_STARTS.get(_start_of(file), format_of(file))


def columns_of(file: Path) -> list[str]:
    """Return the column names of a file; for JSON, the keys of its first rows."""
    with readable(file):
        if content_format(file) in TABLES:
            with _open_table(file) as (schema, _):
                return list(schema.names)
    names: dict[str, None] = {}
    problem = ""
    for row in islice(read_rows(file), _ROWS_FOR_COLUMNS):
        names.update(dict.fromkeys(row.values))
        problem = problem or (row.problem and f"{row.where}: {row.problem}")
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
    """Yield the rows of a file; from a table, read only `columns`. Raises ConfigError with file and line."""
    with readable(file):
        match content_format(file):
            case ".parquet" | ".arrow":
                yield from _table_rows(file, columns)
            case ".csv" | ".tsv":
                yield from _csv_rows(file)
            case ".txt":
                with _open_text(file) as text:
                    yield Row(str(file), {"text": text.read()})
            case _:
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
    if content_format(file) in TABLES:  # has no lines
        return str(file)
    with _open_bytes(file) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{file}:{number}"
    return str(file)


def _start_of(file: Path) -> bytes:
    return read_regular(file, count=4)  # before any other read: that of a pipe would not return


def _open_bytes(file: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file and decompress its content, whatever its name. Raises ConfigError for a format that is not read."""
    start = _start_of(file)
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(file)
    if start == b"\x28\xb5\x2f\xfd" or start[1:] == b"\x2a\x4d\x18":  # zstd, or metadata before it
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    for other, name in _OTHER_STARTS.items():
        if start.startswith(other):
            raise ConfigError(f"{file}: is {name}, which is not read; convert or decompress the file")
    return file.open("rb")


def _open_text(file: Path, newline: str | None = None, errors: str = "strict") -> TextIO:
    return io.TextIOWrapper(_open_bytes(file), encoding="utf-8-sig", errors=errors, newline=newline)


def _json_rows(file: Path) -> Iterator[Row]:
    with _open_text(file, errors="surrogateescape") as lines:
        first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("["):
        with _open_text(file) as text:
            yield from _json_array(file, text.read())
        return
    with _open_text(file, errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_row(f"{file}:{number}", line)


def _json_row(where: str, line: str) -> Row:
    if not _is_utf8(line):
        return Row(where, {}, _NOT_UTF8)
    try:
        return _object_row(where, _decoded_json(line.rstrip()))  # the column of an error at the end is in this line
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
        rows = _decoded_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: JSON that cannot be read ({error})") from error
    for number, values in enumerate(rows, start=1):
        yield _object_row(f"{file} row {number}", values)


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {repeated!r} more than once; rename one")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_with_unique_keys)


def _decoded_json(text: str) -> Any:
    """Return the value of JSON text whose objects have different keys. Raises ValueError or RecursionError."""
    value = _DECODER.decode(text)
    if text.count("[") + text.count("{") > DEEPEST:
        check_depth(value)
    return value


def _object_row(where: str, values: Any) -> Row:
    if isinstance(values, dict):
        return Row(where, values)
    return Row(where, {}, f"is a {type(values).__name__}; must be an object with the columns as keys")


def _csv_rows(file: Path) -> Iterator[Row]:
    previous = csv.field_size_limit(2**31 - 1)  # global setting: a long document is one field
    try:
        with _open_text(file, newline="", errors="surrogateescape") as lines:
            reader = csv.DictReader(lines, delimiter=_separator(file), strict=True)
            header = [name for name in reader.fieldnames or [] if name]
            if not all(map(_is_utf8, header)):
                raise ConfigError(f"{file}:1: {_NOT_UTF8}")
            _check_unique(f"{file}:1: the header", header)
            yield from (
                _csv_row(f"{file}:{line}", values, len(reader.fieldnames or [])) for line, values in _records(reader)
            )
    except csv.Error as error:
        raise ConfigError(f"{file}:{reader.reader.line_num}: not valid CSV ({error})") from error
    finally:
        csv.field_size_limit(previous)


def _separator(file: Path) -> str:
    """Return the separator of the most fields in the header; if several are equal, that of the format comes first."""
    with _open_text(file, errors="surrogateescape") as lines:
        header = lines.readline()

    def fields(separator: str) -> int:
        try:
            return len(next(csv.reader([header], delimiter=separator, strict=True), []))
        except csv.Error:  # a quoted name ends at another separator, or in a later line
            return 0

    return max(("\t" if format_of(file) == ".tsv" else ",", ",", ";", "\t", "|"), key=fields)


def _check_unique(where: str, columns: Sequence[str]) -> None:
    """Require columns with different names, as rows store values by name. Raises ConfigError."""
    if repeated := sorted({name for name in columns if columns.count(name) > 1}):
        raise ConfigError(f"{where} has the column {repeated[0]!r} more than once; rename one")


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
    texts = [value for value in values.values() if isinstance(value, str)]
    problem = "" if all(map(_is_utf8, texts)) else _NOT_UTF8
    if None in values or None in values.values():
        compared = "more" if None in values else "fewer"
        problem = (
            f"{compared} fields than the {size} of the header; put a field that contains the separator or a line break "
            "in double quotes"
        )
    return Row(where, {} if problem else values, problem)


@contextmanager
def _open_table(file: Path) -> Iterator[tuple[Any, Callable[[list[str]], Iterator[Any]]]]:
    """Open a Parquet or Arrow file: its schema, and a function that returns batches of some of its columns."""
    import pyarrow.parquet

    if content_format(file) == ".parquet":
        with pyarrow.parquet.ParquetFile(file) as table:
            yield table.schema_arrow, lambda columns: table.iter_batches(_ROWS_AT_ONCE, columns=columns)
        return
    is_stream = _start_of(file) in _TABLE_STARTS
    with pyarrow.memory_map(str(file)) as mapped:
        table = pyarrow.ipc.open_stream(mapped) if is_stream else pyarrow.ipc.open_file(mapped)
        batches = table if is_stream else (table.get_batch(i) for i in range(table.num_record_batches))
        yield table.schema, lambda columns: (batch.select(columns) for batch in batches)


def _table_rows(file: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    number = 0
    with _open_table(file) as (schema, batches_of):
        _check_unique(f"{file}:", schema.names)
        classes = _classes_of((schema.metadata or {}).get(b"huggingface", b"{}"))
        kinds = {name: schema.field(name).type for name in schema.names if columns is None or name in columns}
        encoded = {name: kind for name, kind in kinds.items() if _JSON in str(kind)}
        for batch in batches_of(list(kinds)):
            for values in batch.to_pylist():
                number += 1
                values |= {name: _decoded(values[name], kind) for name, kind in encoded.items()}
                values = {name: without_null_keys(value) for name, value in values.items()}
                yield Row(f"{file} row {number}", values, classes=classes)


def _classes_of(metadata: bytes) -> dict[str, list[str]]:
    """Return the names of the numbers in each column of type ClassLabel, from what `datasets` stores in a schema.

    Raises ValueError if it is damaged.
    """
    try:
        features = parse_json(metadata).get("info", {}).get("features") or {}
        return {name: list(each["names"]) for name, each in features.items() if each.get("_type") == "ClassLabel"}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its metadata of `datasets` cannot be read ({error!r})") from error


def _decoded(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type with its parts of type JSON decoded, which `datasets` stores as text."""
    if isinstance(value, dict):
        return {name: _decoded(each, kind.field(name).type) for name, each in value.items()}
    if isinstance(value, list):
        return [_decoded(each, kind.value_type) for each in value]
    return parse_json(value) if str(kind) == _JSON and value is not None else value


def without_null_keys(value: Any) -> Any:
    """Remove null keys from a value of an Arrow table, where all structs of a column share the union of their keys."""
    if isinstance(value, dict):
        return {key: without_null_keys(kept) for key, kept in value.items() if kept is not None}
    if isinstance(value, list):
        return [without_null_keys(entry) for entry in value]
    return value


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
