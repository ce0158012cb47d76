"""Blocks of a full tensor that a rank holds, on any mesh, and the full tensors, gathered one at a time on rank 0.

torch's `compute_local_shape_and_global_offset` returns one block per rank, which is wrong for two layouts. A fused
projection sharded by tensor parallelism has several blocks per rank; and for FSDP over an uneven tensor-parallel shard,
torch returns the offsets of another rank. Here a shard is a list of blocks, and its computed shape is checked against
the local tensor. Ranks may hold different names.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from components.json_collectives import all_gather_json, this_rank
from components.models.weights.weight_sources import saved_tensors
from components.torch_kernels import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Index = tuple[slice, ...]
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per element -> integer dtype of that size, to reinterpret the bits."""


@dataclass(frozen=True, slots=True)
class Block:
    """Indices of the same values in a rank's local tensor and in the full tensor."""

    local: Index
    full: Index


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local tensor, detached, sharing storage with `tensor`."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_blocks(tensor: torch.Tensor, name: str) -> list[Block]:
    """Return the blocks of the full tensor that this rank holds; empty if it holds nothing.

    Args:
        tensor: A plain tensor (one block with all values) or a DTensor.
        name: Name for errors.

    Raises:
        NotImplementedError: The placements are not supported, or do not match the shape of the local tensor.
    """
    if not isinstance(tensor, DTensor):
        full = tuple(slice(0, size) for size in tensor.shape)
        return [Block(full, full)]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    blocks = blocks_at(tensor, coordinate, name)
    actual, computed = tuple(tensor.to_local().shape), _local_shape(blocks, tensor.ndim)
    if actual != computed and math.prod(actual) + math.prod(computed):
        raise NotImplementedError(
            f"{name}: {tuple(tensor.shape)} with placements {tensor.placements} should have the local shape {computed} "
            f"on this rank, but has {actual}"
        )
    return blocks


def blocks_at(tensor: DTensor, coordinate: Sequence[int], name: str) -> list[Block]:
    """Return the blocks that the rank at `coordinate` of the tensor's mesh holds, as `local_blocks` does."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise NotImplementedError(f"{name}: holds a partial sum (Partial placement); reduce it first")
    mesh = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    runs = [_runs(size, dim, mesh, name) for dim, size in enumerate(tensor.shape)]
    return [
        Block(tuple(local for local, _ in pairs), tuple(full for _, full in pairs))
        for pairs in itertools.product(*(_slices(runs_of_dim) for runs_of_dim in runs))
    ]


def _local_shape(blocks: list[Block], ndim: int) -> tuple[int, ...]:
    """Return the shape of the local tensor that consists of `blocks`."""
    return tuple(max((block.local[dim].stop for block in blocks), default=0) for dim in range(ndim))


def is_first_holder(tensor: torch.Tensor) -> bool:
    """Return whether no lower rank of the tensor's mesh holds the same shard; True for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        rank == 0 or isinstance(placement, (Shard, _StridedShard))
        for placement, rank in zip(tensor.placements, coordinate, strict=True)
    )


@torch.no_grad()
def fill(tensor: torch.Tensor, name: str, read: Callable[[Index], torch.Tensor]) -> None:
    """Set this rank's shard of `tensor` from `read`, which returns blocks of the full tensor."""
    local = local_part(tensor)
    for block in local_blocks(tensor, name):
        local[block.local].copy_(read(block.full))


def fingerprint_of_block(name: str, values: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the contribution of one block of the parameter `name` to the fingerprint, an int64 scalar."""
    bits = values.contiguous().view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for dim, span in enumerate(block.full):
        other_dims = [other for other in range(bits.ndim) if other != dim]
        sums = bits.sum(other_dims, dtype=torch.int64) if other_dims else bits.to(torch.int64)
        positions = torch.arange(span.start, span.stop, device=values.device)
        total += (sums * _mix(positions + _hash_of(f"{name}/{dim}"))).sum()
    return total


def _mix(positions: torch.Tensor) -> torch.Tensor:
    """Hash consecutive integers to odd int64 values (the finalizer of splitmix64, without its unsigned shifts)."""
    positions = positions * -7046029254386353131
    positions = positions ^ (positions >> 27)
    return (positions * -7723592293110705685) | 1


def _hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def shards_of_dim(tensor: torch.Tensor, dim: int) -> int:
    """Return the number of parts of equal size into which a dim is divided; a rank holds one, or one of each matrix of
    a fused projection."""
    if not isinstance(tensor, DTensor):
        return 1
    return math.prod(
        degree * getattr(placement, "split_factor", 1)
        for placement, degree in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if _shards(placement, dim)
    )


def zeros_sharded_like(parameter: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros with the global shape `shape`, one value per block along one dim of a parameter, sharded like it.

    That dim is replicated if it is sharded in the parameter within a block.
    """
    if not isinstance(parameter, DTensor):
        return torch.zeros(tuple(shape), dtype=dtype, device=parameter.device)
    if tuple(shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    local_shape = list(parameter.to_local().shape)
    (dim,) = (dim for dim, size in enumerate(shape) if size != parameter.shape[dim])
    replicates = shape[dim] % shards_of_dim(parameter, dim) != 0
    local_shape[dim] = shape[dim] if replicates else shape[dim] * local_shape[dim] // parameter.shape[dim]
    device = parameter.to_local().device
    values = DTensor.from_local(
        torch.zeros(local_shape, dtype=dtype, device=device),
        parameter.device_mesh,
        [Replicate() if replicates and _shards(placement, dim) else placement for placement in parameter.placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(tuple(shape), device="meta").stride(),
    )
    return values.to(device)  # from_local moves it to the device of the mesh, but parameters may be offloaded


def _runs(size: int, dim: int, mesh: list[tuple[Placement, int, int]], name: str) -> list[range]:
    """Return the global indices of one dim that a rank holds, as ascending ranges in local order.

    Args:
        mesh: Placement, size and this rank's coordinate of each mesh axis.
    """
    runs = [range(size)]
    deferred: list[tuple[int, int]] = []
    for position, (placement, degree, rank) in enumerate(mesh):
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            inner = math.prod(n for p, n, _ in mesh[position + 1 :] if _shards(p, dim))
            factor = int(placement.split_factor)
            if factor == inner > 1:
                # FSDP over a tensor-parallel shard: the axes to the right split the dim first.
                deferred.append((degree, rank))
            elif inner == 1 and size % (factor * degree) == 0:
                # A fused projection: each of its `factor` matrices is split separately.
                groups = [_chunk(runs, factor, i) for i in range(factor)]
                runs = [run for group in groups for run in _chunk(group, degree, rank)]
            else:
                raise NotImplementedError(f"{name}: dim {dim} of size {size} has the unsupported placement {placement}")
        elif _shards(placement, dim):
            if any(isinstance(p, _StridedShard) and p.dim == dim for p, _, _ in mesh[position + 1 :]):
                deferred.append((degree, rank))  # FSDP of torch 2.11 over a fused projection
            else:
                runs = _chunk(runs, degree, rank)
    for degree, rank in deferred:  # FSDP splits what tensor parallelism has left on this rank
        runs = _chunk(runs, degree, rank)
    return runs


def _shards(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def _chunk(runs: Sequence[range], count: int, index: int) -> list[range]:
    """Return chunk `index` of `count` of the concatenated runs, with the chunk sizes of `torch.chunk`."""
    length = math.ceil(sum(len(run) for run in runs) / count)
    start, stop = length * index, length * (index + 1)
    chunk: list[range] = []
    for run in runs:
        chunk.append(run[max(start, 0) : max(stop, 0)])
        start, stop = start - len(run), stop - len(run)
    return [run for run in chunk if len(run)]


def _slices(runs: list[range]) -> list[tuple[slice, slice]]:
    """Return the local and the global slice of each run."""
    starts = itertools.accumulate((len(run) for run in runs), initial=0)
    return [
        (slice(start, start + len(run)), slice(run.start, run.stop)) for start, run in zip(starts, runs, strict=False)
    ]


WRITER = 0
"""Rank that gathers and writes."""


@dataclass(frozen=True, slots=True)
class _ShardInfo:
    """Description of a rank's shard of a tensor, which ranks exchange before they send the shards."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dtype: torch.dtype
    device: str
    """Device type that the shard is sent from and received on."""
    blocks: list[Block]

    def as_json(self) -> list[Any]:
        """Return JSON values for `from_json`."""
        blocks = [[[(each.start, each.stop) for each in index] for index in (b.local, b.full)] for b in self.blocks]
        return [self.shape, str(self.dtype).removeprefix("torch."), self.device, blocks]

    @classmethod
    def from_json(cls, values: list[Any]) -> _ShardInfo:
        """Return the description from the values of `as_json`."""
        shape, dtype, device, stored = values
        blocks = [Block(*(tuple(slice(*each) for each in index) for index in block)) for block in stored]
        return cls(tuple(shape), torch_dtype(dtype), device, blocks)


Source = tuple[int, _ShardInfo]
"""A rank and its shard of one tensor."""


@torch.no_grad()
def gathered_tensors(
    model: PreTrainedModel, order: Sequence[str], *, trained: bool = False
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the name and value of every saved tensor of every rank: full and on the CPU on WRITER, None elsewhere.

    A collective: all ranks must exhaust the iterator. Ranks first exchange descriptions of their shards. Then they send
    the shards tensor by tensor, each from the first rank that holds it, so that WRITER holds one tensor at a time. They
    are sent over the default process group: by gloo from host memory if it has gloo, else by NCCL.

    Args:
        order: Names in the order to yield them; tensors with other names follow at the end.
        trained: Skip tensors that are not trained.

    Raises:
        NotImplementedError: On every rank, if a layout is not supported or the shards do not cover a tensor.
    """
    local = {name: each for name, each in saved_tensors(model).items() if each.requires_grad or not trained}
    sources = _sources(_all_gather_shards(local))
    position = {name: index for index, name in enumerate(order)}
    for name in sorted(sources, key=lambda name: position.get(name, len(position))):
        yield name, _gather(local.get(name), sources[name])


def _all_gather_shards(local: dict[str, torch.Tensor]) -> list[dict[str, _ShardInfo]]:
    """Return the shards of each rank by name, in rank order; ranks that hold a copy of another's shard omit it."""
    shards, failure = {}, None
    try:
        shards = {name: _describe(tensor, name) for name, tensor in local.items() if is_first_holder(tensor)}
    except NotImplementedError as error:
        failure = str(error)
    by_rank = all_gather_json(failure or {name: shard.as_json() for name, shard in shards.items()})
    failures = [each for each in by_rank if isinstance(each, str)]
    if failures:
        raise NotImplementedError("; ".join(dict.fromkeys(failures)))
    return [{name: _ShardInfo.from_json(values) for name, values in each.items()} for each in by_rank]


def _describe(tensor: torch.Tensor, name: str) -> _ShardInfo:
    device = "cuda" if _requires_cuda() else "cpu"
    return _ShardInfo(tuple(tensor.shape), tensor.dtype, device, local_blocks(tensor, name))


def _sources(by_rank: list[dict[str, _ShardInfo]]) -> dict[str, list[Source]]:
    """Return the ranks that send each tensor's shards; of identical shards, the lowest rank sends.

    Raises NotImplementedError if the shards of a tensor do not add up to its size.
    """
    chosen: dict[str, dict[tuple, Source]] = {}
    for rank, shards in enumerate(by_rank):
        for name, shard in shards.items():
            bounds = tuple((each.start, each.stop) for block in shard.blocks for each in block.full)
            sources = chosen.setdefault(name, {})
            if shard.blocks:
                sources.setdefault(bounds, (rank, shard))
    for name, sources in chosen.items():
        shape = next(shards[name].shape for shards in by_rank if name in shards)
        covered = sum(_size(block) for _, shard in sources.values() for block in shard.blocks)
        if covered != math.prod(shape):
            raise NotImplementedError(f"{name}: the ranks hold {covered} of the {math.prod(shape)} values of {shape}")
    return {name: list(sources.values()) for name, sources in chosen.items()}


def _size(block: Block) -> int:
    return math.prod(each.stop - each.start for each in block.full)


def _gather(local: torch.Tensor | None, sources: list[Source]) -> torch.Tensor | None:
    rank = this_rank()
    if rank != WRITER:
        for source, shard in sources:
            if source == rank and local is not None:
                _send(local_part(local), shard)
        return None
    first = sources[0][1]
    full = torch.empty(first.shape, dtype=first.dtype)
    for source, shard in sources:
        values = local_part(local) if source == WRITER and local is not None else _receive(shard, source)
        for block in shard.blocks:
            full[block.full].copy_(values[block.local])
    return full


def _send(values: torch.Tensor, shard: _ShardInfo) -> None:
    _transfer(dist.isend, values.to(shard.device).contiguous(), WRITER)


def _receive(shard: _ShardInfo, rank: int) -> torch.Tensor:
    shape = _local_shape(shard.blocks, len(shard.shape))
    values = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    _transfer(dist.irecv, values, rank)
    return values


def _transfer(operation: Callable[..., Any], values: torch.Tensor, peer: int) -> None:
    """Send or receive contiguous values as bytes, over the communicator that the default process group has already.

    NCCL opens a communicator per pair of ranks for an unbatched send, which takes memory and time on WRITER for each
    peer; a batch, even of one operation, uses that of the group. `all_gather_json` has opened it on every rank.
    """
    batch = [dist.P2POp(operation, values.view(-1).view(torch.uint8), peer)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def _requires_cuda() -> bool:
    """Return whether NCCL is the only backend, which sends CUDA tensors only; FSDP may offload parameters."""
    return dist.is_initialized() and dist.get_backend() == "nccl"
