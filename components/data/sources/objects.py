"""Data files in an object store, which are copied to this node's cache once. Imports no torch."""

from __future__ import annotations

import logging
from pathlib import Path

from components.config.errors import ConfigError
from components.data.sources.files import Location, format_of
from components.data.sources.split_files import check_single_file, names_of_split
from components.storage.node_cache import FOLDER, NodeCache
from components.storage.object_store import ObjectStore, StoredObject, describe
from components.storage.urls import is_plain_name, join, package_problems, shown_names

logger = logging.getLogger(__name__)

_ATTEMPTS_BEFORE_LAUNCH = 2


def copies_of_split(location: Location) -> list[Path]:
    """Return local copies of the objects of a split, in the order of their names.

    Each object is downloaded by the first process of the node that needs it, and again if it was changed.

    Raises ConfigError, with `location.key`, if there are no objects of the split or they cannot be read.
    """
    if location.cache is None:
        raise ConfigError(f"{location.key}={location.path}: needs a folder for copies; set data.cache to one")
    store = _open(location)
    try:
        cache = NodeCache(Path(location.cache).expanduser() / FOLDER)
        copies = [cache.object(store, each) for each in _objects_of_split(store, location)]
    except OSError as error:
        raise ConfigError(_unreadable(location, error)) from error
    if (repeats := store.repeats()) is not None:
        logger.info(repeats)
    return copies


def names_below(location: Location) -> list[Path]:
    """Return the objects of a folder, relative to it; [] for a single object. Raises ConfigError.

    Those whose names no file can have, which are not read, are followed by the reason.
    """
    if format_of(Path(location.path)):
        return []
    try:
        objects = _listed(_open(location), location)
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
        objects = _objects_of_split(_open(location, _ATTEMPTS_BEFORE_LAUNCH), location)
    except ConfigError as error:
        return error.problems
    except OSError as error:
        return [_unreadable(location, error)]
    return [f"{location.key}={location.path}: {each.url} is empty" for each in objects if each.bytes == 0]


def _open(location: Location, attempts: int | None = None) -> ObjectStore:
    if problems := package_problems(location.key, location.path):
        raise ConfigError(problems)
    return ObjectStore(location.path) if attempts is None else ObjectStore(location.path, attempts)


def _objects_of_split(store: ObjectStore, location: Location) -> list[StoredObject]:
    """Return the objects of a split. Raises ConfigError if there are none, or OSError."""
    if format_of(Path(location.path)):
        check_single_file(location, Path(location.path))
        return [store.stat(location.path)]
    found = _objects_below(store, location)
    return [found[name] for name in names_of_split(location, list(found))]


def _objects_below(store: ObjectStore, location: Location) -> dict[Path, StoredObject]:
    """Return the objects of a folder that can be files, by their paths relative to it."""
    return {Path(name): each for name, each in _listed(store, location).items() if _is_path(name)}


def _listed(store: ObjectStore, location: Location) -> dict[str, StoredObject]:
    """Return the objects of a folder by their names relative to it."""
    prefix = join(location.path, "")
    return {each.url.removeprefix(prefix): each for each in store.list(location.path) if not each.url.endswith("/")}


def _is_path(name: str) -> bool:
    """Return whether the name of an object is a path below a folder: `a//b` and `../b` are not."""
    return all(map(is_plain_name, name.split("/")))


def _unreadable(location: Location, error: OSError) -> str:
    reason = "there is no such object" if isinstance(error, FileNotFoundError) else describe(error)
    return f"{location.key}={location.path}: {reason}"
