"""Unpacking of NF4 matrices on a GPU in one kernel, which reads 0.53 bytes per value and writes the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from components.models.quantization.nf4 import BLOCK, BLOCK_BYTES, SCALE_BYTES

TOGETHER = tl.constexpr(16)
"""Blocks that one program unpacks."""
SIZE, SIZE_BYTES, HEADER = (tl.constexpr(each) for each in (BLOCK, BLOCK_BYTES, SCALE_BYTES))


def launch_unpack(packed: torch.Tensor, columns: int, pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a packed matrix as (rows, columns) of `dtype`, equal to those of `nf4.unpack`.

    Args:
        packed: (rows, bytes) uint8.
        pairs: (256, 2) float32, from `nf4.level_pairs`.
    """
    packed = packed.contiguous()
    rows, row_bytes = packed.shape
    blocks = row_bytes // BLOCK_BYTES
    values = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    grid = (rows, triton.cdiv(blocks, TOGETHER.value))
    _unpack_blocks[grid](packed, pairs, values, row_bytes, blocks, columns)
    return values


@triton.jit
def _unpack_blocks(packed, pairs, values, row_bytes, blocks, columns):
    """Write the values of `TOGETHER` blocks of one row: both 4-bit codes of a byte, times the block's scale."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)  # (TOGETHER,)
    exists = block < blocks
    header = packed + row * row_bytes + block * SIZE_BYTES
    low = tl.load(header, mask=exists, other=0).to(tl.int16)
    high = tl.load(header + 1, mask=exists, other=0).to(tl.int16)
    scale = (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)  # (TOGETHER,)
    byte = tl.arange(0, SIZE // 2)[None, :]  # (1, SIZE / 2)
    code = tl.load(header[:, None] + HEADER + byte, mask=exists[:, None], other=0).to(tl.int32)
    first = tl.load(pairs + 2 * code) * scale[:, None]  # (TOGETHER, SIZE / 2)
    second = tl.load(pairs + 2 * code + 1) * scale[:, None]
    both = tl.reshape(tl.join(first, second), (TOGETHER, SIZE))
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    target = values + row * columns + column
    tl.store(target, both.to(values.dtype.element_ty), mask=column < columns)
