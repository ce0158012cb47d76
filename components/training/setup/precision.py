"""In which type the matrix products of a run are computed."""

from __future__ import annotations

import torch

from components.config.schema.model import DType, ModelConfig
from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.dtypes import torch_dtype


def compute_dtype(model: ModelConfig, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the type of matrix products on `device`, and a sentence that names the mode and says why.

    auto is bfloat16 where the device has instructions for it, else float32: emulated bfloat16 is slower and less
    exact. A float64 model is computed in float64.
    """
    stored = torch_dtype(model.dtype)
    compute, why = _choose(model, stored, device)
    return compute, f"{_mode(stored, compute)}{why}"


def _choose(model: ModelConfig, stored: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    if model.compute_dtype is not DType.auto:
        return torch_dtype(model.compute_dtype), ""
    if stored == torch.float64:
        return stored, ", as stored"
    if _has_bfloat16(device):
        return torch.bfloat16, f" ({device.type} has instructions for it)"
    return torch.float32, f" (this {device.type} has no bfloat16 instructions)"


def _mode(stored: torch.dtype, compute: torch.dtype) -> str:
    """What is told of a run beside its speed: pure and mixed bfloat16 differ in memory, and in what they learn."""
    name, of = str(compute).removeprefix("torch."), str(stored).removeprefix("torch.")
    if compute != stored:
        return f"mixed: computed in {name}; weights, gradients and optimizer state in {of}"
    if stored == torch.bfloat16:
        return "pure bfloat16: weights, gradients, optimizer state and products; updates below 1/256 of a weight vanish"
    return f"computed in {name}"


def autocast_dtype(parallelism: ParallelismConfig, model: ModelConfig, compute: torch.dtype) -> torch.dtype | None:
    """Return the type that a forward is autocast to, or None where it is computed as stored.

    FSDP2 casts the parameters it gathers; single and ddp compute on stored parameters and need autocast.
    """
    if parallelism.strategy == Strategy.fsdp2 or compute == torch_dtype(model.dtype):
        return None
    return compute


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch offers no public question for this.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
