"""A model's tensors, whole and one at a time, on the rank that writes them; ranks may hold different names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from components.dtypes import torch_dtype
from components.exchange import all_gather_json, broadcast_json
from components.models.weights.names import saved_tensors
from components.models.weights.shards import Block, is_first_holder, local_blocks, local_part, part_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WRITER = 0
"""The rank that writes."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank holds of a tensor, and in which form it would send it."""

    shape: tuple[int, ...]
    """Of the full tensor."""
    dtype: torch.dtype
    device: str
    """Type of device that the part is sent from: the backend decides."""
    blocks: list[Block]

    def as_json(self) -> list[Any]:
        """Return what `from_json` makes an equal offer of."""
        blocks = [[[(each.start, each.stop) for each in part] for part in (b.local, b.full)] for b in self.blocks]
        return [self.shape, str(self.dtype).removeprefix("torch."), self.device, blocks]

    @classmethod
    def from_json(cls, values: list[Any]) -> Offer:
        """Return the offer that another rank made."""
        shape, dtype, device, parts = values
        blocks = [Block(*(tuple(slice(*each) for each in part) for part in block)) for block in parts]
        return cls(tuple(shape), torch_dtype(dtype), device, blocks)


Giver = tuple[int, Offer]
"""A rank, and what it gives."""


@torch.no_grad()
def gathered_tensors(
    model: PreTrainedModel, order: Sequence[str], *, trained: bool = False
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every saved tensor of every rank: whole and on the CPU for the writer, None for the other ranks.

    A collective: all ranks must exhaust it. First the ranks tell one another what they hold, then the parts travel
    name by name, each from its first holder, so that the writer holds one tensor at a time.

    Args:
        order: Names in the order to yield them; names that are not among them come last.
        trained: Leave out what is not trained.

    Raises:
        NotImplementedError: On every rank, where a layout is not understood, or parts do not make a whole.
    """
    held = {name: each for name, each in saved_tensors(model).items() if each.requires_grad or not trained}
    givers = _givers(_exchange(held))
    place = {name: index for index, name in enumerate(order)}
    for name in sorted(givers, key=lambda name: place.get(name, len(place))):
        yield name, _gather(held.get(name), givers[name])


def writer_rank() -> int:
    """Return this process' rank, to compare with WRITER."""
    return dist.get_rank() if dist.is_initialized() else WRITER


def told_by_writer(problem: str | None) -> str | None:
    """Return the writer's problem on every rank; a collective."""
    return broadcast_json(problem, src=WRITER)


def _exchange(held: dict[str, torch.Tensor]) -> list[dict[str, Offer]]:
    """Return what each rank offers, by rank."""
    offers, problem = {}, None
    try:
        offers = {name: _offer(tensor, name) for name, tensor in held.items() if is_first_holder(tensor)}
    except NotImplementedError as error:
        problem = str(error)
    everyone = all_gather_json(problem or {name: offer.as_json() for name, offer in offers.items()})
    problems = [told for told in everyone if isinstance(told, str)]
    if problems:
        raise NotImplementedError("; ".join(dict.fromkeys(problems)))
    return [{name: Offer.from_json(each) for name, each in told.items()} for told in everyone]


def _offer(tensor: torch.Tensor, name: str) -> Offer:
    device = "cuda" if _moves_only_cuda() else tensor.device.type
    return Offer(tuple(tensor.shape), tensor.dtype, device, local_blocks(tensor, name))


def _givers(everyone: list[dict[str, Offer]]) -> dict[str, list[Giver]]:
    """Return who gives which part of each tensor; of parts that several ranks hold, the first of them gives."""
    chosen: dict[str, dict[tuple, Giver]] = {}
    for rank, offers in enumerate(everyone):
        for name, offer in offers.items():
            part = tuple((each.start, each.stop) for block in offer.blocks for each in block.full)
            parts = chosen.setdefault(name, {})
            if offer.blocks:
                parts.setdefault(part, (rank, offer))
    for name, parts in chosen.items():
        shape = next(offers[name].shape for offers in everyone if name in offers)
        given = sum(_size(block) for _, offer in parts.values() for block in offer.blocks)
        if given != math.prod(shape):
            raise NotImplementedError(f"{name}: the ranks hold {given} of the {math.prod(shape)} values of {shape}")
    return {name: list(parts.values()) for name, parts in chosen.items()}


def _size(block: Block) -> int:
    return math.prod(each.stop - each.start for each in block.full)


def _gather(mine: torch.Tensor | None, givers: list[Giver]) -> torch.Tensor | None:
    rank = writer_rank()
    if rank != WRITER:
        for giver, offer in givers:
            if giver == rank and mine is not None:
                _send(local_part(mine), offer)
        return None
    offered = givers[0][1]
    full = torch.empty(offered.shape, dtype=offered.dtype)
    for giver, offer in givers:
        part = local_part(mine) if giver == WRITER and mine is not None else _receive(offer, giver)
        for block in offer.blocks:
            full[block.full].copy_(part[block.local])
    return full


def _send(part: torch.Tensor, offer: Offer) -> None:
    dist.send(part.to(offer.device).contiguous().view(-1).view(torch.uint8), dst=WRITER)


def _receive(offer: Offer, rank: int) -> torch.Tensor:
    shape = part_shape(offer.blocks, len(offer.shape))
    part = torch.empty(shape, dtype=offer.dtype, device=offer.device)
    dist.recv(part.view(-1).view(torch.uint8), src=rank)
    return part


def _moves_only_cuda() -> bool:
    """NCCL only moves what is on a GPU, also where FSDP keeps the parameters in host memory."""
    return dist.is_initialized() and dist.get_backend() == "nccl"
