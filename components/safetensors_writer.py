"""Streaming writer of safetensors files: tensors are written in blocks, so that none must fit in memory.

Used for exports, adapters, the token cache and stored teachers. safetensors' `save_file` writes the same bytes, but
from memory. Checkpoints use the writer of torch.distributed.checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import IO, NamedTuple

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes per element, by dtype name in a safetensors header."""


class TensorEntry(NamedTuple):
    """Shape of a tensor, and its dtype as named in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class SafetensorsWriter:
    """Writer of one file. The header comes first and declares all tensors; their values may be written in any order."""

    def __init__(self, file: IO[bytes], entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
        """Write the header for `entries`, by tensor name. Raises OSError.

        Larger dtypes come first in the file, so that every tensor is aligned when the file is memory-mapped.
        """
        self._file, self._entries = file, entries
        self._offsets: dict[str, int] = {}
        end = 0
        for name in sorted(entries, key=lambda name: (-ITEM_BYTES[entries[name].dtype], name)):
            self._offsets[name], end = end, end + entries[name].bytes
        self._header_bytes = self._write_header(metadata)

    def write(self, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        """Write the values of a tensor, given as consecutive blocks.

        Raises:
            OSError: The file could not be written.
            ValueError: The total size of the blocks differs from the size of the declared tensor.
        """
        start, size = self._header_bytes + self._offsets[name], self._entries[name].bytes
        self._file.seek(start)
        for block in blocks:
            self._file.write(block)
        if self._file.tell() != start + size:
            raise ValueError(f"{name}: got {self._file.tell() - start} bytes, expected {size}")

    def write_part(self, name: str, begin: int, part: bytes | memoryview) -> None:
        """Write a part of a tensor from its byte `begin` on. The caller writes all parts of all tensors.

        Raises:
            OSError: The file could not be written.
            ValueError: The part does not end within the declared tensor.
        """
        if begin + len(part) > self._entries[name].bytes:
            raise ValueError(
                f"{name}: bytes {begin} to {begin + len(part)} are not within its {self._entries[name].bytes}"
            )
        self._file.seek(self._header_bytes + self._offsets[name] + begin)
        self._file.write(part)

    def replace_metadata(self, metadata: Mapping[str, str]) -> None:
        """Write the header again with other metadata. Raises OSError, or ValueError if the header's length changes."""
        if self._write_header(metadata) != self._header_bytes:
            raise ValueError("new metadata must have the same encoded length as the metadata that it replaces")

    def _write_header(self, metadata: Mapping[str, str]) -> int:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        for name, start in self._offsets.items():
            entry = self._entries[name]
            offsets = [start, start + entry.bytes]
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._file.seek(0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        return 8 + len(text)
