"""Cache on disk of numbers computed from files, such as hashes, so that a start need not read unchanged files again.

It is next to the token cache. A number is valid while size, inode and time of modification of its file do not change. A
change within the resolution of the clock of a file system would be missed, so numbers about a file that was modified in
the last seconds are not kept. Damage of a disk that changes none of them is not noticed either.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash

from components.protocol.run_files import PRIVATE, atomic_write_json, read_json

SUFFIX = ".known.json"
_RECENT_SECONDS = 5.0
"""Age below which a file may be modified again without a change of its time of modification (NFS, FAT: 2 s)."""


class KnownNumbers:
    """Cached numbers of some files. If its file does not exist or cannot be written, nothing is cached."""

    def __init__(self, store: Path, files: Iterable[Path]) -> None:
        """`store`: Path of the file with the numbers; its time of modification is that of its last use.

        Raises OSError if one of `files` is missing.
        """
        self._store, self._files = store, [*files]
        self._stamps = self._stamps_now()
        stored = read_json(store)
        values = stored.get("values")
        self._values: dict[str, Any] = {}
        if isinstance(values, dict) and stored == self._stored(values):
            self._values = values
        with contextlib.suppress(OSError):  # it does not exist, or the folder is read-only
            os.utime(store)

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the JSON value with this name, after computing and storing it if it is not known.

        Raises whatever `compute` raises.
        """
        if name not in self._values:
            self._values[name] = compute()
            with contextlib.suppress(OSError):
                if self._stamps == self._stamps_now() and time.time() - self._last_change > _RECENT_SECONDS:
                    atomic_write_json(self._store, self._stored(self._values), PRIVATE)
        return self._values[name]

    def _stored(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the content of the file with these values, whose hash detects damage."""
        content = {"stamps": self._stamps, "values": values}
        return content | {"hash": xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())}

    def _stamps_now(self) -> list[list[Any]]:
        stamps, self._last_change = [], 0.0
        for file in self._files:
            found = file.stat()
            stamps.append([str(file), found.st_size, found.st_ino, found.st_mtime_ns])
            self._last_change = max(self._last_change, found.st_mtime)
        return stamps
