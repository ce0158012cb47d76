"""Tokens in a safetensors file: written piece by piece, read by mapping it into memory."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import xxhash

from components.data.tokens import Tokens

logger = logging.getLogger(__name__)

_COPIED_AT_ONCE = 1 << 22  # bytes
_ENTRY, _ASIDE = re.compile(r"[0-9a-f]{32}\.safetensors"), re.compile(r"\.[0-9a-f]{32}\.tmp")
_WRITTEN_WITHIN = 24 * 3600  # seconds: whoever writes a file aside has long renamed it


def write_tokens(file: Path, parts: Iterable[Tokens], told: str) -> None:
    """Write parts, laid end to end, aside and rename them to `file`; none of it is held in memory.

    Args:
        told: Text that is given back by `read_tokens`.

    Raises OSError.
    """
    import numpy as np

    aside = file.with_name(f".{uuid.uuid4().hex}.tmp")
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, aside)
        ids, labels, ends = (stack.enter_context(tempfile.TemporaryFile(dir=file.parent)) for _ in range(3))
        written = 0
        ends.write(np.zeros(1, np.int64).data)
        for part in parts:
            ids.write(part.ids.data)
            labels.write(part.labels.data)
            ends.write((part.stops + written).data)
            written += len(part.ids)
        with aside.open("wb") as whole:
            _write_whole(whole, {"ends": ("I64", 8, ends), "ids": ("I32", 4, ids), "labels": ("I32", 4, labels)}, told)
            whole.flush()
            os.fsync(whole.fileno())
        os.replace(aside, file)


def read_tokens(file: Path) -> tuple[Tokens, str] | None:
    """Return what was written, the tokens mapped; None: it is not there, or damaged, which is logged."""
    import numpy as np

    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size)) if size < file.stat().st_size else {}
        arrays: dict[str, Any] = {}
        for name, dtype in (("ends", np.int64), ("ids", np.int32), ("labels", np.int32)):
            begin, end = header[name]["data_offsets"]
            shape = ((end - begin) // np.dtype(dtype).itemsize,)
            arrays[name] = np.memmap(file, dtype, "r", 8 + size + begin, shape) if shape[0] else np.zeros(0, dtype)
        said = header["__metadata__"]
        digest = xxhash.xxh3_128(said["told"].encode())
        for array in arrays.values():
            digest.update(array.data)
        if said["hash"] == digest.hexdigest():
            return Tokens(arrays["ids"], arrays["labels"], arrays["ends"][:-1], arrays["ends"][1:]), said["told"]
        logger.warning("%s is damaged: it is made again", file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("%s is damaged (%r): it is made again", file, error)
    return None


def remove_forgotten(folder: Path, seconds: float) -> None:
    """Remove files of tokens that were not touched for `seconds`, and what writers left that were killed.

    A run that has mapped such a file goes on: on Linux its pages stay until the last process of the machine lets go.
    (Over NFS they do not stay for another machine, which then must have begun to read before those `seconds`.)

    Raises OSError: the folder cannot be listed.
    """
    now = time.time()
    for file in folder.iterdir():
        limit = seconds if _ENTRY.fullmatch(file.name) else _WRITTEN_WITHIN if _ASIDE.fullmatch(file.name) else math.inf
        with contextlib.suppress(OSError):  # gone by now, or somebody else's
            if now - file.stat().st_mtime > limit:
                file.unlink()


def _write_whole(whole: IO[bytes], parts: dict[str, tuple[str, int, IO[bytes]]], told: str) -> None:
    """Write header and contents; the hash comes into the header last, over as many zeros."""
    digest, place, header = xxhash.xxh3_128(told.encode()), 0, {}
    for name, (dtype, width, content) in parts.items():
        size = content.tell()
        header[name] = {"dtype": dtype, "shape": [size // width], "data_offsets": [place, place + size]}
        place += size

    def write_header(hexdigest: str) -> None:
        text = json.dumps({"__metadata__": {"told": told, "hash": hexdigest}, **header}).encode()
        text += b" " * (-len(text) % 8)
        whole.seek(0)
        whole.write(len(text).to_bytes(8, "little") + text)

    write_header("0" * 32)
    for _, _, content in parts.values():
        content.seek(0)
        while block := content.read(_COPIED_AT_ONCE):
            digest.update(block)
            whole.write(block)
    write_header(digest.hexdigest())


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
