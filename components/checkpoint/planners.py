"""The blocks of each tensor that a rank holds, and the planner and writer that save them.

torch's default planner assumes one block per rank. That fails for fused projections under tensor parallelism, where a
rank holds several blocks, and for FSDP over an uneven tensor-parallel shard, where it computes wrong offsets.
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
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from components.checkpoint.manifest import FileRecord, HashedFile
from components.models.weights.shards import Index, local_blocks, local_part

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's blocks of a tensor."""

    shape: torch.Size
    """Global shape."""
    chunks: list[ChunkStorageMetadata]
    """Offset in the global tensor and size of each block."""
    values: list[torch.Tensor]
    """Each block, as a view of the local tensor."""


def local_shards(tensors: Tensors) -> dict[str, LocalShard]:
    """Return this rank's blocks of each tensor. Raises NotImplementedError for layouts that are not block-wise."""
    shards = {}
    for name, tensor in tensors.items():
        # A scalar has no offsets; it is stored with shape (1,).
        tensor = tensor.detach().view(1) if tensor.ndim == 0 else tensor.detach()
        local, blocks = local_part(tensor), local_blocks(tensor, name)
        offsets = [torch.Size(each.start for each in block.full) for block in blocks]
        values = [local[block.local] for block in blocks]
        chunks = [ChunkStorageMetadata(start, each.size()) for start, each in zip(offsets, values, strict=True)]
        shards[name] = LocalShard(tensor.size(), chunks, values)
    return shards


def index_of(chunk: ChunkStorageMetadata) -> Index:
    """Return the index of a block in the global tensor."""
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


class SaveBlocks(dcp.DefaultSavePlanner):
    """Save planner for a rank's blocks; a block that several ranks hold is written by one of them."""

    def __init__(self, shards: dict[str, LocalShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        """Return a plan with one write item per block."""
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, chunk.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(values), shard.shape),
                )
                for name, shard in self._shards.items()
                for chunk, values in zip(shard.chunks, shard.values, strict=True)
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the values of a block."""
        shard = self._shards[write_item.index.fqn]
        number = next(i for i, chunk in enumerate(shard.chunks) if chunk.offsets == write_item.index.offset)
        return shard.values[number].contiguous()


class BlockWriter(dcp.HuggingFaceStorageWriter):
    """Storage writer for a rank's blocks: safetensors files, hashed as they are written.

    `files` maps each tensor name to the number of its file, starting at 1.
    """

    def __init__(self, folder: Path, files: dict[str, int]) -> None:
        super().__init__(str(folder), fqn_to_index_mapping=files, save_distributed=True)
        # The base class opens every file through `fs`.
        self.fs = self._files = _HashingFileSystem()
        self._count = max(files.values(), default=1)

    @property
    def records(self) -> dict[str, FileRecord]:
        """Sizes and hashes of the files written by this rank, by name."""
        return self._files.records

    def _split_by_storage_plan(
        self, storage_plan: dict[str, int] | None, items: list[WriteItem]
    ) -> dict[int, list[WriteItem]]:
        """Map file numbers to write items.

        Overrides a private method of torch: a safetensors file stores one entry per name, so further blocks of a tensor
        go to additional files, numbered after the regular ones.
        """
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
    """torch's FileSystem with files that are hashed as they are written."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    def create_stream(self, path: Any, mode: str) -> Any:
        """Return a new file, whose record is added to `records` when it is closed."""
        return HashedFile(Path(path), self.records)
