"""What `auto` resolves to for recomputation and gradient reduction, by the memory that a run needs."""

from __future__ import annotations

from dataclasses import replace

from components.config.compute_rules import recompute_problems
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.recipes import TrainConfig
from components.planning.formulas.memory import estimate_memory
from components.planning.formulas.workload import Workload

GIB = 2**30
RESERVED_BYTES = 1.5 * GIB
"""Memory of a GPU that the formulas do not count: the CUDA context, workspaces of libraries, buffers of NCCL. An
assumption, not measured."""
ESTIMATE_ERROR = 0.08
"""Largest error of the memory formulas against real ranks."""


def policy_peaks(cfg: TrainConfig, workload: Workload, device_type: str) -> dict[ActivationCheckpointing, int]:
    """Return the peak memory of the fullest rank, in bytes, under each policy that the run allows; the one with the
    least recomputation first."""
    peaks = {}
    for policy in (ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full):
        chosen = replace(cfg.parallelism, activation_checkpointing=policy)
        if not recompute_problems(cfg.model, chosen, workload.mesh):
            peaks[policy] = estimate_memory(with_policy(workload, policy), device_type).peak
    return peaks


def chooses_grad_sync(workload: Workload, device_type: str) -> bool:
    """Whether defer_grad_sync=auto depends on the memory: FSDP2 accumulates several micro-batches on a GPU."""
    parallelism = workload.parallelism
    accumulates = workload.is_sharded and workload.micro_batches > 1 and workload.mesh.pp == 1
    return parallelism.defer_grad_sync == "auto" and accumulates and device_type == "cuda"


def grad_sync_peaks(cfg: TrainConfig, workload: Workload, device_type: str) -> list[tuple[int, int]]:
    """Return the peak memory of the fullest rank, in bytes, if gradients are reduced once per step and if they are
    reduced per micro-batch, under the configured policy or each that `auto` allows."""
    peaks = []
    for defers in (True, False):
        chosen = with_grad_sync(workload, defers=defers)
        if cfg.parallelism.activation_checkpointing is ActivationCheckpointing.auto:
            peaks.append(list(policy_peaks(cfg, chosen, device_type).values()))
        else:
            peaks.append([estimate_memory(chosen, device_type).peak])
    return list(zip(*peaks, strict=True))


def fitting_grad_sync(peaks: list[tuple[int, int]], usable: float) -> bool:
    """Resolve defer_grad_sync=auto: reduce per micro-batch before recomputing more."""
    for deferred, reduced in peaks:
        if min(deferred, reduced) * (1 + ESTIMATE_ERROR) <= usable:
            return deferred * (1 + ESTIMATE_ERROR) <= usable
    return False


def with_grad_sync(workload: Workload, *, defers: bool) -> Workload:
    """Return the workload with parallelism.defer_grad_sync resolved."""
    return replace(workload, parallelism=replace(workload.parallelism, defer_grad_sync=str(defers)))


def fitting_policy(peaks: dict[ActivationCheckpointing, int], usable: float) -> ActivationCheckpointing:
    """Return the first policy that surely fits into `usable` bytes; the last if none does."""
    return next((each for each, peak in peaks.items() if peak * (1 + ESTIMATE_ERROR) <= usable), list(peaks)[-1])


def with_policy(workload: Workload, policy: ActivationCheckpointing) -> Workload:
    return replace(workload, parallelism=replace(workload.parallelism, activation_checkpointing=policy))
