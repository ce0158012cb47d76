"""Which part of a full tensor a rank holds, for plain tensors and for DTensors on any mesh.

torch's own `compute_local_shape_and_global_offset` names one block per rank. Two layouts need more: a fused
projection cut by tensor parallelism (several blocks), and FSDP over a tensor-parallel shard of uneven size,
where its offsets are those of another rank. Here a part is a list of blocks, and what is computed is
compared with the tensor that is really there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The same block of values, seen in a rank's part and in the full tensor."""

    local: Index
    full: Index


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values this rank holds, sharing storage with `tensor`."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_blocks(tensor: torch.Tensor, name: str) -> list[Block]:
    """Return the blocks of the full tensor that this rank holds; none where it holds nothing.

    Args:
        tensor: A plain tensor (one block: everything) or a DTensor.
        name: For the error.

    Raises:
        NotImplementedError: The layout is not a product of shards of dims, or not the one the tensor has.
    """
    if not isinstance(tensor, DTensor):
        everything = tuple(slice(0, size) for size in tensor.shape)
        return [Block(everything, everything)]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    blocks = blocks_at(tensor, coordinate, name)
    held, described = tuple(tensor.to_local().shape), part_shape(blocks, tensor.ndim)
    if held != described and math.prod(held) + math.prod(described):
        raise NotImplementedError(
            f"{name}: {tuple(tensor.shape)} laid out as {tensor.placements} should leave {described} on this "
            f"rank, which holds {held}"
        )
    return blocks


def blocks_at(tensor: DTensor, coordinate: Sequence[int], name: str) -> list[Block]:
    """Return the blocks that the rank at `coordinate` of the tensor's mesh holds, like `local_blocks`."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise NotImplementedError(f"{name}: a partial sum has no values of its own; reduce it first")
    mesh = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    runs = [_runs(size, dim, mesh, name) for dim, size in enumerate(tensor.shape)]
    return [
        Block(tuple(local for local, _ in pairs), tuple(full for _, full in pairs))
        for pairs in itertools.product(*(_slices(runs_of_dim) for runs_of_dim in runs))
    ]


def part_shape(blocks: list[Block], ndim: int) -> tuple[int, ...]:
    """Return the shape of a part that consists of `blocks`."""
    return tuple(max((block.local[dim].stop for block in blocks), default=0) for dim in range(ndim))


def is_first_holder(tensor: torch.Tensor) -> bool:
    """Whether this rank is the first in the tensor's own mesh that holds its part; always for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        place == 0 or isinstance(placement, (Shard, _StridedShard))
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )


@torch.no_grad()
def fill(tensor: torch.Tensor, name: str, read: Callable[[Index], torch.Tensor]) -> None:
    """Set this rank's part of `tensor` to what `read` returns for its blocks of the full tensor."""
    local = local_part(tensor)
    for block in local_blocks(tensor, name):
        local[block.local].copy_(read(block.full))


def _runs(size: int, dim: int, mesh: list[tuple[Placement, int, int]], name: str) -> list[range]:
    """The indices of one dim that a rank holds, as ascending ranges in local order."""
    runs = [range(size)]
    deferred: list[tuple[int, int]] = []
    for position, (placement, degree, rank) in enumerate(mesh):
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            inner = math.prod(n for p, n, _ in mesh[position + 1 :] if _shards(p, dim))
            factor = int(placement.split_factor)
            if factor == inner > 1:
                # FSDP over a tensor-parallel shard: the axes to the right cut first.
                deferred.append((degree, rank))
            elif inner == 1 and size % (factor * degree) == 0:
                # A fused projection: each of its matrices is cut by itself.
                groups = [_chunk(runs, factor, i) for i in range(factor)]
                runs = [run for group in groups for run in _chunk(group, degree, rank)]
            else:
                raise NotImplementedError(f"{name}: dim {dim} of size {size} is laid out as {placement}")
        elif _shards(placement, dim):
            runs = _chunk(runs, degree, rank)
    for degree, rank in deferred:
        runs = _chunk(runs, degree, rank)
    return runs


def _shards(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def _chunk(runs: Sequence[range], count: int, index: int) -> list[range]:
    """The `index`-th of `count` parts of the concatenated runs, cut as `torch.chunk` cuts."""
    length = math.ceil(sum(len(run) for run in runs) / count)
    start, stop = length * index, length * (index + 1)
    part: list[range] = []
    for run in runs:
        part.append(run[max(start, 0) : max(stop, 0)])
        start, stop = start - len(run), stop - len(run)
    return [run for run in part if len(run)]


def _slices(runs: list[range]) -> list[tuple[slice, slice]]:
    """Pairs of local and full slices, one per run."""
    starts = itertools.accumulate((len(run) for run in runs), initial=0)
    return [
        (slice(start, start + len(run)), slice(run.start, run.stop)) for start, run in zip(starts, runs, strict=False)
    ]
