"""torch dtypes by name, as used in the config and in messages between ranks."""

from __future__ import annotations

import torch


def torch_dtypes() -> dict[str, torch.dtype]:
    """Return every torch dtype by its name without `torch.`, such as `bfloat16`; aliases are left out."""
    return {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


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
    return [each.to(active_autocast_dtype(each) or each.dtype) for each in tensors]
