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
        gate, up = _rows(gate), _rows(up)
        grid = (len(gate), triton.cdiv(gate.shape[1], COLUMNS.value))
        _swiglu[grid](gate, up, product, gate.shape[1], gate.stride(0), up.stride(0), _wide(gate))
    return product


def launch_swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up, (..., width), given that of the product."""
    grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if grad.numel():
        grad, gate, up = _rows(grad), _rows(gate), _rows(up)
        grid = (len(gate), triton.cdiv(gate.shape[1], COLUMNS.value))
        strides = (grad.stride(0), gate.stride(0), up.stride(0))
        _swiglu_backward[grid](grad, gate, up, grad_gate, grad_up, gate.shape[1], *strides, _wide(gate))
    return grad_gate, grad_up


def _rows(values: torch.Tensor) -> torch.Tensor:
    """Return (rows, width) whose rows are contiguous: half of a fused projection needs no copy."""
    values = values.flatten(0, -2)
    return values if values.stride(1) == 1 else values.contiguous()


def _wide(values: torch.Tensor) -> tl.dtype:
    return tl.float64 if values.dtype == torch.float64 else tl.float32


@triton.jit
def _swiglu(gate, up, product, width, gate_stride, up_stride, wide: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # (COLUMNS,)
    exists = column < width
    g = tl.load(gate + row * gate_stride + column, mask=exists, other=0).to(wide)
    u = tl.load(up + row * up_stride + column, mask=exists, other=0).to(wide)
    result = g / (1 + tl.exp(-g)) * u
    tl.store(product + row * width + column, result.to(product.dtype.element_ty), mask=exists)


@triton.jit
def _swiglu_backward(
    grad, gate, up, grad_gate, grad_up, width, grad_stride, gate_stride, up_stride, wide: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # (COLUMNS,)
    exists = column < width
    d = tl.load(grad + row * grad_stride + column, mask=exists, other=0).to(wide)
    g = tl.load(gate + row * gate_stride + column, mask=exists, other=0).to(wide)
    u = tl.load(up + row * up_stride + column, mask=exists, other=0).to(wide)
    sigmoid = 1 / (1 + tl.exp(-g))
    of_gate = d * u * sigmoid * (1 + g * (1 - sigmoid))
    of_up = d * g * sigmoid
    target = row * width + column
    tl.store(grad_gate + target, of_gate.to(grad_gate.dtype.element_ty), mask=exists)
    tl.store(grad_up + target, of_up.to(grad_up.dtype.element_ty), mask=exists)
