"""Output of a frozen layer plus the product of its low-rank factors, with few kernels and small temporaries."""

from __future__ import annotations

from typing import Any

import torch


def add_low_rank(
    base: torch.Tensor, hidden: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return base + scaling * hidden @ A.T @ B.T, in the dtype of `base`.

    The scaling multiplies the product with A, whose width is the rank, and the matmul with B adds to the base. A
    backward for the inputs alone, as in pipeline schedules that split it, also computes the gradients of A and B.

    Args:
        base: Output of the frozen layer, (..., out).
        hidden: Input of the adapter, (..., in).
        lora_A: (rank, in); lora_B: (out, rank). On CUDA their gradients are rounded once, from float32.
    """
    output: Any = _AddLowRank.apply(base, hidden.to(base.dtype), lora_A, lora_B, scaling)
    return output


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, base: torch.Tensor, hidden: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        first, second = lora_A.to(base.dtype), lora_B.to(base.dtype)
        rows = hidden.flatten(0, -2)  # (tokens, in)
        low = _scaled_matmul(rows, first.t(), scaling)  # (tokens, rank)
        ctx.save_for_backward(hidden, low, first, second)
        ctx.scaling, ctx.dtype = scaling, lora_A.dtype
        return torch.addmm(base.flatten(0, -2), low, second.t()).view_as(base)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, low, first, second = ctx.saved_tensors
        needs_base, needs_hidden, *_ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)  # (tokens, out)
        grad_low = _scaled_matmul(rows, second, ctx.scaling)  # (tokens, rank)
        grad_hidden = (grad_low @ first).view_as(hidden) if needs_hidden else None
        grad_first = _matmul_in(ctx.dtype, grad_low.t(), hidden.flatten(0, -2))
        grad_second = _matmul_in(ctx.dtype, rows.t(), low)
        return grad if needs_base else None, grad_hidden, grad_first, grad_second, None


def _scaled_matmul(left: torch.Tensor, right: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return scaling * left @ right by one kernel, which does not read the empty summand."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scaling)


def _matmul_in(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right in `dtype`; on CUDA float32 results of 16-bit operands are not rounded in between."""
    if left.is_cuda and dtype is torch.float32 and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
