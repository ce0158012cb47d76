"""Files of a split, in a folder or copied from an object store to this node. Imports no torch."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from components.data.sources.files import (
    SUPPORTED,
    Location,
    format_of,
    readable,
    without_format,
)
from components.protocol.errors import ConfigError
from components.storage.node_cache import FOLDER, NodeCache
from components.storage.object_store import (
    ObjectStore,
    StoredObject,
    describe,
    is_plain_name,
    is_url,
    join,
    package_problems,
    shown_names,
)

_SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test")
_SAVED_DICT = "dataset_dict.json"  # written by `save_to_disk` of a datasets.DatasetDict, with a folder per split
_METADATA = (_SAVED_DICT, "dataset_info.json", "dataset_infos.json", "state.json")
"""Names of files that `datasets` writes next to data; they hold no rows."""
_LISTED = 20  # files named in a note; further ones are only counted
logger = logging.getLogger(__name__)
_ATTEMPTS_BEFORE_LAUNCH = 2


def files_of_split(location: Location) -> list[Path]:
    """Return the files of a split: the path itself, or the files of a folder sorted by name.

    The split of a file is the prefix of its name or of its folder's name: train.jsonl,
    test-00000-of-00002.parquet, train/part-1.csv. If no file name has such a prefix, all files belong to train. A
    path to a single file is one split, whatever its name. A .txt file is not read beside files of rows. Files of an
    object store are copied to `location.cache`, unless they are there.

    Raises ConfigError, with `location.key`, if there are no readable files of the split.
    """
    if is_url(location.path):
        return _copies_of_split(location)
    folder = Path(os.path.expanduser(location.path))
    setting = f"{location.key}={location.path}"
    if folder.is_file():
        _check_single_file(location, folder)
        return [folder]
    if not folder.is_dir():
        raise ConfigError(
            f"{setting}: no such file or folder; set {location.key} to a JSONL, JSON, CSV, TSV or Parquet file, a "
            "folder of them, or the name of a hub dataset (owner/name)"
        )
    return [folder / name for name in _names_of_split(location, _names_in(folder))]


def _check_single_file(location: Location, file: Path) -> None:
    """Require a supported suffix of a path that is one file, and no other split of it. Raises ConfigError."""
    if not format_of(file):
        raise ConfigError(
            f"{location.key}={location.path}: files with suffix {file.suffix!r} are not supported; use {SUPPORTED}"
        )
    if location.is_further_split:
        raise ConfigError(
            f"data.eval_split={location.split}: data.path={location.path} is a single file, which has no other "
            "split; set data.eval_path to a file, or data.eval_split=null to hold out data.eval_fraction"
        )


def _names_of_split(location: Location, names: Sequence[Path]) -> list[Path]:
    """Return the files of a folder that belong to a split; paths are relative to the folder. Raises ConfigError."""
    setting = f"{location.key}={location.path}"
    splits = _splits_of(location, names)
    if not splits:
        raise ConfigError(
            f"{setting}: the folder contains no file of a supported format ({SUPPORTED}); it has {_listed(names)}"
        )
    chosen = [name for name, split in splits.items() if split == location.split]
    if not chosen:
        available = _listed(sorted({split for split in splits.values() if split}))
        raise ConfigError(
            f"{setting}: the folder has no split {location.split!r}, it has {available}; choose one of these, or "
            f"name a file {location.split}.jsonl"
        )
    return chosen


def folder_notes(path: str, locations: Sequence[Location]) -> list[str]:
    """Return notes on a folder: its files that are not read, and those that are read and may hold the same rows.

    Args:
        path: The folder, or a file, which needs no notes.
        locations: What a run reads: splits of this path, and other paths, which may be files in the folder.
    """
    here = [location for location in locations if location.path == path]
    if is_url(path):
        names = _names_below(here[0])
    else:
        folder = Path(os.path.expanduser(path))
        names = _names_in(folder) if folder.is_dir() else []
    splits, wanted = _splits_of(here[0], names), {each.split for each in here}
    read = {name: None for name, split in splits.items() if split in wanted}
    elsewhere = {Path(location.path) for location in locations if location.path != path}
    named = {*read, *(name for name in (names if elsewhere else ()) if Path(path, name) in elsewhere)}
    notes, formats = [], defaultdict(list)
    if unread := [_unread(name, splits) for name in names if name not in named and not _is_expected(name, splits)]:
        notes.append(f"not read: {_listed(unread)}")
    for name in read:
        formats[name.with_name(without_format(name))].append(str(name))
    same = [", ".join(names) for names in formats.values() if len(names) > 1]
    return [*notes, *(f"read although their names differ only in the format: {each}" for each in same)]


def _names_in(folder: Path) -> list[Path]:
    """Return the files of a folder and the folders below it, relative to it and sorted by name. Raises ConfigError."""
    names, visited = list[Path](), set[str]()

    def fail(error: OSError) -> None:
        raise error

    with readable(folder):
        for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
            folders[:] = [each for each in folders if not each.startswith(".")]
            if (real := os.path.realpath(parent)) in visited:  # a link to a folder above
                folders.clear()
                continue
            visited.add(real)
            for path in (Path(parent, file) for file in files):
                if format_of(path) and path.exists() and not path.is_file():
                    raise ConfigError(f"{path}: cannot be read: Not a regular file; remove it, or move it away")
                names.append(path.relative_to(folder))
    return sorted(names)


def _splits_of(location: Location, names: Sequence[Path]) -> Mapping[Path, str | None]:
    """Return the split of each data file, None if it has none: all are train if no name has a split's prefix."""
    matching = [name for name in names if format_of(name) and not _is_hidden(name)]
    for kept in (lambda name: name.name not in _METADATA, lambda name: format_of(name) != ".txt"):
        matching = [name for name in matching if kept(name)] or matching
    saved = [name.parent for name in names if name.name == _SAVED_DICT]
    known = [split for split in (location.split, location.other_split, *_SPLITS) if split is not None]
    known.sort(key=len, reverse=True)  # train_small.jsonl belongs to train only without a split train_small
    splits = {name: _split_of(name, known, saved) for name in matching}
    return splits if any(splits.values()) else dict.fromkeys(matching, "train")


def _split_of(name: Path, known: Sequence[str], saved: Sequence[Path]) -> str | None:
    """Return the split of a file.

    Args:
        known: Names of splits, the longest first.
        saved: Folders in which each split has a folder of its name.
    """
    for folder in saved:
        if name.parent != folder and name.is_relative_to(folder):
            return name.relative_to(folder).parts[0]
    for part in (*name.parts[:-1], name.stem):
        for split in known:
            prefixes = tuple(f"{split}{end}".lower() for end in "-_.")
            if part.lower() == split.lower() or part.lower().startswith(prefixes):
                return split
    return None


def _is_hidden(name: Path) -> bool:
    """Return whether a file or its folder begins with a dot, or `datasets` wrote it to find results again."""
    return any(part.startswith(".") for part in name.parts) or (
        format_of(name) == ".arrow" and name.name.startswith("cache-")
    )


def _unread(name: Path, splits: Mapping[Path, str | None]) -> str:
    """Return a file that is not read with the reason."""
    if name in splits:
        return f"{name} (split {splits[name]})" if splits[name] else f"{name} (in no split)"
    return f"{name} (text beside files of rows)" if format_of(name) == ".txt" and splits else str(name)


def _listed(names: Sequence[object]) -> str:
    more = len(names) - _LISTED
    return ", ".join([*map(str, names[:_LISTED]), *([f"and {more:,} more"] if more > 0 else [])]) or "none"


def _is_expected(name: Path, splits: Mapping[Path, str | None]) -> bool:
    """Return whether a file that is not read need not be named: it is hidden and no data, or describes other files."""
    describes = name.name in _METADATA and any(format_of(data) == ".arrow" for data in splits)
    return describes or (_is_hidden(name) and not format_of(name))


def _copies_of_split(location: Location) -> list[Path]:
    """Return local copies of the objects of a split, in the order of their names.

    Each object is downloaded by the first process of the node that needs it, and again if it was changed.

    Raises ConfigError, with `location.key`, if there are no objects of the split or they cannot be read.
    """
    if location.cache is None:
        raise ConfigError(f"{location.key}={location.path}: needs a folder for copies; set data.cache to one")
    store = _open(location)
    try:
        cache = NodeCache(Path(location.cache).expanduser() / FOLDER)
        copies = [cache.object(store, each) for each in _objects_of_split(store, location).values()]
    except OSError as error:
        raise ConfigError(_unreadable(location, error)) from error
    if (repeats := store.repeats()) is not None:
        logger.info(repeats)
    return copies


def _names_below(location: Location) -> list[Path]:
    """Return the objects of a folder, relative to it; [] for a single object. Raises ConfigError.

    Those whose names no file can have, which are not read, are followed by the reason.
    """
    if format_of(Path(location.path)):
        return []
    try:
        objects = _listed_objects(_open(location), location)
    except OSError as error:
        raise ConfigError(_unreadable(location, error)) from error
    return [Path(name if _is_path(name) else f"'{shown_names([name])}' (no name of a file)") for name in objects]


def object_problems(location: Location) -> list[str]:
    """Return the problems of the objects of a split that are visible without reading them.

    Nothing is checked if the package of the store is not installed, which is a problem only where ranks run.
    """
    if package_problems(location.key, location.path):
        return []
    try:
        objects = objects_of_split(location)
    except ConfigError as error:
        return error.problems
    return [f"{location.key}={location.path}: {each.url} is empty" for each in objects.values() if each.bytes == 0]


def objects_of_split(location: Location) -> dict[Path, StoredObject]:
    """Return the objects of a split by their paths relative to the URL of a folder, or by the name of a single one.

    Raises ConfigError, with `location.key`, if there are none or the store cannot be read.
    """
    store = _open(location, _ATTEMPTS_BEFORE_LAUNCH)
    try:
        return _objects_of_split(store, location)
    except OSError as error:
        raise ConfigError(_unreadable(location, error)) from error


def _open(location: Location, attempts: int | None = None) -> ObjectStore:
    if problems := package_problems(location.key, location.path):
        raise ConfigError(problems)
    return ObjectStore(location.path) if attempts is None else ObjectStore(location.path, attempts)


def _objects_of_split(store: ObjectStore, location: Location) -> dict[Path, StoredObject]:
    """Return the objects of a split by their relative paths. Raises ConfigError if there are none, or OSError."""
    if format_of(Path(location.path)):
        _check_single_file(location, Path(location.path))
        return {Path(Path(location.path).name): store.stat(location.path)}
    objects = _objects_below(store, location)
    return {name: objects[name] for name in _names_of_split(location, list(objects))}


def _objects_below(store: ObjectStore, location: Location) -> dict[Path, StoredObject]:
    """Return the objects of a folder that can be files, by their paths relative to it."""
    return {Path(name): each for name, each in _listed_objects(store, location).items() if _is_path(name)}


def _listed_objects(store: ObjectStore, location: Location) -> dict[str, StoredObject]:
    """Return the objects of a folder by their names relative to it."""
    prefix = join(location.path, "")
    return {each.url.removeprefix(prefix): each for each in store.list(location.path) if not each.url.endswith("/")}


def _is_path(name: str) -> bool:
    """Return whether the name of an object is a path below a folder: `a//b` and `../b` are not."""
    return all(map(is_plain_name, name.split("/")))


def _unreadable(location: Location, error: OSError) -> str:
    reason = "there is no such object" if isinstance(error, FileNotFoundError) else describe(error)
    return f"{location.key}={location.path}: {reason}"
