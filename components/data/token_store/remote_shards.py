"""Shards in an object store: read in parts, which are kept on the node, and fetched before they are needed."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from components.config.errors import ConfigError
from components.config.schema.data import TokensDataConfig
from components.data.token_store.manifest import Manifest
from components.storage.node_cache import FOLDER, NodeCache
from components.storage.object_store import ObjectStore, StoredObject
from components.storage.stored_file import OpenFile
from components.storage.urls import join

logger = logging.getLogger(__name__)

PART_BYTES = 4 * 1024**2
"""Bytes that are read at once: about two blocks of 256 rows of 4,096 ids of 2 bytes."""
_ATTEMPTS = 12  # about two minutes without the store
_THREADS = 4
_REPORT_SECONDS = 60.0


class RemoteShards:
    """The files of a token store behind a URL."""

    def __init__(self, manifest: Manifest, cache: NodeCache) -> None:
        if manifest.url is None:
            raise ValueError("the manifest has no URL: its shards are files")
        self._url, self._cache = manifest.url, cache
        self._store = ObjectStore(manifest.url, _ATTEMPTS)
        self._entries = {entry.path: entry for entry in manifest.shards}
        self._reported = time.monotonic()

    def open(self, path: Path) -> RemoteFile:
        """Open a file by its path below the manifest's URL. Raises OSError.

        The size of a shard and a hash of its ids are in the manifest; those of other files are looked up.
        """
        url = join(self._url, path.as_posix())
        entry = self._entries.get(path.as_posix())
        source = self._store.stat(url) if entry is None else StoredObject(url, entry.bytes, entry.hash)
        return RemoteFile(self._store, self._cache, source)

    def report(self) -> None:
        """Log the requests that were repeated, at most once a minute."""
        if time.monotonic() - self._reported >= _REPORT_SECONDS:
            self._reported = time.monotonic()
            if (repeats := self._store.repeats()) is not None:
                logger.warning(repeats)


class RemoteFile(OpenFile):
    """An object that is read through the cache of the node."""

    def __init__(self, store: ObjectStore, cache: NodeCache, source: StoredObject) -> None:
        self._store, self._cache, self._source = store, cache, source
        self._name, self._kind = source.url, "token shard"
        self._remedy = "restore the object, remove data.cache if the object is intact, or write the manifest again"
        self.size = source.bytes

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`. Raises OSError if the object is shorter or cannot be read."""
        source, filled = self._source, 0
        while filled < len(buffer):
            start = (offset + filled) // PART_BYTES * PART_BYTES
            stop = min(start + PART_BYTES, source.bytes)
            first = offset + filled - start
            last = min(stop - start, first + len(buffer) - filled)
            if last <= first:
                raise OSError(f"{source.url} ends at byte {source.bytes:,}; {offset + len(buffer):,} were expected")
            data = self._cache.part(source, start, self._reader(start, stop), first, last)
            buffer[filled : filled + len(data)] = data
            filled += len(data)

    def _reader(self, start: int, stop: int) -> Callable[[], bytes]:
        return lambda: self._store.read_range(self._source.url, start, stop)


class Prefetch:
    """Threads that read rows in the given order and discard them, so that their parts are in the cache."""

    def __init__(self, read: Callable[[int], object]) -> None:
        self._read = read
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def add(self, rows: Iterable[int]) -> None:
        """Begin to read rows, after those that were added before."""
        for row in rows:
            self._wanted.put(row)
        while len(self._threads) < _THREADS:
            self._threads.append(threading.Thread(target=self._run, name="prefetch", daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while True:
            row = self._wanted.get()
            try:
                self._read(row)
            except (OSError, ConfigError) as error:  # raised again where the row is used
                logger.debug("row %d was not fetched: %s", row, error)


def remote_shards(manifest: Manifest, cfg: TokensDataConfig) -> RemoteShards | None:
    """Return the shards of a store behind a URL, with the cache of a config; None for a store on disk."""
    if manifest.url is None or cfg.cache is None:
        return None
    folder = Path(cfg.cache).expanduser() / FOLDER / "shards"
    return RemoteShards(manifest, NodeCache(folder, int(cfg.cache_gib * 1024**3)))
