"""Rows of a Hugging Face hub data set."""

from __future__ import annotations

from collections.abc import Iterator

from components.config.errors import ConfigError
from components.data.files import Place, Row, check_columns


def hub_rows(place: Place, subset: str | None, revision: str | None, wanted: dict[str, str]) -> Iterator[Row]:
    """Yield the rows of a split with the columns of `wanted` (config key: column).

    `datasets` downloads once into its own cache (HF_HOME or HF_DATASETS_CACHE) under file locks, so several
    processes may do this at once; from the cache it works without a network (HF_HUB_OFFLINE=1).
    Raises ConfigError where the name, subset, split or a column is unknown, or nothing can be reached.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        rows = datasets.load_dataset(place.path, subset, split=place.split, revision=revision)
    except (DatasetsError, OSError, ValueError) as error:
        raise ConfigError(
            f"{place.key}={place.path}: is no local file, and the hub gave no split {place.split!r} of it "
            f"(data.subset={subset or 'null'}): {' '.join(str(error).split())}"
        ) from error
    problems = check_columns(wanted, rows.column_names, place.path)
    if problems:
        raise ConfigError(problems)
    for number, values in enumerate(rows.select_columns(list(wanted.values())), start=1):
        yield Row(f"{place.path} row {number}", values)
