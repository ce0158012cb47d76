"""How much arithmetic an optimizer step needs, and the share of the devices' peak that it reaches (MFU).

Counted is what the model needs, not what a run does: products with matrices and attention between tokens that see one
another, forward and backward; nothing that is recomputed, no padding, no attention across documents, no lookup in an
embedding. A parameter of a matrix costs 6 FLOPs a token (2 in the forward, 4 in the backward), a frozen one 4; of a
mixture's experts those that a token chooses. Attention costs 6 x heads x (head_dim of keys + of values) for each pair
of tokens that see one another.
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
from components.config.schema.logging import LoggingConfig
from components.distributed.mesh import Mesh
from components.models.anatomy import FULL, SLIDING, Anatomy, read_anatomy

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
"""Device name, as torch tells it, -> its peak in bfloat16 without sparsity, by the maker's data sheet."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of a forward and backward of one model, whole, whatever the mesh."""

    per_token: float
    """Products with matrices."""
    per_pair: tuple[tuple[int | None, int], ...] = ()
    """Of the layers of one kind together: (sliding window or None, FLOPs for a pair of tokens)."""

    def of(self, lengths: Iterable[int]) -> float:
        """Return the FLOPs for documents of these lengths in tokens."""
        lengths = list(lengths)
        attention = sum(flops * sum(pairs(length, window) for length in lengths) for window, flops in self.per_pair)
        return self.per_token * sum(lengths) + attention


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step needs, measured in seconds that all devices would take at their peak."""

    flops: ModelFlops | None
    peak: float | None
    """FLOPs per second of all devices together; None: not known."""
    why: str
    """Where the peak comes from, or why there is none; "": a CPU, of which nobody expects an MFU."""
    counts: bool = True
    """Whether this rank's rows count in a sum over all ranks: others read the same."""

    def __str__(self) -> str:
        return f"MFU: {self.why}" if self.why else ""

    def seconds_at_peak(self, batches: Iterable[Batch]) -> float:
        """Return this rank's part for its micro-batches, as they come from the host; 0 where it is not known."""
        if self.flops is None or self.peak is None or not self.counts:
            return 0.0
        return sum(self.flops.of(document_lengths(batch)) for batch in batches) / self.peak


def step_work(
    model: nn.Module,
    cfg: LoggingConfig,
    mesh: Mesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    anatomy: Anatomy | None = None,
) -> StepWork:
    """Return what is known of a run's arithmetic. Call it on the whole model, before it is laid over the mesh."""
    tflops, why = peak_tflops(cfg, device, compute_dtype)
    if tflops is None:
        return StepWork(None, None, why)
    try:
        flops = model_flops(model, anatomy)
    except NotImplementedError as reason:
        return StepWork(None, None, f"left out: {reason}")
    counts = mesh.counts_tokens and mesh.rank("cp") == 0
    return StepWork(flops, tflops * 1e12 * mesh.shape.world, why, counts)


def peak_tflops(cfg: LoggingConfig, device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """Return the peak of one device in TFLOP/s, or None where it is not known, and why so."""
    if cfg.peak_tflops is not None:
        return cfg.peak_tflops, f"against {cfg.peak_tflops:g} TFLOP/s a device, as logging.peak_tflops says"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type}"
    kind = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return None, ""
    if name not in PEAK_TFLOPS or dtype not in (torch.bfloat16, torch.float16):
        return None, f"left out: the peak of {name} in {kind} is not known; set logging.peak_tflops"
    return PEAK_TFLOPS[name], f"against {PEAK_TFLOPS[name]:g} TFLOP/s a device, the peak of {name} in {kind}"


def model_flops(model: nn.Module, anatomy: Anatomy | None = None) -> ModelFlops:
    """Count a transformers model's FLOPs by its modules and anatomy (None: read it).

    Raises NotImplementedError for layers that are neither full nor sliding attention, or differ in their heads.
    """
    anatomy = anatomy or read_anatomy(model)
    per_token = 0.0
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        experts = name in anatomy.experts
        for parameter in module.parameters(recurse=False):
            if parameter.dim() >= (3 if experts else 2):
                share = _chosen(anatomy) / parameter.shape[0] if experts else 1.0
                values = parameter.numel() if parameter.is_floating_point() else _packed_values(module)
                per_token += (6 if parameter.requires_grad else 4) * values * share
    return ModelFlops(per_token, _per_pair(anatomy))


def pairs(length: int, window: int | None = None) -> int:
    """Return how many pairs of tokens see one another in a document: each sees itself and what is to its left."""
    near = length if window is None else min(length, window)
    return near * (near + 1) // 2 + (length - near) * near


def document_lengths(batch: Batch) -> list[int]:
    """Return the lengths in tokens of a micro-batch's documents, its padding left out; none where asking would wait.

    Every sample ends with a target token, so what follows the last one of a row is padding.
    """
    targets, bounds = batch.targets, batch.document_bounds  # (micro_batch, seq)
    if targets.device.type != "cpu":
        return []
    ends_there = torch.arange(2, targets.shape[1] + 2)  # a target is the token after its position
    ends = torch.where(targets != IGNORED, ends_there, 0).amax(1)  # (micro_batch,)
    if bounds is None:
        return ends.tolist()
    bounds = torch.minimum(bounds, ends[:, None].to(bounds.dtype))
    return [length for length in bounds.diff(dim=1).flatten().tolist() if length > 0]


def _packed_values(module: Any) -> int:
    """Values of a linear layer's weight, whose bytes are fewer."""
    return module.in_features * module.out_features


def _chosen(anatomy: Anatomy) -> int:
    if anatomy.experts_per_token is None:
        raise NotImplementedError("the config does not say how many experts a token chooses (num_experts_per_tok)")
    return anatomy.experts_per_token


def _per_pair(anatomy: Anatomy) -> tuple[tuple[int | None, int], ...]:
    if unknown := set(anatomy.kinds) - {FULL, SLIDING}:
        raise NotImplementedError(f"layers of {', '.join(sorted(unknown))} are not counted")
    if anatomy.widths is None:
        raise NotImplementedError("the config does not state one number and width of heads for all layers")
    each = 6 * anatomy.widths.heads * (anatomy.widths.keys + anatomy.widths.values)
    windows = Counter(anatomy.window if kind == SLIDING else None for kind in anatomy.kinds)
    return tuple((window, count * each) for window, count in windows.items())
