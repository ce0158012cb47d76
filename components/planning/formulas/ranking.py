"""Candidates that fit the device, the fastest first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from components.config.errors import ConfigError
from components.config.schema.parallelism import MeshShape, ParallelismConfig, Strategy, describe_processes
from components.config.schema.recipes import TrainConfig
from components.config.shape import ModelShape
from components.planning.formulas.candidates import Candidate, Choice, LeftOut, candidates
from components.planning.formulas.hardware import Hardware, find_hardware
from components.planning.formulas.memory import MemoryEstimate, estimate_memory
from components.planning.formulas.memory_check import ESTIMATE_ERROR, GIB, usable_bytes
from components.planning.formulas.step_time import StepTime, estimate_time
from components.planning.formulas.workload import Workload, build_workload

SINGLE = ParallelismConfig(strategy=Strategy.single, dp_shard=1)


@dataclass(frozen=True, slots=True)
class Plan:
    """A candidate with its estimates."""

    candidate: Candidate
    workload: Workload
    memory: MemoryEstimate
    time: StepTime


def rank_plans(
    cfg: TrainConfig, shape: ModelShape, choice: Choice, hardware: Hardware, left_out: LeftOut
) -> list[Plan]:
    """Return the candidates that fit the memory of the device, the fastest first.

    Each mesh and schedule is listed once, with the policy and the micro-batch size that make it fastest.

    Args:
        cfg: The run.
        shape: Sizes of its model.
        choice: What to choose, and the number of ranks.
        left_out: Filled with the reasons for leaving candidates out.

    Raises ConfigError if the model's sizes are unknown, if no candidate is legal, or if none fits, with the memory that
    the smallest one needs.
    """
    single = MeshShape()
    base = build_workload(replace(cfg, parallelism=SINGLE), single, on_gpu=hardware.is_gpu)
    limit = usable_bytes(hardware) / (1 + ESTIMATE_ERROR)
    found: list[Plan] = []
    smallest: Candidate | None = None
    least = 0
    legal = candidates(cfg, shape, choice, left_out)
    for _, group in groupby(legal, key=lambda each: (id(each.parallelism), each.mesh)):
        for each in group:
            workload = base.on_mesh(each.parallelism, each.mesh, each.micro_batch_size)
            memory = estimate_memory(workload, hardware.device_type)
            if least == 0 or memory.peak < least:
                least, smallest = memory.peak, each
            if memory.peak > limit:
                left_out.add(f"needs more than {limit / GIB:,.1f} GiB of {hardware.name}")
                continue
            found.append(Plan(each, workload, memory, estimate_time(workload, hardware)))
            if each.mesh.pp == 1:
                break  # without a pipeline, a smaller micro-batch is not faster
    if not found and smallest is None and not left_out.reasons:
        cfg.parallelism.resolve(choice.world)  # raises the reason: degrees that cannot multiply to the world size
    if not found:
        raise ConfigError(_nothing_fits(smallest, least, choice, hardware, left_out))
    found.sort(key=lambda plan: (plan.time.seconds, plan.memory.peak))
    best: dict[tuple[object, ...], Plan] = {}
    for plan in found:
        parallelism = plan.candidate.parallelism
        key = plan.candidate.mesh, parallelism.strategy, parallelism.pp_schedule
        if best.setdefault(key, plan) is not plan:
            left_out.add("another policy or micro-batch size is faster on the same mesh")
    return list(best.values())


@dataclass(frozen=True, slots=True)
class Planned:
    """Estimates for one run on its device."""

    gpu: str
    """The device, cluster.gpu."""
    peak_memory_bytes: int
    """Peak memory of the fullest rank."""
    step_seconds: float
    """Time of an optimizer step."""


def plan_of(cfg: TrainConfig, mesh: MeshShape) -> Planned | None:
    """Return the estimates for a run; None if its device is not set or its model's sizes are unknown."""
    if cfg.cluster.gpu is None:
        return None
    try:
        hardware = find_hardware(cfg.cluster.gpu)
        workload = build_workload(cfg, mesh, on_gpu=hardware.is_gpu)
    except ConfigError:  # reported before the run started
        return None
    memory, time = estimate_memory(workload, hardware.device_type), estimate_time(workload, hardware)
    return Planned(hardware.name, memory.peak, round(time.seconds, 6))


def _nothing_fits(smallest: Candidate | None, least: int, choice: Choice, hardware: Hardware, left_out: LeftOut) -> str:
    """Return the message for a run without any candidate that fits."""
    processes = describe_processes(choice.world)
    if smallest is None:
        reasons = "; ".join(reason for reason, _ in left_out.reasons.most_common(3))
        return f"parallelism: no mesh of {processes} can run this config: {reasons}"
    return (
        f"cluster.gpu={hardware.name}: nothing fits {processes}: the smallest configuration needs {least / GIB:,.1f} "
        f"GiB on {smallest.mesh.summary}, of which {usable_bytes(hardware) / GIB:,.1f} GiB are usable; add nodes "
        "(cluster.nodes), shorten training.seq_len, or train adapters (peft=lora)"
    )
