"""JSON of files and objects that a user, another program or an object store can change."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST = 1 << 28
"""Most bytes of a JSON file that is read whole, 256 MiB; far above any index of weights or manifest."""
DEEPEST = 200
"""Most lists and objects within one another; walking and writing the value stays far below Python's recursion limit."""
_TOO_DEEP = f"it nests more than {DEEPEST} lists and objects"


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for anything else, with the reason as a sentence.

    Refuses what the json module accepts or reports with another error: deep nesting, bytes that are not UTF-8, and
    halves of surrogate pairs, which no file name, terminal or UTF-8 file can hold.
    """
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(decoded)
        if isinstance(text, str) or "\\ud" in decoded.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except UnicodeError as error:
        raise ValueError(f"it cannot be read as UTF-8 text: {error}") from error
    if decoded.count("[") + decoded.count("{") > DEEPEST:
        check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError for a value that nests more than DEEPEST lists and objects."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            nested
            for each in level
            if isinstance(each, list | dict)
            for nested in (each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise ValueError(_TOO_DEEP)


def load_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises OSError for what is no regular file, and ValueError like `parse_json`."""
    return parse_json(read_regular(path, LARGEST))


def read_regular(path: Path, largest: int | None = None, count: int = -1) -> bytes:
    """Return the content of a regular file, or its first `count` bytes.

    Raises OSError for a pipe or a device, whose content may never end, and for a file of more than `largest` bytes.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if largest is not None and found.st_size > largest:
            raise OSError(errno.EFBIG, f"Larger than {largest:,} bytes", str(path))
        return file.read(count)
