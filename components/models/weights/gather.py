"""Full tensors of a sharded model, gathered one at a time on rank 0; ranks may hold different names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from components.exchange import all_gather_json, this_rank
from components.models.weights.shards import Block, is_first_holder, local_blocks, local_part, local_shape
from components.models.weights.weight_sources import saved_tensors
from components.torch_kernels import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WRITER = 0
"""Rank that gathers and writes."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
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
    def from_json(cls, values: list[Any]) -> ShardInfo:
        """Return the description from the values of `as_json`."""
        shape, dtype, device, stored = values
        blocks = [Block(*(tuple(slice(*each) for each in index) for index in block)) for block in stored]
        return cls(tuple(shape), torch_dtype(dtype), device, blocks)


Source = tuple[int, ShardInfo]
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


def _all_gather_shards(local: dict[str, torch.Tensor]) -> list[dict[str, ShardInfo]]:
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
    return [{name: ShardInfo.from_json(values) for name, values in each.items()} for each in by_rank]


def _describe(tensor: torch.Tensor, name: str) -> ShardInfo:
    device = "cuda" if _requires_cuda() else "cpu"
    return ShardInfo(tuple(tensor.shape), tensor.dtype, device, local_blocks(tensor, name))


def _sources(by_rank: list[dict[str, ShardInfo]]) -> dict[str, list[Source]]:
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


def _send(values: torch.Tensor, shard: ShardInfo) -> None:
    _transfer(dist.isend, values.to(shard.device).contiguous(), WRITER)


def _receive(shard: ShardInfo, rank: int) -> torch.Tensor:
    shape = local_shape(shard.blocks, len(shard.shape))
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
