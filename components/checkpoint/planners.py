"""Which blocks of which tensors a rank writes and reads, for torch.distributed.checkpoint.

Its own planners know one block per rank. That is wrong for fused projections under tensor parallelism, of which a rank
holds several, and for FSDP over a tensor-parallel shard of uneven size, whose offsets they get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from components.checkpoint.manifest import FileRecord, HashedFile
from components.models.weights.shards import local_blocks, local_part

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank holds of a tensor: the shape of the whole, and blocks as views with their offsets in it."""

    shape: torch.Size
    chunks: list[ChunkStorageMetadata]
    values: list[torch.Tensor]


def held_of(tensors: Tensors) -> dict[str, Held]:
    """Return this rank's blocks of each tensor. Raises NotImplementedError for layouts that are no blocks."""
    held = {}
    for name, tensor in tensors.items():
        # Blocks have offsets, and a scalar has none: it is stored as one value in one dim.
        tensor = tensor.detach().view(1) if tensor.ndim == 0 else tensor.detach()
        local, blocks = local_part(tensor), local_blocks(tensor, name)
        offsets = [torch.Size(each.start for each in block.full) for block in blocks]
        values = [local[block.local] for block in blocks]
        chunks = [ChunkStorageMetadata(start, each.size()) for start, each in zip(offsets, values, strict=True)]
        held[name] = Held(tensor.size(), chunks, values)
    return held


class SaveBlocks(dcp.DefaultSavePlanner):
    """Writes the blocks of `held`; of a block that several ranks hold, one writes it."""

    def __init__(self, held: dict[str, Held]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held = held

    def create_local_plan(self) -> SavePlan:
        """Return an item for each block."""
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, chunk.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(values), held.shape),
                )
                for name, held in self._held.items()
                for chunk, values in zip(held.chunks, held.values, strict=True)
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the values of a block."""
        held = self._held[write_item.index.fqn]
        place = next(i for i, chunk in enumerate(held.chunks) if chunk.offsets == write_item.index.offset)
        return held.values[place].contiguous()


class LoadBlocks(dcp.DefaultLoadPlanner):
    """Fills the blocks of `held` in place from whatever blocks were written."""

    def __init__(self, held: dict[str, Held]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held = held

    def create_local_plan(self) -> LoadPlan:
        """Return an item for each pair of a block here and one there that have values in common."""
        stored = self.metadata.state_dict_metadata if self.metadata is not None else {}
        items: list[ReadItem] = []
        for name, held in self._held.items():
            described = stored[name]
            if isinstance(described, TensorStorageMetadata):
                items += create_read_items_for_chunk_list(name, described, held.chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the values to be filled, as a view."""
        values = self._held[read_item.dest_index.fqn].values[read_item.dest_index.index or 0]
        starts = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return values[tuple(slice(start, start + length) for start, length in starts)]


class BlockWriter(dcp.HuggingFaceStorageWriter):
    """Writes a rank's blocks to safetensors files; `records` says then which ones, as they were meant to be."""

    def __init__(self, folder: Path, files: dict[str, int]) -> None:
        super().__init__(str(folder), fqn_to_index_mapping=files, save_distributed=True)
        self.fs = self._files = _HashingFileSystem()
        self._count = max(files.values(), default=1)

    @property
    def records(self) -> dict[str, FileRecord]:
        """The files written by this rank."""
        return self._files.records

    def _split_by_storage_plan(
        self, storage_plan: dict[str, int] | None, items: list[WriteItem]
    ) -> dict[int, list[WriteItem]]:
        """A file holds one block of a name; further ones go to files of their own, numbered behind the others."""
        seen: dict[str, int] = {}
        files: dict[int, list[WriteItem]] = {}
        for item in items:
            name = item.index.fqn
            earlier = seen.get(name, 0)
            seen[name] = earlier + 1
            number = (storage_plan or {}).get(name, 1) + earlier * self._count
            files.setdefault(number, []).append(item)
        return files


class _HashingFileSystem(FileSystem):
    """torch's, with files that are hashed on their way."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    def create_stream(self, path: Any, mode: str) -> Any:
        """Return a context manager that opens a file; on leaving it the file is recorded."""
        return HashedFile(Path(path), self.records)
