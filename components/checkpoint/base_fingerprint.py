"""Fingerprint of the base weights of a LoRA run: a checkpoint stores it in place of those weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from components.config.errors import ConfigError
from components.exchange import this_rank
from components.models.lora import adapted_layers
from components.models.weights.names import saved_tensors
from components.models.weights.shards import Block, Index, is_first_holder, local_blocks, local_part
from components.models.weights.weight_files import row_blocks

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per element -> integer dtype of that size, to reinterpret the bits."""


@torch.no_grad()
def base_fingerprint(model: nn.Module) -> str | None:
    """Return the fingerprint of the base weights of a model with adapters, or None without adapters; a collective.

    It is a sum of the weights' bits, read as integers and multiplied by a hash of parameter name and position. Integer
    sums do not depend on the order, so the result is the same on every mesh. It detects a different base model, not
    deliberate tampering.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not adapted_layers(model):
        return None
    total = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)
    # saved_tensors returns the sharded parameters: after a forward, FSDP2's may be all-gathered and in low precision.
    for name, parameter in saved_tensors(model).items():
        if parameter.requires_grad or not isinstance(parameter, nn.Parameter):
            continue
        if is_first_holder(parameter) if isinstance(parameter, DTensor) else this_rank() == 0:
            for block in local_blocks(parameter, name):
                total += fingerprint_of_block(name, local_part(parameter)[block.local], block)
    if dist.is_initialized():
        dist.all_reduce(total)
    return to_hex(total)


def fingerprint_by_blocks(tensors: Mapping[str, torch.Tensor], read: Callable[[str, Index], torch.Tensor]) -> str:
    """Return the fingerprint of parameters that `read` loads block by block; only the shapes of `tensors` are used."""
    total = torch.zeros((), dtype=torch.int64)
    for name, tensor in tensors.items():
        for index in row_blocks(tensor):
            total += fingerprint_of_block(name, read(name, index), Block(index, index))
    return to_hex(total)


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


def to_hex(total: torch.Tensor) -> str:
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


def _mix(positions: torch.Tensor) -> torch.Tensor:
    """Hash consecutive integers to odd int64 values (the finalizer of splitmix64, without its unsigned shifts)."""
    positions = positions * -7046029254386353131
    positions = positions ^ (positions >> 27)
    return (positions * -7723592293110705685) | 1


def _hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
