"""Choices of `auto` that the device's memory decides: when gradients are reduced, and what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.recipes import RecipeConfig, TrainConfig
from components.config.shape import shape_of_built
from components.distributed.init import get_local_world_size_preinit
from components.distributed.mesh import Mesh
from components.kernel_counters import usable_memory
from components.models.anatomy import config_of
from components.planning.formulas.architecture import read_architecture
from components.planning.formulas.memory_check import (
    GIB,
    RESERVED_BYTES,
    chooses_grad_sync,
    fitting_grad_sync,
    fitting_policy,
    grad_sync_peaks,
    policy_peaks,
)
from components.planning.formulas.workload import Workload, build_workload
from components.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """An activation-checkpointing policy, and the reason for it if `auto` chose it."""

    policy: ActivationCheckpointing
    why: str = ""
    """Reason for the banner; empty if the policy was configured."""

    def __bool__(self) -> bool:
        return bool(self.why)

    def __str__(self) -> str:
        return f"activation checkpointing: {self.policy}, {self.why}"


@dataclass(frozen=True, slots=True)
class GradSync:
    """When gradients of several micro-batches are reduced, and the reason for it if `auto` chose it."""

    deferred: bool
    """Whether they are reduced once per optimizer step."""
    why: str = ""
    """Reason for the banner; empty if the memory did not matter."""

    def __bool__(self) -> bool:
        return bool(self.why)

    def __str__(self) -> str:
        return f"gradients: reduced {'once per step' if self.deferred else 'per micro-batch'}, {self.why}"


def choose_grad_sync(
    cfg: RecipeConfig, model: nn.Module, mesh: Mesh, device: torch.device, memory: int | None = None
) -> GradSync:
    """Return the configured parallelism.defer_grad_sync, or what `auto` resolves to: true unless it does not fit.

    Also true on a CPU, without accumulation or FSDP2, and if the memory cannot be estimated. The memory is the
    planner's estimate for the fullest rank. A collective if it matters.

    Args:
        model: The whole model, also if it is sharded.
        memory: Bytes available to this rank; None: the memory of its GPU.
    """
    try:
        workload = _workload(cfg, model, mesh, device, memory)
        if not isinstance(cfg, TrainConfig) or not chooses_grad_sync(workload, device.type):
            return GradSync(cfg.parallelism.defers_grad_sync)
        peaks = grad_sync_peaks(cfg, workload, device.type)
    except ConfigError as error:
        why = ""
        if cfg.parallelism.defer_grad_sync == "auto" and device.type == "cuda":
            why = f"because the memory of a step cannot be estimated: {error}"
        return GradSync(cfg.parallelism.defers_grad_sync, why)
    memory = _least_over_ranks(_available_memory(device) if memory is None else memory, device)
    usable = max(memory - RESERVED_BYTES, 0.0)
    deferred, reduced = peaks[-1]
    least = " with the most recomputation" if len(peaks) > 1 else ""
    return GradSync(
        fitting_grad_sync(peaks, usable),
        f"of {usable / GIB:,.2f} GiB usable per rank they need an estimated {deferred / GIB:,.2f} once per step, "
        f"{reduced / GIB:,.2f} per micro-batch{least}",
    )


def choose_recompute_policy(
    cfg: RecipeConfig, model: nn.Module, mesh: Mesh, device: torch.device, memory: int | None = None
) -> RecomputePolicy:
    """Return the configured policy, or the one that `auto` resolves to: full if the memory cannot be estimated.

    The memory of each policy is the planner's estimate for the fullest rank. A collective with `auto`.

    Args:
        model: The whole model, also if it is sharded.
        memory: Bytes available to this rank; None: the memory of its GPU, or its share of the host's.
    """
    configured = cfg.parallelism.activation_checkpointing
    if configured is not ActivationCheckpointing.auto:
        return RecomputePolicy(configured)
    memory = _least_over_ranks(_available_memory(device) if memory is None else memory, device)
    try:
        workload = _workload(cfg, model, mesh, device, memory)
        peaks = policy_peaks(cfg, workload, device.type)  # type: ignore[arg-type]
    except ConfigError as error:
        why = f"because the memory of a step cannot be estimated: {error}"
        return RecomputePolicy(ActivationCheckpointing.full, why)
    usable = max(memory - RESERVED_BYTES, 0.0)
    estimates = ", ".join(f"{each} {peak / GIB:,.2f}" for each, peak in peaks.items())
    why = f"of {usable / GIB:,.2f} GiB usable per rank the policies need an estimated {estimates}"
    return RecomputePolicy(fitting_policy(peaks, usable), why)


def _workload(cfg: RecipeConfig, model: nn.Module, mesh: Mesh, device: torch.device, memory: int | None) -> Workload:
    """Return the work of a step. Raises ConfigError if the formulas do not cover the model or the recipe."""
    config = config_of(model)
    if config is None or not isinstance(cfg, TrainConfig):
        raise ConfigError("the formulas cover transformers' models and recipes whose config is a TrainConfig")
    text = config.get_text_config()
    architecture = read_architecture(shape_of_built(text.to_dict()), text.model_type)
    on_gpu = device.type == "cuda"
    if memory is None and on_gpu:
        memory = _available_memory(device)
    return build_workload(
        cfg, mesh.shape, on_gpu=on_gpu, architecture=architecture, device_memory=memory if on_gpu else None
    )


def _available_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return usable_memory() // max(1, get_local_world_size_preinit())


def _least_over_ranks(memory: int, device: torch.device) -> int:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return memory
    least = torch.tensor(memory, dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
