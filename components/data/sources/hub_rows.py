"""Rows of a Hugging Face hub dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.config.errors import ConfigError
from components.config.schema.data import RowsDataConfig
from components.data.sources.column_hints import fitted
from components.data.sources.files import Location, Row, check_columns, without_null_keys

if TYPE_CHECKING:
    from datasets import Dataset


def hub_rows(
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
    features = {name: rows.features[name] for name in names}
    classes = {name: each.names for name, each in features.items() if isinstance(each, ClassLabel)}
    for number, values in enumerate(rows.select_columns(names), start=1):
        values = {name: without_null_keys(value) for name, value in values.items()}
        yield Row(f"{location.path} row {number}", values, classes=classes)


def hub_columns(location: Location, subset: str | None, revision: str | None) -> list[str]:
    """Return the column names of a split. Raises ConfigError like `hub_rows`."""
    return list(_on_disk(location, subset, revision).column_names)


def hub_files(location: Location, subset: str | None, revision: str | None) -> list[Path]:
    """Return the Arrow files that contain a split, possibly with other rows. Raises ConfigError like `hub_rows`."""
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
