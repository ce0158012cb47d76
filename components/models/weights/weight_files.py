"""Writing of safetensors files of bounded size, block by block: neither a file nor a tensor must fit in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from components.models.weights.shards import Index
from components.models.weights.weight_sources import INDEX_FILE, SINGLE_FILE, STORED_DTYPES
from components.safetensors_writer import SafetensorsWriter, TensorEntry

BLOCK_BYTES = 4 * 1024**2
"""Approximate size of a block that is read, converted and written at a time."""

_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
METADATA = {"format": "pt"}
"""Metadata that transformers requires in files of PyTorch weights."""


@dataclass(slots=True)
class _File:
    """A planned file: its tensors in the order in which they will be written."""

    tensors: dict[str, torch.Tensor]
    bytes: int = 0


class WeightFiles:
    """Writer of model.safetensors, or of model-N-of-M.safetensors with an index, byte-identical to save_file.

    Names, shapes and the order of the tensors must be given at the start, because the header precedes the values.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> None:
        """Plan the files; nothing is written yet.

        Args:
            tensors: All tensors by name, in the order in which they will be written. Only shapes and dtypes are used,
                so they may be on the meta device.
            shard_bytes: Maximum size of a file without its header; a single larger tensor gets its own file.
        """
        self._folder = folder
        self._files = _split(tensors, shard_bytes)
        self._file_of = {name: index for index, file in enumerate(self._files) for name in file.tensors}
        self._open: tuple[int, BinaryIO, SafetensorsWriter] | None = None
        self._written = 0

    def write(self, name: str, blocks: Iterable[torch.Tensor]) -> None:
        """Write the next tensor, given as blocks along its first dim.

        Raises:
            OSError: The file could not be written.
            ValueError: The blocks do not match the planned shape or dtype.
        """
        planned = self._files[self._file_of[name]].tensors[name]

        def checked() -> Iterator[memoryview]:
            for block in blocks:
                if block.dtype != planned.dtype or block.shape[1:] != planned.shape[1:]:
                    raise ValueError(
                        f"{name}: got a block of shape {tuple(block.shape)}, {block.dtype}; expected blocks of a "
                        f"tensor of shape {tuple(planned.shape)}, {planned.dtype}"
                    )
                yield bytes_of(block)

        self._writer_of(name).write(name, checked())
        self._written += 1

    def finish(self) -> None:
        """Close the last file and write the index if there are several files. Raises OSError, ValueError."""
        self.close()
        if self._written != len(self._file_of):
            raise ValueError(f"{self._written} tensors were written, but {len(self._file_of)} were planned")
        if len(self._files) > 1:
            weight_map = {name: self._name(index) for name, index in self._file_of.items()}
            body = {"metadata": {"total_size": sum(file.bytes for file in self._files)}, "weight_map": weight_map}
            (self._folder / INDEX_FILE).write_text(json.dumps(body, indent=2) + "\n")

    def close(self) -> None:
        """Close the current file, if any."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _name(self, index: int) -> str:
        count = len(self._files)
        return SINGLE_FILE if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"

    def _writer_of(self, name: str) -> SafetensorsWriter:
        """Return the writer of a tensor's file; open the file first if it is not the current one."""
        index = self._file_of[name]
        if self._open is None or self._open[0] != index:
            self.close()
            tensors = self._files[index].tensors
            # Mode x: returning to an earlier file fails, because tensors must be written in the planned order.
            file = (self._folder / self._name(index)).open("xb")
            try:
                writer = SafetensorsWriter(file, {each: _entry(tensors[each]) for each in tensors}, METADATA)
            except BaseException:
                file.close()
                raise
            self._open = (index, file, writer)
        return self._open[2]


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors in memory to one file. Raises OSError."""
    with path.open("xb") as file:
        writer = SafetensorsWriter(file, {name: _entry(each) for name, each in tensors.items()}, METADATA)
        for name, each in tensors.items():
            writer.write(name, [bytes_of(each)])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's values as bytes; copied only if they are not contiguous in host memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def row_blocks(tensor: torch.Tensor) -> Iterator[Index]:
    """Yield the indices of blocks of rows, about BLOCK_BYTES each, in which a tensor is read and written."""
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


def _entry(tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(_NAMES[tensor.dtype], tuple(tensor.shape))


def _size(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
