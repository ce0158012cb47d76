"""Candidates that fit the device, the fastest first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from components.config.errors import ConfigError
from components.config.schema.parallelism import MeshShape, ParallelismConfig, Strategy, describe_processes
from components.config.schema.recipes import TrainConfig
from components.config.shape import ModelShape
from components.config.validate import validate
from components.planning.formulas.candidates import Candidate, Choice, LeftOut, candidates
from components.planning.formulas.hardware import Hardware, find_hardware
from components.planning.formulas.memory import MemoryEstimate, estimate_memory
from components.planning.formulas.memory_check import (
    ESTIMATE_ERROR,
    chooses_grad_sync,
    usable_bytes,
    with_grad_sync,
    workload_on,
)
from components.planning.formulas.step_time import StepTime, estimate_time
from components.planning.formulas.term import bytes_text
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
    unsharded = replace(cfg, parallelism=SINGLE)
    base = build_workload(unsharded, single, on_gpu=hardware.is_gpu, device_memory=hardware.gpu_memory)
    limit = usable_bytes(hardware) / (1 + ESTIMATE_ERROR)
    found: list[Plan] = []
    smallest: Candidate | None = None
    least = 0
    legal = candidates(cfg, shape, choice, left_out)
    for _, group in groupby(legal, key=lambda each: (id(each.parallelism), each.mesh)):
        for each in group:
            compiled = cfg.model.compiles(each.parallelism, packs=cfg.data.pack, on_gpu=hardware.is_gpu)
            workload = base.on_mesh(each.parallelism, each.mesh, each.micro_batch_size, compiled)
            memory = estimate_memory(workload, hardware.device_type)
            if memory.peak > limit and chooses_grad_sync(workload, hardware.device_type):
                workload = with_grad_sync(workload, defers=False)
                memory = estimate_memory(workload, hardware.device_type)
            if least == 0 or memory.peak < least:
                least, smallest = memory.peak, each
            if memory.peak > limit:
                left_out.add(f"needs more than {_limit_text(hardware)}")
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


def legal_plans(
    cfg: TrainConfig, shape: ModelShape, choice: Choice, hardware: Hardware, left_out: LeftOut, count: int
) -> list[Plan]:
    """Return the first `count` plans of `rank_plans` that pass all checks of the config.

    Raises ConfigError like `rank_plans`, and with the problems if no plan passes.
    """
    legal: list[Plan] = []
    for plan in rank_plans(cfg, shape, choice, hardware, left_out):
        if len(legal) >= count:
            break
        training = replace(cfg.training, micro_batch_size=plan.candidate.micro_batch_size)
        planned = replace(cfg, parallelism=plan.candidate.parallelism, training=training)
        if problems := validate(planned, choice.world, shape):
            left_out.add(problems[0])
        else:
            legal.append(plan)
    if not legal:
        raise ConfigError([reason for reason, _ in left_out.reasons.most_common(3)])
    return legal


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Estimates for one run on its device."""

    hardware: Hardware
    """The device, cluster.gpu."""
    workload: Workload
    memory: MemoryEstimate
    """Memory of the fullest rank."""
    time: StepTime

    def figures(self) -> dict[str, str | float]:
        """Return what result.json holds beside the measured figures."""
        return {
            "gpu": self.hardware.name,
            "peak_memory_bytes": self.memory.peak,
            "step_seconds": round(self.time.seconds, 6),
        }


def estimate_run(cfg: TrainConfig, mesh: MeshShape) -> RunEstimate | None:
    """Return the estimates for a run; None if its device is not set, or if its model's sizes are unknown."""
    if cfg.cluster.gpu is None:
        return None
    try:
        hardware = find_hardware(cfg.cluster.gpu)
        workload = workload_on(cfg, mesh, hardware)
    except ConfigError:  # reported before the run started
        return None
    return RunEstimate(
        hardware, workload, estimate_memory(workload, hardware.device_type), estimate_time(workload, hardware)
    )


def _nothing_fits(smallest: Candidate | None, least: int, choice: Choice, hardware: Hardware, left_out: LeftOut) -> str:
    """Return the message for a run without any candidate that fits."""
    processes = describe_processes(choice.world)
    if smallest is None:
        reasons = "; ".join(reason for reason, _ in left_out.reasons.most_common(3))
        return f"parallelism: no mesh of {processes} can run this config: {reasons}"
    return (
        f"cluster.gpu={hardware.name}: nothing fits {processes}: the smallest configuration needs {bytes_text(least)} "
        f"on {smallest.mesh.summary}, more than {_limit_text(hardware)}; add nodes (cluster.nodes), shorten "
        "training.seq_len, or train adapters (peft=lora)"
    )


def _limit_text(hardware: Hardware) -> str:
    usable = usable_bytes(hardware)
    less = f"{bytes_text(usable)} usable, less the error of the estimate ({ESTIMATE_ERROR:.0%})"
    return f"{bytes_text(usable / (1 + ESTIMATE_ERROR))} on {hardware.name}: {less}"
