"""The tensors of a checkpoint's files, written and read block by block, and the fingerprint of base weights.

Any mesh may have written the files. A checkpoint of a LoRA run stores the fingerprint in place of the base weights.

torch.distributed.checkpoint saves the blocks. Its Hugging Face storage writes safetensors only; its default storage
would write a pickled metadata file. Its default planner assumes one block per rank. That fails for fused projections
under tensor parallelism, where a rank holds several blocks, and for FSDP over an uneven tensor-parallel shard, where it
computes wrong offsets.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from components.checkpoint.manifest import CheckpointError, FileRecord, HashedFile, Manifest, fail_together
from components.checkpoint.tensors import Tensors
from components.config.schema.model import DType, WeightInit
from components.config.schema.run import PeftConfig
from components.json_collectives import all_gather_json, this_rank, world_size
from components.models.anatomy import has_adapters
from components.models.build import build_on_meta
from components.models.classifier import LM_HEAD_TENSORS, TokenScores
from components.models.lora import read_adapter
from components.models.weights.loading import weight_reader
from components.models.weights.shards import (
    Block,
    Index,
    fingerprint_of_block,
    is_first_holder,
    local_blocks,
    local_part,
)
from components.models.weights.weight_files import row_blocks
from components.models.weights.weight_sources import saved_tensors
from components.protocol.errors import ConfigError
from components.torch_kernels import torch_dtype, torch_dtypes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILE_BYTES = 512 * 1024**2
"""Approximate size of a rank's files. torch assembles a file in host memory and needs twice its size."""
_SUFFIX = ".safetensors"
Kind = tuple[str, str, int, int]
"""Name, dtype, number of dims and number of blocks of a tensor in some of the files."""
Headers = tuple[list[Kind], list[int]]
"""The tensors in some of the files, and the rows of `CheckpointTensor.blocks` of all of them, one after the other."""


def write_tensors(folder: Path, tensors: Tensors, group: dist.ProcessGroup | None = None) -> dict[str, FileRecord]:
    """Write all ranks' blocks to `folder`, replicas once; return the records of this rank's files. A collective.

    Raises NotImplementedError for layouts that do not consist of blocks.
    """
    # torch uses rank 0's mapping of names to files on all ranks, so it must cover the names of all ranks.
    local_sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    by_rank = all_gather_json(local_sizes, group)
    holders = Counter(name for held in by_rank for name in held)
    sizes = {name: size // holders[name] for held in by_rank for name, size in held.items()}
    writer = _BlockWriter(folder, _files_of_bounded_size(sizes))
    with _translated():
        dcp.save({}, storage_writer=writer, planner=SaveBlocks(_local_shards(tensors)), process_group=group)
    return writer.records


def read_tensors(stored: _CheckpointTensors, tensors: Tensors) -> None:
    """Fill this rank's shards of `tensors` in place. Raises OSError."""
    with torch.no_grad():
        stored.fill(
            (name, _index_of(chunk), values)
            for name, shard in _local_shards(tensors).items()
            for chunk, values in zip(shard.chunks, shard.values, strict=True)
        )


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
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
class _CheckpointTensors:
    """All tensors of a checkpoint, by name."""

    folder: Path
    files: list[str]
    """Names of its safetensors files, in the order of their numbers."""
    by_name: dict[str, CheckpointTensor]

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


def find_checkpoint_tensors(folder: Path, manifest: Manifest) -> _CheckpointTensors:
    """Return the tensors of a checkpoint from the headers of its files; a collective.

    The run that saved it wrote at least one file per rank. So the ranks share the work: each reads the headers of an
    equal part of the files, and they exchange what they found. Raises CheckpointError on every rank if one of them
    could not read.
    """
    files = sorted(name for name in manifest.files if name.endswith(_SUFFIX))
    first, last = (len(files) * rank // world_size() for rank in (this_rank(), this_rank() + 1))
    with fail_together(f"checkpoint {folder} could not be read"):
        mine = read_headers(folder, files, range(first, last))
    return _CheckpointTensors(folder, files, merge_headers(all_gather_json(mine)))


def read_headers(folder: Path, files: Sequence[str], numbers: Iterable[int]) -> Headers:
    """Return the blocks in the files with these numbers."""
    number_of = {str(folder / files[number]): number for number in numbers}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    reader.fs = _Files(list(number_of))
    metadata = reader.read_metadata()
    kinds: list[Kind] = []
    rows: list[int] = []
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            dtype = str(described.properties.dtype).removeprefix("torch.")
            kinds.append((name, dtype, len(described.size), len(described.chunks)))
            for chunk in described.chunks:
                path = metadata.storage_data[MetadataIndex(name, chunk.offsets)].relative_path
                rows += [number_of[path], *chunk.offsets, *chunk.sizes]
    return kinds, rows


def merge_headers(parts: Iterable[Headers]) -> dict[str, CheckpointTensor]:
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


def _tensor(dtype: torch.dtype, blocks: NDArray[np.int64]) -> CheckpointTensor:
    dims = blocks.shape[1] // 2
    shape = (blocks[:, 1 : 1 + dims] + blocks[:, 1 + dims :]).max(axis=0)
    return CheckpointTensor(tuple(shape.tolist()), dtype, blocks)


class _Files(FileSystem):
    """torch's FileSystem with a folder of chosen files."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def ls(self, path: Any) -> list[str]:
        """Return the chosen files."""
        return self._paths


def _slices(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Index:
    return tuple(slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))


def _files_of_bounded_size(sizes: dict[str, int]) -> dict[str, int]:
    """Map each tensor to the number of its file, starting at 1, so that files have about _FILE_BYTES."""
    numbers: dict[str, int] = {}
    total = 0
    for name, size in sizes.items():
        numbers[name] = 1 + total // _FILE_BYTES
        total += size
    return numbers


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise torch.distributed.checkpoint's errors, which every rank gets, as CheckpointError in one line.

    Also suppress its warning about running in a single process, which is supported here.
    """
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():  # warning filters apply to all threads, so change them only where needed
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            failures = [f"rank {rank}: {type(each).__name__}: {each}" for rank, (each, _) in error.failures.items()]
            raise CheckpointError("; ".join(failures)) from error


@dataclass(frozen=True, slots=True)
class _LocalShard:
    """This rank's blocks of a tensor."""

    shape: torch.Size
    """Global shape."""
    chunks: list[ChunkStorageMetadata]
    """Offset in the global tensor and size of each block."""
    values: list[torch.Tensor]
    """Each block, as a view of the local tensor."""


def _local_shards(tensors: Tensors) -> dict[str, _LocalShard]:
    """Return this rank's blocks of each tensor. Raises NotImplementedError for layouts that are not block-wise."""
    shards = {}
    for name, tensor in tensors.items():
        # A scalar has no offsets; it is stored with shape (1,).
        tensor = tensor.detach().view(1) if tensor.ndim == 0 else tensor.detach()
        local, blocks = local_part(tensor), local_blocks(tensor, name)
        offsets = [torch.Size(each.start for each in block.full) for block in blocks]
        values = [local[block.local] for block in blocks]
        chunks = [ChunkStorageMetadata(start, each.size()) for start, each in zip(offsets, values, strict=True)]
        shards[name] = _LocalShard(tensor.size(), chunks, values)
    return shards


def _index_of(chunk: ChunkStorageMetadata) -> Index:
    """Return the index of a block in the global tensor."""
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


class SaveBlocks(dcp.DefaultSavePlanner):
    """Save planner for a rank's blocks; a block that several ranks hold is written by one of them."""

    def __init__(self, shards: dict[str, _LocalShard]) -> None:
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


class _BlockWriter(dcp.HuggingFaceStorageWriter):
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


@torch.no_grad()
def base_fingerprint(model: nn.Module, cast: Mapping[torch.dtype, torch.dtype] = MappingProxyType({})) -> str | None:
    """Return the fingerprint of the base weights of a model with adapters, or None without adapters; a collective.

    It is a sum of the weights' bits, read as integers and multiplied by a hash of parameter name and position. Integer
    sums do not depend on the order, so the result is the same on every mesh. It detects a different base model, not
    deliberate tampering.

    Args:
        cast: Dtypes of weights, and the dtype in which the fingerprint of each is taken; others keep theirs.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not has_adapters(model):
        return None
    total = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)
    # saved_tensors returns the sharded parameters: after a forward, FSDP2's may be all-gathered and in low precision.
    for name, parameter in saved_tensors(model).items():
        if parameter.requires_grad or not isinstance(parameter, nn.Parameter):
            continue
        if is_first_holder(parameter) if isinstance(parameter, DTensor) else this_rank() == 0:
            for block in local_blocks(parameter, name):
                values = local_part(parameter)[block.local]
                total += fingerprint_of_block(name, values.to(cast.get(values.dtype, values.dtype)), block)
    if dist.is_initialized():
        dist.all_reduce(total)
    return _to_hex(total)


def load_adapter(model: PreTrainedModel, cfg: PeftConfig, stored: torch.dtype) -> str:
    """Set the adapters of a model from the PEFT folder at `cfg.path`; return a note for the banner. A collective.

    Args:
        stored: Dtype of the base weights. The fingerprint is taken in the dtype that the adapter was trained over, so
            that a GPU and a CPU, which choose different ones, can continue each other's adapters.

    Raises ConfigError like `models.read_adapter`, and for an adapter that was trained over other base weights.
    """
    trained_over = read_adapter(model, cfg)
    if not trained_over:
        return f"adapter: from {cfg.path}, which does not state the weights that it was trained over"

    def fingerprints(dtype: torch.dtype) -> Iterator[str]:
        yield (found := base_fingerprint(model, {stored: dtype}) or "")
        if isinstance(model, TokenScores):
            yield _with_lm_head(found, model, {stored: dtype})

    base = "the ones from model.path, model.config, model.dtype and peft.method"
    check_trained_over(f"peft.path={cfg.path}", trained_over, base, "restore those settings", fingerprints)
    return f"adapter: from {cfg.path}, trained over these base weights"


def check_trained_over(
    where: str, trained_over: str, base: str, change: str, fingerprints: Callable[[torch.dtype], Iterable[str]]
) -> None:
    """Compare the base weights that an adapter was trained over, as `read_adapter` returns them, with the present ones.

    Args:
        where, base, change: For the message: the adapter, the present base weights, and what to change.
        fingerprints: Returns fingerprints of the present weights in a dtype, of which one must be the stated one.

    Raises ConfigError, also if the header of the adapter is damaged.
    """
    dtype, _, expected = trained_over.partition(" ")
    if dtype not in set(DType) - {DType.auto}:
        raise ConfigError(f"{where}: the header of its weights is damaged ({trained_over!r:.60}); correct it")
    found = ""
    for found in fingerprints(torch_dtype(dtype)):
        if found == expected:
            return
    raise ConfigError(
        f"{where}: the adapter was trained over other base weights (fingerprint {expected}, {dtype}) than {base} "
        f"(fingerprint {found}); {change}, or give another adapter"
    )


def _with_lm_head(found: str, model: PreTrainedModel, cast: Mapping[torch.dtype, torch.dtype]) -> str:
    """Return the fingerprint `found` of a score model's base weights as that of the causal LM in the same files.

    An untied LM head, over which adapters of a causal LM were trained, is read from the files.
    """
    cfg: Any = model.built_from
    if cfg.init == WeightInit.random:  # without files; its head depends on the seed
        return found
    causal = build_on_meta(cfg)
    head = {name: each for name, each in causal.named_parameters() if re.match(LM_HEAD_TENSORS, name)}
    of_head = fingerprint_by_blocks(head, weight_reader(causal, cfg, seed=0), cast)
    return f"{(int(found, 16) + int(of_head, 16)) % 2**64:016x}"


def fingerprint_by_blocks(
    tensors: Mapping[str, torch.Tensor],
    read: Callable[[str, Index], torch.Tensor],
    cast: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}),
) -> str:
    """Return the fingerprint of parameters that `read` loads block by block; only the shapes of `tensors` are used.

    `cast`: as for `base_fingerprint`.
    """
    total = torch.zeros((), dtype=torch.int64)
    for name, tensor in tensors.items():
        for index in row_blocks(tensor):
            values = read(name, index)
            values = values.to(cast.get(values.dtype, values.dtype))
            total += fingerprint_of_block(name, values, Block(index, index)).cpu()
    return _to_hex(total)


def _to_hex(total: torch.Tensor) -> str:
    """Return the sum over all blocks as the stored text: 16 hex digits."""
    return f"{int(total) % 2**64:016x}"


def check_base_weights(path: object, stored: str | None, current: str | None) -> None:
    """Compare the fingerprint in a checkpoint with that of the current base weights. Raises ConfigError."""
    if stored != current:
        raise ConfigError(
            f"checkpoint {path}: its adapters were trained on other base weights (fingerprint {stored}) than the ones "
            f"from model.path, model.config, model.dtype and run.seed (fingerprint {current}); restore those settings, "
            "or choose another run.dir to start over"
        )
