"""The tensors of a checkpoint's files, whichever mesh wrote them: shapes and blocks, read block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from components.checkpoint.checkpoint_error import fail_together
from components.checkpoint.manifest import Manifest
from components.dtypes import torch_dtypes
from components.exchange import all_gather_json, this_rank, world_size
from components.models.weights.shards import Index

SUFFIX = ".safetensors"
Kind = tuple[str, str, int, int]
"""Name, dtype, number of dims and number of blocks of a tensor in some of the files."""
Headers = tuple[list[Kind], list[int]]
"""The tensors in some of the files, and the rows of `StoredTensor.blocks` of all of them, one after the other."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Global shape, dtype and blocks of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: NDArray[np.int64]
    """(blocks, 1 + 2 dims): number of the file, offset in each dim of the global tensor, size in each dim."""

    @property
    def numel(self) -> int:
        """Number of stored values; fewer than those of the shape if blocks are missing."""
        return int(self.blocks[:, 1 + len(self.shape) :].prod(axis=1).sum())

    def overlaps(self, index: Index) -> Iterator[tuple[int, Index, Index]]:
        """Yield the file number of each block that overlaps `index`, and the overlap within the block and the index."""
        dims = len(self.shape)
        begins, ends = np.array([each.start for each in index]), np.array([each.stop for each in index])
        offsets = self.blocks[:, 1 : 1 + dims]
        starts = np.maximum(offsets, begins)  # (blocks, dims)
        stops = np.minimum(offsets + self.blocks[:, 1 + dims :], ends)
        for block in np.flatnonzero((starts < stops).all(axis=1)).tolist():
            start, stop = starts[block], stops[block]
            yield (
                int(self.blocks[block, 0]),
                _slices(start - offsets[block], stop - offsets[block]),
                _slices(start - begins, stop - begins),
            )


@dataclass(frozen=True, slots=True)
class CheckpointTensors:
    """All tensors of a checkpoint, by name."""

    folder: Path
    files: list[str]
    """Names of its safetensors files, in the order of their numbers."""
    by_name: dict[str, StoredTensor]

    def fill(self, targets: Iterable[tuple[str, Index, torch.Tensor]]) -> None:
        """Fill tensors with blocks of stored tensors; each file is opened once.

        Args:
            targets: Name of a stored tensor, index of a block of it, and the tensor of the block's shape to fill.

        Raises:
            OSError: A file cannot be read, or the stored blocks do not cover a target.
        """
        parts: dict[int, list[tuple[str, Index, torch.Tensor]]] = {}
        for name, index, target in targets:
            covered = 0
            for number, source, part in self.by_name[name].overlaps(index):
                values = target[part]
                covered += values.numel()
                parts.setdefault(number, []).append((name, source, values))
            if covered != target.numel():
                raise OSError(f"{self.folder}: {name} has {covered} of the {target.numel()} values of a block")
        for number in sorted(parts):
            path = self.folder / self.files[number]
            try:
                with safe_open(path, framework="pt") as file:
                    for name, source, values in parts[number]:
                        values.copy_(file.get_slice(name)[source])
            except (OSError, SafetensorError) as error:
                raise OSError(f"{path}: can no longer be read ({error})") from error


def find_checkpoint_tensors(folder: Path, manifest: Manifest) -> CheckpointTensors:
    """Return the tensors of a checkpoint from the headers of its files; a collective.

    The run that saved it wrote at least one file per rank. So the ranks share the work: each reads the headers of an
    equal part of the files, and they exchange what they found. Raises CheckpointError on every rank if one of them
    could not read.
    """
    files = sorted(name for name in manifest.files if name.endswith(SUFFIX))
    first, last = (len(files) * rank // world_size() for rank in (this_rank(), this_rank() + 1))
    with fail_together(f"checkpoint {folder} could not be read"):
        mine = read_headers(folder, files, range(first, last))
    return CheckpointTensors(folder, files, merge_headers(all_gather_json(mine)))


def read_headers(folder: Path, files: Sequence[str], numbers: Iterable[int]) -> Headers:
    """Return the blocks in the files with these numbers."""
    number_of = {str(folder / files[number]): number for number in numbers}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    reader.fs = _Files(list(number_of))
    found = reader.read_metadata()
    kinds: list[Kind] = []
    rows: list[int] = []
    for name, described in found.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            dtype = str(described.properties.dtype).removeprefix("torch.")
            kinds.append((name, dtype, len(described.size), len(described.chunks)))
            for chunk in described.chunks:
                path = found.storage_data[MetadataIndex(name, chunk.offsets)].relative_path
                rows += [number_of[path], *chunk.offsets, *chunk.sizes]
    return kinds, rows


def merge_headers(parts: Iterable[Headers]) -> dict[str, StoredTensor]:
    """Return the tensors of which `parts` hold the blocks, by name.

    Most ranks save a block of each tensor, so most parts list the same tensors. Their rows are merged as one array: a
    loop over all blocks takes minutes at 16,384 ranks.
    """
    alike: dict[tuple[Kind, ...], list[NDArray[np.int64]]] = {}
    for kinds, rows in parts:
        key = tuple((name, dtype, dims, count) for name, dtype, dims, count in kinds)
        alike.setdefault(key, []).append(np.array(rows, np.int64))
    blocks: dict[str, list[NDArray[np.int64]]] = {}
    dtypes, known = {}, torch_dtypes()
    for key, arrays in alike.items():
        stacked, first = np.stack(arrays), 0  # (parts, integers of all rows)
        for name, dtype, dims, count in key:
            last = first + count * (1 + 2 * dims)
            blocks.setdefault(name, []).append(stacked[:, first:last].reshape(-1, 1 + 2 * dims))
            dtypes[name] = known[dtype]
            first = last
    return {name: _tensor(dtypes[name], np.concatenate(found)) for name, found in blocks.items()}


def _tensor(dtype: torch.dtype, blocks: NDArray[np.int64]) -> StoredTensor:
    dims = blocks.shape[1] // 2
    shape = (blocks[:, 1 : 1 + dims] + blocks[:, 1 + dims :]).max(axis=0)
    return StoredTensor(tuple(shape.tolist()), dtype, blocks)


class _Files(FileSystem):
    """torch's FileSystem with a folder of chosen files."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def ls(self, path: Any) -> list[str]:
        """Return the chosen files."""
        return self._paths


def _slices(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Index:
    return tuple(slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))
