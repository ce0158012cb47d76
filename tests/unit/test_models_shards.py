"""Blocks of a shard, compared with torch's placements. No process group is needed: layouts are arithmetic."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, Placement, _StridedShard

from components.models.weights.shards import _local_shape, blocks_at


@dataclass
class FakeMesh:
    shape: tuple[int, ...]


@dataclass
class Layout:
    """The attributes of a DTensor that `blocks_at` reads."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    device_mesh: FakeMesh

    @property
    def ndim(self) -> int:
        return len(self.shape)


def shard_of(layout: Layout, full: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
    blocks = blocks_at(layout, coordinate, "weight")
    shard = torch.full(_local_shape(blocks, full.ndim), -1)
    for block in blocks:
        shard[block.local] = full[block.full]
    return shard


def chunk(tensor: torch.Tensor, count: int, index: int, dim: int) -> torch.Tensor:
    """`torch.chunk` with empty chunks at the end, as torch shards tensors."""
    chunks = tensor.chunk(count, dim=dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 13, 16, 258])
@pytest.mark.parametrize(("fsdp", "tp"), [(1, 4), (2, 2), (4, 1), (4, 2), (2, 4), (4, 4)])
def test_fsdp_over_a_tp_shard_is_a_chunk_of_a_chunk(rows: int, fsdp: int, tp: int) -> None:
    full = torch.arange(rows * 3).reshape(rows, 3)
    first = _StridedShard(0, split_factor=tp) if tp > 1 else Shard(0)
    layout = Layout((rows, 3), (first, Shard(0)), FakeMesh((fsdp, tp)))
    for data, tensor in itertools.product(range(fsdp), range(tp)):
        expected = chunk(chunk(full, tp, tensor, 0), fsdp, data, 0)  # TP shards first, then FSDP
        if expected.numel():
            assert torch.equal(shard_of(layout, full, (data, tensor)), expected)
        else:
            assert blocks_at(layout, (data, tensor), "weight") == []


def test_plain_shards_over_one_and_two_dims() -> None:
    full = torch.arange(7 * 10).reshape(7, 10)
    layout = Layout((7, 10), (Replicate(), Shard(0), Shard(1)), FakeMesh((2, 2, 3)))
    for replica, row, column in itertools.product(range(2), range(2), range(3)):
        expected = chunk(chunk(full, 2, row, 0), 3, column, 1)
        assert torch.equal(shard_of(layout, full, (replica, row, column)), expected)
    twice = Layout((7, 10), (Shard(0), Shard(0)), FakeMesh((2, 2)))
    for outer, inner in itertools.product(range(2), range(2)):
        assert torch.equal(shard_of(twice, full, (outer, inner)), chunk(chunk(full, 2, outer, 0), 2, inner, 0))


def test_each_matrix_of_a_fused_projection_is_sharded_separately() -> None:
    full = torch.arange(2 * 8 * 3).reshape(16, 3)  # gate and up, 8 rows each
    layout = Layout((16, 3), (_StridedShard(0, split_factor=2),), FakeMesh((4,)))
    for rank in range(4):
        expected = torch.cat([matrix.chunk(4)[rank] for matrix in full.chunk(2)])
        blocks = blocks_at(layout, (rank,), "gate_up")
        assert len(blocks) == 2
        assert torch.equal(shard_of(layout, full, (rank,)), expected)


@pytest.mark.parametrize("first", [_StridedShard(0, split_factor=2), Shard(0)], ids=["2.13", "2.11"])
def test_fsdp_shards_what_tp_left_of_a_fused_projection(first: Placement) -> None:
    """FSDP2 of torch 2.11 marks its shard of a fused projection like one without tp."""
    full = torch.arange(3 * 4 * 5).reshape(12, 5)
    layout = Layout((12, 5), (first, _StridedShard(0, split_factor=3)), FakeMesh((2, 2)))
    for data, tensor in itertools.product(range(2), repeat=2):
        of_tp = torch.cat([matrix.chunk(2)[tensor] for matrix in full.chunk(3)])
        assert torch.equal(shard_of(layout, full, (data, tensor)), of_tp.chunk(2)[data])


def test_shards_cover_the_full_tensor_exactly_once() -> None:
    layout = Layout((9, 6), (_StridedShard(0, split_factor=2), Shard(0), Shard(1)), FakeMesh((2, 2, 2)))
    counted = torch.zeros(9, 6)
    for coordinate in itertools.product(range(2), repeat=3):
        for block in blocks_at(layout, coordinate, "weight"):
            counted[block.full] += 1
    assert torch.equal(counted, torch.ones(9, 6))


@pytest.mark.parametrize(
    ("placements", "shape"),
    [((_StridedShard(0, split_factor=3), Shard(0)), (2, 2)), ((_StridedShard(0, split_factor=2),), (3,))],
)
def test_unsupported_layouts_are_rejected(placements: tuple[Placement, ...], shape: tuple[int, ...]) -> None:
    layout = Layout((16, 2), placements, FakeMesh(shape))
    with pytest.raises(NotImplementedError, match=r"weight: dim 0 of size 16"):
        blocks_at(layout, (0,) * len(shape), "weight")


def test_partial_placements_are_rejected() -> None:
    layout = Layout((4,), (Partial(),), FakeMesh((2,)))
    with pytest.raises(NotImplementedError, match="weight: holds a partial sum"):
        blocks_at(layout, (0,), "weight")


def test_scalar_is_replicated_on_every_rank() -> None:
    layout = Layout((), (Replicate(),), FakeMesh((2,)))
    (block,) = blocks_at(layout, (1,), "step")
    assert block.full == block.local == ()
    assert math.prod(_local_shape([block], 0)) == 1
