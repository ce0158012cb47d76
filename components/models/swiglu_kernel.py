"""SwiGLU on a GPU, silu(gate) * up, with one kernel forward and one backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = tl.constexpr(1024)
"""Values of a row that one program computes."""


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
    return len(rows), triton.cdiv(rows.shape[1], COLUMNS.value)


@triton.jit
def _swiglu(gate, up, product, width, stride):
    wide: tl.constexpr = tl.float64 if product.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # (COLUMNS,)
    exists = column < width
    g = tl.load(gate + row * stride + column, mask=exists, other=0).to(wide)
    u = tl.load(up + row * stride + column, mask=exists, other=0).to(wide)
    result = g / (1 + tl.exp(-g)) * u
    tl.store(product + row * width + column, result.to(product.dtype.element_ty), mask=exists)


@triton.jit
def _swiglu_backward(grad, gate, up, grad_gate, grad_up, width, stride):
    wide: tl.constexpr = tl.float64 if grad_up.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # (COLUMNS,)
    exists = column < width
    target = row * width + column
    d = tl.load(grad + target, mask=exists, other=0).to(wide)
    g = tl.load(gate + row * stride + column, mask=exists, other=0).to(wide)
    u = tl.load(up + row * stride + column, mask=exists, other=0).to(wide)
    sigmoid = 1 / (1 + tl.exp(-g))
    of_gate = d * u * sigmoid * (1 + g * (1 - sigmoid))
    tl.store(grad_gate + target, of_gate.to(grad_gate.dtype.element_ty), mask=exists)
    tl.store(grad_up + target, (d * g * sigmoid).to(grad_up.dtype.element_ty), mask=exists)
