"""Comparison of a run's estimated memory with its device, before it is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from components.config.compute_rules import recompute_problems
from components.config.mesh_rules import batch_problems
from components.config.schema.model import LossMethod
from components.config.schema.parallelism import ActivationCheckpointing, MeshShape
from components.config.schema.recipes import TrainConfig
from components.planning.formulas.hardware import Hardware
from components.planning.formulas.memory import MemoryEstimate, estimate_memory
from components.planning.formulas.workload import Workload, build_workload, bytes_text
from components.protocol.errors import ConfigError

GIB = 2**30
RESERVED_BYTES = 1.5 * GIB
"""Memory of a GPU that the formulas do not count: the CUDA context, workspaces of libraries, buffers of NCCL. An
assumption, not measured."""
ESTIMATE_ERROR = 0.08
"""Largest error of the memory formulas against real ranks."""


class Verdict(StrEnum):
    """fits; tight: within the error of the estimate; exceeds: beyond it."""

    fits = "fits"
    tight = "tight"
    exceeds = "exceeds"


@dataclass(frozen=True, slots=True)
class _MemoryCheck:
    """Estimated memory of a run's fullest rank on its device."""

    estimate: MemoryEstimate
    hardware: Hardware
    verdict: Verdict
    text: str
    """One sentence: the memory, and if it does not fit, the largest term and the smallest change that fits."""


def usable_bytes(hardware: Hardware) -> float:
    """Return the bytes of a device that a run may fill."""
    return hardware.memory_bytes - (RESERVED_BYTES if hardware.is_gpu else 0.0)


def check_memory(cfg: TrainConfig, mesh: MeshShape, hardware: Hardware) -> _MemoryCheck:
    """Estimate the memory of a run and compare it with its device.

    Raises ConfigError if the sizes of the model are unknown.
    """
    estimate, limit = _estimate(cfg, mesh, hardware), usable_bytes(hardware)
    needs = f"needs about {bytes_text(estimate.peak)} of the {bytes_text(limit)} usable on {hardware.name}"
    if estimate.peak * (1 + ESTIMATE_ERROR) <= limit:
        return _MemoryCheck(estimate, hardware, Verdict.fits, f"memory: the fullest rank {needs}")
    exceeds = estimate.peak * (1 - ESTIMATE_ERROR) > limit or estimate.state > limit
    largest = max(estimate.terms, key=lambda each: each.value)
    change = next(_fitting_changes(cfg, mesh, hardware), "no single change fits; run scripts/plan.py, or add nodes")
    text = (
        f"cluster.gpu={hardware.name}: the fullest rank {needs}, most for {largest.name} "
        f"({bytes_text(largest.value)}); {change}"
    )
    return _MemoryCheck(estimate, hardware, Verdict.exceeds if exceeds else Verdict.tight, text)


def workload_on(cfg: TrainConfig, mesh: MeshShape, hardware: Hardware) -> Workload:
    """Return the work of a run on its device, with defer_grad_sync=auto resolved, and activation_checkpointing=auto to
    the least recomputation that fits, or to full.

    Raises ConfigError if the sizes of the model are unknown.
    """
    workload = build_workload(cfg, mesh, on_gpu=hardware.is_gpu, device_memory=hardware.gpu_memory)
    usable = usable_bytes(hardware)
    if chooses_grad_sync(workload, hardware.device_type):
        defers = fitting_grad_sync(grad_sync_peaks(cfg, workload, hardware.device_type), usable)
        workload = with_grad_sync(workload, defers=defers)
    if cfg.parallelism.activation_checkpointing is not ActivationCheckpointing.auto:
        return workload
    return _with_policy(workload, fitting_policy(policy_peaks(cfg, workload, hardware.device_type), usable))


def policy_peaks(cfg: TrainConfig, workload: Workload, device_type: str) -> dict[ActivationCheckpointing, int]:
    """Return the peak memory of the fullest rank, in bytes, under each policy that the run allows; the one with the
    least recomputation first."""
    peaks = {}
    for policy in (ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full):
        chosen = replace(cfg.parallelism, activation_checkpointing=policy)
        if not recompute_problems(cfg.model, chosen, workload.mesh):
            peaks[policy] = estimate_memory(_with_policy(workload, policy), device_type).peak
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


def _with_policy(workload: Workload, policy: ActivationCheckpointing) -> Workload:
    return replace(workload, parallelism=replace(workload.parallelism, activation_checkpointing=policy))


def _estimate(cfg: TrainConfig, mesh: MeshShape, hardware: Hardware) -> MemoryEstimate:
    return estimate_memory(workload_on(cfg, mesh, hardware), hardware.device_type)


def _fitting_changes(cfg: TrainConfig, mesh: MeshShape, hardware: Hardware) -> Iterator[str]:
    """Yield the changes of one key that fit, those that cost the least speed first."""
    limit = usable_bytes(hardware) / (1 + ESTIMATE_ERROR)
    for text, changed in _changes(cfg, mesh):
        try:
            if _estimate(changed, mesh, hardware).peak <= limit:
                yield f"{text} fits"
        except ConfigError:
            continue


def _changes(cfg: TrainConfig, mesh: MeshShape) -> Iterator[tuple[str, TrainConfig]]:
    """Yield legal changes of one key."""
    training, parallelism = cfg.training, cfg.parallelism
    size = training.micro_batch_size // 2
    while size >= 1:
        smaller = replace(training, micro_batch_size=size)
        if not batch_problems(smaller, parallelism, mesh):
            yield f"training.micro_batch_size={size}", replace(cfg, training=smaller)
        size //= 2
    if mesh.tp > 1 and not parallelism.sequence_parallel and training.seq_len % (2 * mesh.cp * mesh.tp) == 0:
        yield (
            "parallelism.sequence_parallel=true",
            replace(cfg, parallelism=replace(parallelism, sequence_parallel=True)),
        )
    for policy in (ActivationCheckpointing.selective, ActivationCheckpointing.full):
        recomputed = replace(parallelism, activation_checkpointing=policy)
        if policy is not parallelism.activation_checkpointing and not recompute_problems(cfg.model, recomputed, mesh):
            yield f"parallelism.activation_checkpointing={policy}", replace(cfg, parallelism=recomputed)
    if cfg.model.loss is LossMethod.logits:
        yield "model.loss=chunked", replace(cfg, model=replace(cfg.model, loss=LossMethod.chunked))
