"""FLOPs of an optimizer step and the devices' peak, for the MFU.

These are model FLOPs, not hardware FLOPs: the matmuls and the attention of the forward and backward, without
recomputation, padding, attention across documents and embedding lookups. A matrix parameter costs 6 FLOPs per token
(2 in the forward, 4 in the backward), a frozen one 4; of a mixture of experts, those of the experts a token is routed
to. Attention costs 6 x heads x (key head_dim + value head_dim) per pair of a query token and a token it attends to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.run import LoggingConfig
from components.distributed.mesh import Mesh
from components.models.anatomy import FULL, SLIDING, Anatomy, encoder_parameters, read_anatomy

PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
}
"""torch.cuda.get_device_name -> dense bfloat16 peak in TFLOP/s, from the vendor's data sheet."""


@dataclass(frozen=True, slots=True)
class _ModelFlops:
    """FLOPs of a forward and backward of the whole model, independent of the mesh."""

    per_token: float
    """Matmuls with parameters."""
    per_pair: tuple[tuple[int | None, int], ...] = ()
    """Attention, per kind of layer: (sliding window or None, FLOPs per pair of tokens summed over these layers)."""

    def of(self, lengths: Iterable[int]) -> float:
        """Return the FLOPs for documents of the given lengths in tokens."""
        lengths = list(lengths)
        attention = sum(flops * sum(pairs(length, window) for length in lengths) for window, flops in self.per_pair)
        return self.per_token * sum(lengths) + attention


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Model FLOPs and peak of a run, from which each step's time at peak is computed."""

    flops: _ModelFlops | None
    peak: float | None
    """FLOP/s of all devices together; None if unknown."""
    why: str
    """Source of the peak, or why the MFU is left out; empty on CPUs, where it is never reported."""
    counts: bool = True
    """Whether this rank's rows count in sums over all ranks; False if another rank reads the same rows."""

    def __str__(self) -> str:
        return f"MFU: {self.why}" if self.why else ""

    def seconds_at_peak(self, batches: Iterable[Batch]) -> float:
        """Return the seconds that all devices would need at peak for this rank's micro-batches; 0 if unknown.

        Args:
            batches: On the host: the lengths of documents are read without waiting for the device.
        """
        if self.flops is None or self.peak is None or not self.counts:
            return 0.0
        return sum(self.flops.of(document_lengths(batch)) for batch in batches) / self.peak


def step_flops(
    model: nn.Module,
    cfg: LoggingConfig,
    mesh: Mesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    anatomy: Anatomy | None = None,
) -> StepFlops:
    """Return the model FLOPs and the peak of a run. Call it on the whole model, before it is parallelized."""
    tflops, why = peak_tflops(cfg, device, compute_dtype)
    if tflops is None:
        return StepFlops(None, None, why)
    try:
        flops = model_flops(model, anatomy)
    except NotImplementedError as reason:
        return StepFlops(None, None, f"left out: {reason}")
    counts = mesh.counts_tokens and mesh.rank("cp") == 0
    return StepFlops(flops, tflops * 1e12 * mesh.shape.world, why, counts)


def peak_tflops(cfg: LoggingConfig, device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """Return the peak of one device in TFLOP/s, or None if unknown, and the explanation for the banner."""
    if cfg.peak_tflops is not None:
        return cfg.peak_tflops, f"relative to {cfg.peak_tflops:g} TFLOP/s per device (logging.peak_tflops)"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type}"
    kind = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return None, ""
    if name not in PEAK_TFLOPS or dtype not in (torch.bfloat16, torch.float16):
        return None, f"left out: the peak of {name} in {kind} is unknown; set logging.peak_tflops"
    return PEAK_TFLOPS[name], f"relative to {PEAK_TFLOPS[name]:g} TFLOP/s per device, the peak of {name} in {kind}"


def model_flops(model: nn.Module, anatomy: Anatomy | None = None) -> _ModelFlops:
    """Count the FLOPs of a transformers model from its modules and its anatomy (None: read it).

    Raises NotImplementedError if layers use neither full nor sliding-window attention, or differ in their heads.
    """
    anatomy = anatomy or read_anatomy(model)
    per_token, unused = 0.0, encoder_parameters(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        is_expert = name in anatomy.experts
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= (3 if is_expert else 2) and f"{name}.{leaf}" not in unused:
                share = _experts_per_token(anatomy) / parameter.shape[0] if is_expert else 1.0
                values = parameter.numel() if parameter.is_floating_point() else _packed_values(module)
                per_token += (6 if parameter.requires_grad else 4) * values * share
    return _ModelFlops(per_token, _per_pair(anatomy))


def pairs(length: int, window: int | None = None) -> int:
    """Return the number of (query, key) pairs of causal attention in a document, each token attending to itself too."""
    near = length if window is None else min(length, window)
    return near * (near + 1) // 2 + (length - near) * near


def document_lengths(batch: Batch) -> list[int]:
    """Return the lengths in tokens of a micro-batch's documents without padding; [] for a batch on a GPU.

    Reading a GPU tensor would make the host wait. Every sample ends with a target token, so whatever follows the last
    target of a row is padding.
    """
    targets, bounds = batch.targets, batch.document_bounds  # (micro_batch, seq)
    if targets.device.type != "cpu":
        return []
    target_ends = torch.arange(2, targets.shape[1] + 2)  # a target is the token after its position
    ends = torch.where(targets != IGNORED, target_ends, 0).amax(1)  # (micro_batch,)
    if bounds is None:
        return ends.tolist()
    bounds = torch.minimum(bounds, ends[:, None].to(bounds.dtype))
    return [length for length in bounds.diff(dim=1).flatten().tolist() if length > 0]


def _packed_values(module: Any) -> int:
    """Return the number of weights of a quantized linear layer, whose packed tensor has fewer elements."""
    return module.in_features * module.out_features


def _experts_per_token(anatomy: Anatomy) -> int:
    if anatomy.experts_per_token is None:
        raise NotImplementedError("the config does not set num_experts_per_tok, the number of experts per token")
    return anatomy.experts_per_token


def _per_pair(anatomy: Anatomy) -> tuple[tuple[int | None, int], ...]:
    if unknown := set(anatomy.kinds) - {FULL, SLIDING}:
        raise NotImplementedError(f"the FLOPs of layers of {', '.join(sorted(unknown))} are unknown")
    if anatomy.widths is None:
        raise NotImplementedError("the config does not give one number and size of heads for all layers")
    per_layer = 6 * anatomy.widths.heads * (anatomy.widths.keys + anatomy.widths.values)
    windows = Counter(anatomy.window if kind == SLIDING else None for kind in anatomy.kinds)
    return tuple((window, count * per_layer) for window, count in windows.items())
