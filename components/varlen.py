"""torch's variable-length attention kernel: which inputs it supports, and the lengths that it takes."""

from __future__ import annotations

import inspect

import torch
from torch._subclasses.fake_tensor import FakeTensor


def row_ends(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Return the cumulative ends of rows of one document each, (rows + 1,) int32."""
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)


def supports_varlen(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Return whether torch's variable-length kernel supports these: CUDA, half precision, equal head widths."""
    if not (query.device.type in ("cuda", "meta") or _plays_gpu(query)) or dropout:
        return False
    half, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    return half and value.shape[-1] == width and width <= 256 and width % 8 == 0 and _has_windows()


def _plays_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a GPU tensor of a dry run, which plays it on the CPU (components.planning.dry_run)."""
    return isinstance(tensor, FakeTensor) and getattr(tensor.fake_mode, "plays_gpu", False)


@torch.compiler.assume_constant_result
def _has_windows() -> bool:
    """Return whether this torch's kernel supports causal windows, judged by its parameter names."""
    return {"window_size", "scale"} <= _varlen_parameters()


@torch.compiler.assume_constant_result
def has_grouped_queries() -> bool:
    """Return whether the kernel supports fewer key heads than query heads; torch 2.11 does not."""
    return "enable_gqa" in _varlen_parameters()


def _varlen_parameters() -> frozenset[str]:
    """Return the parameter names of torch's variable-length attention; empty if this torch lacks it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
