"""Choice of the attention kernel on a GPU: the installed kernels are timed on a call of the run itself."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from components.config.schema.model import CAUSAL_SDPA
from components.models.attention import causal_sdpa

BACKENDS = {"flash_attention": SDPBackend.FLASH_ATTENTION, "cudnn_attention": SDPBackend.CUDNN_ATTENTION}
"""Fused kernels of scaled_dot_product_attention that need no mask, by the name that the banner reports."""
FA3 = "FlashAttention 3"
"""torch dispatches its flash and varlen operators to this package instead of its own kernels."""
FA3_MODULE = "flash_attn_interface"
FASTER = 1.05
"""Minimum speedup over torch's own choice: less is within the noise of a few calls."""
REPEATS = 5


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A mask-free call of attention, observed in a forward."""

    attend: Callable[..., Any]
    """(query, key, value) -> output, or a tuple that begins with it."""
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    lengths: list[tuple[int, int]]
    """Queries and keys of each sequence and head, of which the last of each are the same token."""
    is_varlen: bool

    @property
    def flops(self) -> float:
        """FLOPs of the causal part in forward and backward, two and five matmuls; of windows, an upper bound."""
        width = self.tensors[0].shape[-1]
        return 7 * 2 * width * sum(queries * (keys - (queries - 1) / 2) for queries, keys in self.lengths)


def observed_call(function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> AttentionCall:
    """Return the call that `AttentionProbe.first` describes. Waits for the device, if lengths are on it (varlen)."""
    query, key, value, *rest = arguments
    lengths = [(query.shape[-2], key.shape[-2])] * query.shape[:-2].numel()
    if is_varlen := function is not scaled_dot_product_attention:
        ends = (each.diff().tolist() for each in rest[:2])
        lengths = list(zip(*ends, strict=True)) * query.shape[1]

    def attend(*tensors: torch.Tensor) -> Any:
        return function(*tensors, *rest, **options)

    return AttentionCall(attend, (query, key, value), lengths, is_varlen)


def measure_kernels(call: AttentionCall, default: str) -> dict[str, float | str]:
    """Return TFLOP/s of the kernels that compute a call, or why one cannot, by name; `default` is torch's choice."""
    rates: dict[str, float | str] = {default: _rate(call)}
    for name, backend in BACKENDS.items():
        if not call.is_varlen and name != default:
            with sdpa_kernel(backend):
                rates[name] = _rate(call)
    if find_spec(FA3_MODULE) is None:
        rates[FA3] = f"{FA3_MODULE} is not installed"
    elif torch.cuda.get_device_capability() != (9, 0):
        rates[FA3] = "it needs a Hopper GPU"
    else:
        torch.nn.attention.activate_flash_attention_impl("FA3")
        try:
            with nullcontext() if call.is_varlen else sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                rates[FA3] = _rate(call)
        finally:
            torch.nn.attention.restore_flash_attention_impl()
    return rates


def choose_kernel(rates: dict[str, float | str], default: str) -> tuple[str, str]:
    """Return the kernel to use, and a line for the banner with the reason."""
    measured = {name: rate for name, rate in rates.items() if isinstance(rate, float)}
    fastest = max(measured, key=measured.__getitem__, default=default)
    if measured.get(fastest, 0.0) < FASTER * measured.get(default, 0.0):
        fastest = default
    found = [
        f"{name} {rate:,.0f} TFLOP/s" if isinstance(rate, float) else f"{name}: {rate}" for name, rate in rates.items()
    ]
    action = "torch's default kept" if fastest == default else "chosen by measurement"
    return fastest, f"attention kernel: {fastest}, {action} ({'; '.join(found)})"


def is_usable(name: str) -> bool:
    """Return whether `use_kernel` accepts a kernel here; one that a checkpoint names may need a missing package."""
    return name in BACKENDS or (name == FA3 and find_spec(FA3_MODULE) is not None)


def use_kernel(name: str) -> None:
    """Compute mask-free attention by a kernel of `measure_kernels` from now on, wherever it supports the inputs."""
    if name == FA3:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    backend = BACKENDS["flash_attention" if name == FA3 else name]
    AttentionInterface.register(CAUSAL_SDPA, partial(causal_sdpa, prefer=backend))


def _rate(call: AttentionCall) -> float | str:
    """Return TFLOP/s of forward and backward on a GPU, or the first line of torch's error."""
    leaves = [each.detach().clone().requires_grad_() for each in call.tensors]

    def both() -> None:
        output = call.attend(*leaves)
        output = output if isinstance(output, torch.Tensor) else output[0]
        torch.autograd.grad(output, leaves, torch.ones_like(output))

    try:
        with torch.enable_grad(), warnings.catch_warnings(action="ignore"):  # torch warns why a kernel is not used
            for _ in range(2):
                both()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(REPEATS):
                both()
            torch.cuda.synchronize()
    except RuntimeError as error:  # torch has no such kernel for these inputs
        return str(error).partition("\n")[0]
    return call.flops * REPEATS / (time.perf_counter() - began) / 1e12
