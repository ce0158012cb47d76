"""In which type the matrix products of a run are computed."""

from __future__ import annotations

import torch

from components.config.schema.model import DType, ModelConfig


def compute_dtype(model: ModelConfig, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the type of matrix products on `device`, and a sentence that says why.

    auto is bfloat16 where the device has instructions for it, else float32: emulated bfloat16 is slower and less
    exact. A float64 model is computed in float64.
    """
    stored = getattr(torch, str(model.dtype))
    if model.compute_dtype is not DType.auto:
        return getattr(torch, str(model.compute_dtype)), f"computed in {model.compute_dtype}"
    if stored == torch.float64:
        return stored, "computed in float64, as stored"
    if _has_bfloat16(device):
        return torch.bfloat16, f"computed in bfloat16 ({device.type} has instructions for it)"
    return torch.float32, f"computed in float32 (this {device.type} has no bfloat16 instructions)"


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch offers no public question for this.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
