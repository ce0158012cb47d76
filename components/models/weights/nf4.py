"""Frozen matrices in 4-bit NormalFloat (NF4, QLoRA: Dettmers et al. 2023, arXiv:2305.14314), and products with them.

A row is cut into blocks of 64 values. A block is 34 bytes: its largest magnitude in float16, then 64 codes of 4 bits,
each for the level nearest to value / magnitude. So a matrix is one tensor of bytes, 4.25 bits a value, that is cut by
rows or by blocks of columns like any other matrix: FSDP2 shards and gathers the bytes themselves, tensor parallelism
divides them, and no scale is ever on another rank than its codes. The paper quantises the scales a second time, over
groups that span rows; that would save 0.1 bits of a value, and keep such groups together on every mesh.

torchao's NF4Tensor (0.18) is not used: it takes multiples of 16,384 values alone, and cannot be cut by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from components.models.weights.shards import Index, fill

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Of the paper's appendix E: quantiles of the normal distribution, scaled to [-1, 1], zero among them."""
BLOCK = 64
"""Neighbours in a row that share a scale."""
SCALE_BYTES = 2
BLOCK_BYTES = SCALE_BYTES + BLOCK // 2
PACKED_AT_ONCE = 2**20
"""About how many values are packed at a time: what that needs besides is many times as large as its result."""


def packed_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape in bytes of a packed matrix; the last block of a row may be filled up with zeros."""
    return rows, -(-columns // BLOCK) * BLOCK_BYTES


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a parameter is a packed matrix: no other has bytes."""
    return tensor.dtype == torch.uint8


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """Quantise (rows, columns) to the nearest levels; returns uint8 of `packed_shape`, on the same device."""
    rows, columns = matrix.shape
    packed = torch.empty(packed_shape(rows, columns), dtype=torch.uint8, device=matrix.device)
    some = max(1, PACKED_AT_ONCE // max(1, columns))
    for start in range(0, rows, some):
        packed[start : start + some] = _pack(matrix[start : start + some].float())
    return packed


def unpack(packed: torch.Tensor, columns: int, pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix that was packed, (rows, columns) of `dtype`: products in float32, rounded once.

    pairs: From `level_pairs`, on the device of `packed`.
    """
    # FSDP2 of torch 2.11 gathers them in the type of the products, all of which hold 0 to 255 exactly.
    blocks = packed.to(torch.uint8).view(len(packed), -1, BLOCK_BYTES)
    scales = blocks[..., :SCALE_BYTES].contiguous().view(torch.float16)  # (rows, blocks, 1)
    values = F.embedding(blocks[..., SCALE_BYTES:].int(), pairs)  # (rows, blocks, 32, 2)
    return values.flatten(2).mul_(scales.float()).flatten(1)[:, :columns].to(dtype)


def level_pairs(device: torch.device | str | None = None) -> torch.Tensor:
    """Return what each byte of codes stands for, the first value in its high bits: (256, 2) float32."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.cartesian_prod(levels, levels)


def product(hidden: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, pairs: torch.Tensor) -> torch.Tensor:
    """Return hidden @ W.T + bias, for W packed; only bytes are kept for the backward, where W is unpacked again.

    Args:
        hidden: (..., columns); bias: (rows,) or None. Neither W nor the bias gets a gradient.
    """
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    output: Any = _Product.apply(hidden, packed, pairs)
    return output if bias is None else output + bias.to(output.dtype)


def fill_or_pack(tensor: torch.Tensor, name: str, read: Callable[[Index], torch.Tensor], shape: Sequence[int]) -> None:
    """Set this rank's part of `tensor` to what `read` returns of the whole one, packed where the tensor is.

    shape: Of what `read` reads. Unpacked, no more is held than this rank's part of one matrix.
    """
    fill(tensor, name, packing(read, shape[1]) if is_packed(tensor) else read)


def packing(read: Callable[[Index], torch.Tensor], columns: int) -> Callable[[Index], torch.Tensor]:
    """Return what reads blocks of a matrix packed, their bytes being the index, given what reads it as it is."""
    return lambda index: pack(read((index[0], _columns(index[1], columns))))


def unpacking(read: Callable[[Index], torch.Tensor], columns: int) -> Callable[[Index], torch.Tensor]:
    """Return what reads blocks of whole rows as they are, given what reads them packed: the other way round."""
    bytes_of_row = slice(0, packed_shape(1, columns)[1])
    return lambda index: unpack(read((index[0], bytes_of_row)), columns, level_pairs(), torch.float32)[:, index[1]]


def _columns(place: slice, columns: int) -> slice:
    """The columns of these bytes of a row; parts of rows are whole blocks."""
    return slice(place.start // BLOCK_BYTES * BLOCK, min(place.stop // BLOCK_BYTES * BLOCK, columns))


def _pack(matrix: torch.Tensor) -> torch.Tensor:
    rows, columns = matrix.shape
    blocks = F.pad(matrix, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True).half()  # (rows, blocks, 1)
    levels = torch.tensor(LEVELS, device=matrix.device)
    # A block of zeros has no scale: 0 / 1 is the level of zero too.
    codes = torch.bucketize(blocks / torch.where(scales > 0, scales, 1).float(), (levels[1:] + levels[:-1]) / 2)
    codes = codes.to(torch.uint8)
    return torch.cat([scales.view(torch.uint8), codes[..., 0::2] << 4 | codes[..., 1::2]], dim=2).flatten(1)


class _Product(torch.autograd.Function):
    """hidden @ W.T for W packed."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, packed: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(packed, pairs)
        ctx.columns = hidden.shape[-1]
        return F.linear(hidden, unpack(packed, ctx.columns, pairs, hidden.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        packed, pairs = ctx.saved_tensors
        return grad @ unpack(packed, ctx.columns, pairs, grad.dtype), None, None
