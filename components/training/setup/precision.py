"""Compute dtype of a run, autocast, and deterministic kernels (run.deterministic)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from components.config.schema.model import DType, ModelConfig
from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.dtypes import torch_dtype

NOTE = (
    "deterministic: torch selects deterministic kernels; runs on the same mesh, devices and versions are bit-equal, "
    "and an operator without such a kernel ends the run"
)
"""Line of the banner."""
_TORCH_MESSAGE = "does not have a deterministic implementation"


def stored_dtype(model: ModelConfig, device: torch.device, *, adapts: bool) -> DType:
    """Return the dtype of a model's stored parameters on `device`. adapts: They are frozen under adapters."""
    return model.stored_dtype(frozen_on_gpu=adapts and device.type == "cuda" and _has_bfloat16(device))


def compute_dtype(model: ModelConfig, device: torch.device, *, adapts: bool = False) -> tuple[torch.dtype, str]:
    """Return the dtype of matmuls on `device`, and a description of the precision mode with the reason for it.

    auto is bfloat16 if the device has instructions for it, else float32, because emulated bfloat16 is slower and less
    accurate. A float64 model is computed in float64.

    Args:
        adapts: Whether only adapters are trained; for the description.
    """
    stored = torch_dtype(model.stored_dtype())
    compute, why = _choose(model, stored, device)
    return compute, f"{_mode(stored, compute, adapts)}{why}"


def _choose(model: ModelConfig, stored: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    if model.compute_dtype is not DType.auto:
        return torch_dtype(model.compute_dtype), ""
    if stored == torch.float64:
        return stored, ", as stored"
    if _has_bfloat16(device):
        return torch.bfloat16, f" ({device.type} has instructions for it)"
    return torch.float32, f" (this {device.type} has no bfloat16 instructions)"


def _mode(stored: torch.dtype, compute: torch.dtype, adapts: bool) -> str:
    """Describe the precision mode; pure and mixed bfloat16 differ in memory and in convergence."""
    name, of = str(compute).removeprefix("torch."), str(stored).removeprefix("torch.")
    if adapts and stored == torch.bfloat16:
        return f"computed in {name}; frozen weights in {of}, adapters, their gradients and optimizer state in float32"
    if compute != stored:
        return f"mixed: computed in {name}; weights, gradients and optimizer state in {of}"
    if stored == torch.bfloat16:
        return "pure bfloat16: weights, gradients, optimizer state and matmuls; updates below 1/256 of a weight vanish"
    return f"computed in {name}"


def autocast_dtype(parallelism: ParallelismConfig, model: ModelConfig, compute: torch.dtype) -> torch.dtype | None:
    """Return the autocast dtype of a forward, or None if it needs no autocast.

    FSDP2 casts the parameters that it gathers; single and ddp compute with stored parameters and need autocast.
    """
    if parallelism.strategy == Strategy.fsdp2 or compute == torch_dtype(model.stored_dtype()):
        return None
    return compute


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch has no public function for this.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Context in which torch and cuDNN run deterministic kernels, or raise if an operator has none.

    torch would also fill memory that is not initialized, which costs a pass over each new tensor and would only
    matter to code that reads such memory.

    Raises RuntimeError, with the key to change, where torch's message names only its own function.
    """
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    flags = (cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory)
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
        yield
    except RuntimeError as error:
        if _TORCH_MESSAGE not in str(error):
            raise
        operator = str(error).partition(f" {_TORCH_MESSAGE}")[0]
        raise RuntimeError(
            f"run.deterministic=true: {operator} has no deterministic kernel; set run.deterministic=false, or avoid "
            "the operator"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = flags
