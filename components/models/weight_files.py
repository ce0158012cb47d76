"""Write safetensors files of bounded size block by block: no tensor has to be whole in memory, let alone a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from components.models.safetensors import INDEX_FILE, SINGLE_FILE
from components.models.shards import Index

BLOCK_BYTES = 4 * 1024**2
"""About what is read, converted and written at a time."""

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Types as a safetensors header calls them."""


@dataclass(slots=True)
class _File:
    """A file that is being planned: what is in it, in the order in which it will arrive."""

    tensors: dict[str, torch.Tensor]
    bytes: int = 0


class WeightFiles:
    """model.safetensors, or model-N-of-M.safetensors with an index; the same bytes as safetensors' save_file writes.

    What comes is known from the start, and comes in that order, so that a file's header is written first and the
    values go straight to their places.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> None:
        """Plan the files; nothing is written yet.

        Args:
            tensors: Every tensor by name, in the order in which they will be written; shapes and types count, so
                they may be on the meta device.
            shard_bytes: Largest file without its header; a single larger tensor still makes one file.
        """
        self._folder = folder
        self._files = _split(tensors, shard_bytes)
        self._file_of = {name: index for index, file in enumerate(self._files) for name in file.tensors}
        self._open: tuple[int, BinaryIO, dict[str, int]] | None = None
        self._written = 0

    def write(self, name: str, blocks: Iterable[torch.Tensor]) -> None:
        """Write the next tensor, given as blocks along its first dim.

        Raises:
            OSError: The file could not be written.
            ValueError: The blocks do not make the tensor that was announced.
        """
        announced = self._files[self._file_of[name]].tensors[name]
        file, place = self._place_of(name)
        file.seek(place)
        for block in blocks:
            if block.dtype != announced.dtype or block.shape[1:] != announced.shape[1:]:
                raise ValueError(
                    f"{name}: a block of {tuple(block.shape)} {block.dtype} where {tuple(announced.shape)} "
                    f"{announced.dtype} were expected"
                )
            file.write(block.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        if file.tell() != place + _size(announced):
            raise ValueError(f"{name}: {file.tell() - place} bytes where {_size(announced)} were expected")
        self._written += 1

    def finish(self) -> None:
        """Close the last file and write the index where there are several. Raises OSError, ValueError."""
        self.close()
        if self._written != len(self._file_of):
            raise ValueError(f"{self._written} tensors were written where {len(self._file_of)} were expected")
        if len(self._files) > 1:
            weight_map = {name: self._name(index) for name, index in self._file_of.items()}
            body = {"metadata": {"total_size": sum(file.bytes for file in self._files)}, "weight_map": weight_map}
            (self._folder / INDEX_FILE).write_text(json.dumps(body, indent=2) + "\n")

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _name(self, index: int) -> str:
        count = len(self._files)
        return SINGLE_FILE if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"

    def _place_of(self, name: str) -> tuple[BinaryIO, int]:
        """Return the open file of a tensor and where its values begin."""
        index = self._file_of[name]
        if self._open is None or self._open[0] != index:
            self.close()
            header, places = _header(self._files[index].tensors)
            file = (self._folder / self._name(index)).open("xb")  # a file is left only when it is full
            self._open = (index, file, places)
            file.write(header)
        return self._open[1], self._open[2][name]


def row_blocks(tensor: torch.Tensor) -> Iterator[Index]:
    """Yield the blocks of rows, about BLOCK_BYTES each, in which a tensor is read and written."""
    if tensor.ndim == 0:
        yield ()
        return
    rows = max(1, BLOCK_BYTES // max(1, _size(tensor[:1])))
    rest = tuple(slice(0, size) for size in tensor.shape[1:])
    for start in range(0, tensor.shape[0], rows):
        yield (slice(start, min(start + rows, tensor.shape[0])), *rest)


def _split(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> list[_File]:
    files: list[_File] = []
    for name, tensor in tensors.items():
        if not files or (files[-1].tensors and files[-1].bytes + _size(tensor) > shard_bytes):
            files.append(_File({}))
        files[-1].tensors[name] = tensor
        files[-1].bytes += _size(tensor)
    return files


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the head of a file, and where in the file each tensor begins.

    Wider types come first: each value then is at a multiple of its size, which a file that is mapped needs.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        offsets[name], end = end, end + _size(tensors[name])
        entries[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + offset for name, offset in offsets.items()}


def _size(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
