"""What torch's kernels take: dtypes by name, the dtype of autocast, inputs of variable-length attention; and a hash."""

from __future__ import annotations

import inspect

import torch
from torch._subclasses.fake_tensor import FakeTensor


def torch_dtypes() -> dict[str, torch.dtype]:
    """Return every torch dtype by its name without `torch.`, such as `bfloat16`; aliases are left out."""
    return {
        str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
    }


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype with this name. Raises KeyError if torch has none."""
    return torch_dtypes()[str(name)]


@torch.compiler.assume_constant_result
def _has_autocast(device: str) -> bool:
    """Return whether a type of device supports autocast. The compiler of torch 2.11 cannot trace the query."""
    return torch.amp.is_autocast_available(device)


def active_autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that autocast would use for a matmul of `tensor`, or None if autocast does not apply."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast_by_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast tensors as autocast does for torch's own matmuls and attention.

    Kernels are selected by dtype, and rotary embeddings, which are float32 under autocast, promote queries and keys.
    """
    return [tensor.to(active_autocast_dtype(tensor) or tensor.dtype) for tensor in tensors]


def row_ends(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Return the cumulative ends of rows of one document each, (rows + 1,) int32."""
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)


def supports_varlen(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Return whether torch's variable-length kernel supports these: CUDA, half precision, equal head widths."""
    if not (query.device.type in ("cuda", "meta") or _as_cuda(query)) or dropout:
        return False
    half, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    return half and value.shape[-1] == width and width <= 256 and width % 8 == 0 and _has_windows()


def _as_cuda(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a simulated GPU tensor (components.planning.simulated_step)."""
    return isinstance(tensor, FakeTensor) and getattr(tensor.fake_mode, "as_cuda", False)


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


INCREMENT = 0x9E3779B97F4A7C15 - 2**64
"""Increment of SplitMix64 (Steele et al. 2014) as int64: multiples of it are good inputs of `hashed`."""


def hashed(values: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's hash of int64 values: the same bits on every device. Products wrap around."""
    values = (values ^ shifted(values, 30)).mul_(0xBF58476D1CE4E5B9 - 2**64)
    values = values.bitwise_xor_(shifted(values, 27)).mul_(0x94D049BB133111EB - 2**64)
    return values.bitwise_xor_(shifted(values, 31))


def shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int64 values shifted to the right by a number of bits, with zeros from the left."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """Return the int64 with the lower 64 bits of a number."""
    return (value + 2**63) % 2**64 - 2**63
