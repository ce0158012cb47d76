"""What a checkpoint says of the weights that it does not hold: a fingerprint of those that adapters stand beside."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from components.config.errors import ConfigError
from components.models.lora import adapted_layers
from components.models.weights.names import saved_tensors
from components.models.weights.shards import Block, Index, is_first_holder, local_blocks, local_part
from components.models.weights.weight_files import row_blocks

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a value -> the integers that have the same bits."""


@torch.no_grad()
def frozen_fingerprint(model: nn.Module) -> str | None:
    """Return what identifies the weights of a model beside its adapters, or None where it has none; a collective.

    The same on every mesh: values are added up as integers, each times a number that its name and its place give, and
    integers add up to the same in any order. It finds that weights are others, not who wants to deceive.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not adapted_layers(model):
        return None
    total = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)
    for name, parameter in saved_tensors(model).items():  # in shards: after a forward they may be whole, and rounded
        if parameter.requires_grad or not isinstance(parameter, nn.Parameter):
            continue
        if is_first_holder(parameter) if isinstance(parameter, DTensor) else _rank() == 0:
            for block in local_blocks(parameter, name):
                total += fingerprint_of_block(name, local_part(parameter)[block.local], block)
    if dist.is_initialized():
        dist.all_reduce(total)
    return text_of(total)


def fingerprint_of(tensors: Mapping[str, torch.Tensor], read: Callable[[str, Index], torch.Tensor]) -> str:
    """Return the fingerprint of parameters that are read block by block; only the shapes of `tensors` count."""
    total = torch.zeros((), dtype=torch.int64)
    for name, tensor in tensors.items():
        for index in row_blocks(tensor):
            total += fingerprint_of_block(name, read(name, index), Block(index, index))
    return text_of(total)


def fingerprint_of_block(name: str, values: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the part of a fingerprint that a block of the parameter `name` makes, an int64 scalar."""
    bits = values.contiguous().view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for dim, place in enumerate(block.full):
        others = [other for other in range(bits.ndim) if other != dim]
        sums = bits.sum(others, dtype=torch.int64) if others else bits.to(torch.int64)
        places = torch.arange(place.start, place.stop, device=values.device)
        total += (sums * _mixed(places + _number(f"{name}/{dim}"))).sum()
    return total


def text_of(total: torch.Tensor) -> str:
    """Return the sum of all parts as it is stored."""
    return f"{int(total) % 2**64:016x}"


def check_frozen(path: object, stored: str | None, here: str | None) -> None:
    """Compare the fingerprint in a checkpoint with that of the weights that are here now. Raises ConfigError."""
    if stored != here:
        raise ConfigError(
            f"checkpoint {path}: its adapters were trained beside other weights ({stored}) than model.path, "
            f"model.config, model.dtype and run.seed give now ({here}); set them back, or begin anew (run.resume=never)"
        )


def _mixed(places: torch.Tensor) -> torch.Tensor:
    """Well-spread odd integers for consecutive ones (the finalizer of splitmix64, without its unsigned shifts)."""
    places = places * -7046029254386353131
    places = places ^ (places >> 27)
    return (places * -7723592293110705685) | 1


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
