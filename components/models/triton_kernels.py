"""Triton kernels: SwiGLU forward and backward, and unpacking of NF4 matrices. Imported on a GPU only.

Unpacking reads 0.53 bytes per value and writes the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = tl.constexpr(1024)
"""Values of a row that one program computes."""
_TOGETHER = tl.constexpr(16)
"""NF4 blocks that one program unpacks."""


def launch_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, (..., width), computed in float32 (float64 stays) and rounded once."""
    product = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if product.numel():
        gate, up = _rows(gate, up)
        _swiglu[_grid(gate)](gate, up, product, gate.shape[1], gate.stride(0))
    return product


def launch_swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up, (..., width), given that of the product."""
    grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if grad.numel():
        gate, up = _rows(gate, up)
        _swiglu_backward[_grid(gate)](grad.contiguous(), gate, up, grad_gate, grad_up, gate.shape[1], gate.stride(0))
    return grad_gate, grad_up


def _rows(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as (rows, width) with equal strides, each row contiguous. Halves of a projection are not copied."""
    gate, up = gate.flatten(0, -2), up.flatten(0, -2)
    if gate.stride() == up.stride() and gate.stride(1) == 1:
        return gate, up
    return gate.contiguous(), up.contiguous()


def _grid(rows: torch.Tensor) -> tuple[int, int]:
    return len(rows), triton.cdiv(rows.shape[1], _COLUMNS.value)


@triton.jit
def _swiglu(gate, up, product, width, stride):
    wide: tl.constexpr = tl.float64 if product.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)  # (_COLUMNS,)
    exists = column < width
    g = tl.load(gate + row * stride + column, mask=exists, other=0).to(wide)
    u = tl.load(up + row * stride + column, mask=exists, other=0).to(wide)
    result = g / (1 + tl.exp(-g)) * u
    tl.store(product + row * width + column, result.to(product.dtype.element_ty), mask=exists)


@triton.jit
def _swiglu_backward(grad, gate, up, grad_gate, grad_up, width, stride):
    wide: tl.constexpr = tl.float64 if grad_up.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)  # (_COLUMNS,)
    exists = column < width
    target = row * width + column
    d = tl.load(grad + target, mask=exists, other=0).to(wide)
    g = tl.load(gate + row * stride + column, mask=exists, other=0).to(wide)
    u = tl.load(up + row * stride + column, mask=exists, other=0).to(wide)
    sigmoid = 1 / (1 + tl.exp(-g))
    of_gate = d * u * sigmoid * (1 + g * (1 - sigmoid))
    tl.store(grad_gate + target, of_gate.to(grad_gate.dtype.element_ty), mask=exists)
    tl.store(grad_up + target, (d * g * sigmoid).to(grad_up.dtype.element_ty), mask=exists)


def launch_unpack(
    packed: torch.Tensor, columns: int, pairs: torch.Tensor, dtype: torch.dtype, block: int, block_bytes: int
) -> torch.Tensor:
    """Return the values of a packed matrix as (rows, columns) of `dtype`, equal to those of `nf4.unpack`.

    Args:
        packed: (rows, bytes) uint8.
        pairs: (256, 2) float32, from `nf4.level_pairs`.
        block: Values of a block; block_bytes: bytes of its scale and its 4-bit codes.
    """
    packed = packed.contiguous()
    rows, blocks = packed.shape[0], packed.shape[1] // block_bytes
    values = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    grid = (rows, triton.cdiv(blocks, _TOGETHER.value))
    _unpack_blocks[grid](packed, pairs, values, blocks, columns, block, block_bytes)
    return values


@triton.jit
def _unpack_blocks(packed, pairs, values, blocks, columns, SIZE: tl.constexpr, SIZE_BYTES: tl.constexpr):
    """Write the values of `_TOGETHER` blocks of one row: both 4-bit codes of a byte, times the block's scale."""
    scale_bytes: tl.constexpr = SIZE_BYTES - SIZE // 2
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * _TOGETHER + tl.arange(0, _TOGETHER)  # (_TOGETHER,)
    exists = block < blocks
    header = packed + (row * blocks + block) * SIZE_BYTES
    low = tl.load(header, mask=exists, other=0).to(tl.int16)
    high = tl.load(header + 1, mask=exists, other=0).to(tl.int16)
    scale = (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)  # (_TOGETHER,)
    byte = tl.arange(0, SIZE // 2)[None, :]  # (1, SIZE / 2)
    code = tl.load(header[:, None] + scale_bytes + byte, mask=exists[:, None], other=0).to(tl.int32)
    first = tl.load(pairs + 2 * code) * scale[:, None]  # (_TOGETHER, SIZE / 2)
    second = tl.load(pairs + 2 * code + 1) * scale[:, None]
    both = tl.reshape(tl.join(first, second), (_TOGETHER, SIZE))
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    target = values + row * columns + column
    tl.store(target, both.to(values.dtype.element_ty), mask=column < columns)
