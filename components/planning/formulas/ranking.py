"""A run's memory against its device, and meshes that fit it: the fastest first, and why others are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from typing import Any

from components.config.compute_rules import attention_problems, compile_problems, recompute_problems, torch_problems
from components.config.mesh_rules import (
    all_layouts,
    batch_problems,
    fit_micro_batches,
    mesh_shapes,
    model_problems,
    name_of,
    quantized_problems,
    row_problems,
)
from components.config.rules import validate
from components.config.schema.model import LossMethod
from components.config.schema.parallelism import (
    AXES,
    ONE_F_ONE_B,
    ActivationCheckpointing,
    MeshShape,
    ParallelismConfig,
    PipelineSchedule,
    Strategy,
    describe_processes,
)
from components.config.schema.recipes import FinetuneConfig, TrainConfig, section
from components.config.schema.run import PeftConfig
from components.config.shape import ModelShape
from components.planning.formulas.hardware import Hardware, find_hardware
from components.planning.formulas.memory import MemoryEstimate, estimate_memory
from components.planning.formulas.policies import (
    ESTIMATE_ERROR,
    RESERVED_BYTES,
    chooses_grad_sync,
    fitting_grad_sync,
    fitting_policy,
    grad_sync_peaks,
    policy_peaks,
    with_grad_sync,
    with_policy,
)
from components.planning.formulas.step_time import StepTime, estimate_time
from components.planning.formulas.workload import Workload, build_workload, bytes_text
from components.protocol.errors import ConfigError, field_values

_SINGLE = ParallelismConfig(strategy=Strategy.single, dp_shard=1)
_POLICIES = (ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full)
_SCHEDULES = (ONE_F_ONE_B, PipelineSchedule("Interleaved1F1B"), PipelineSchedule("ZBVZeroBubble"))
"""Schedules to choose from if the command line sets none."""
_SHORT_ROW = 4096
"""Rows of fewer tokens per rank than this are not split by cp: attention is then a small part of the step."""
_LARGEST_MICRO_BATCH = 16


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
    estimate, limit = estimate_memory(workload_on(cfg, mesh, hardware), hardware.device_type), usable_bytes(hardware)
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
    return with_policy(workload, fitting_policy(policy_peaks(cfg, workload, hardware.device_type), usable))


def _fitting_changes(cfg: TrainConfig, mesh: MeshShape, hardware: Hardware) -> Iterator[str]:
    """Yield the changes of one key that fit, those that cost the least speed first."""
    limit = usable_bytes(hardware) / (1 + ESTIMATE_ERROR)
    for text, changed in _changes(cfg, mesh):
        try:
            if estimate_memory(workload_on(changed, mesh, hardware), hardware.device_type).peak <= limit:
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
        sharded = replace(parallelism, sequence_parallel=True)
        yield "parallelism.sequence_parallel=true", replace(cfg, parallelism=sharded)
    for policy in (ActivationCheckpointing.selective, ActivationCheckpointing.full):
        recomputed = replace(parallelism, activation_checkpointing=policy)
        if policy is not parallelism.activation_checkpointing and not recompute_problems(cfg.model, recomputed, mesh):
            yield f"parallelism.activation_checkpointing={policy}", replace(cfg, parallelism=recomputed)
    if cfg.model.loss is LossMethod.logits:
        yield "model.loss=chunked", replace(cfg, model=replace(cfg.model, loss=LossMethod.chunked))


@dataclass(frozen=True, slots=True)
class Plan:
    """A candidate with its estimates."""

    candidate: Candidate
    workload: Workload
    memory: MemoryEstimate
    time: StepTime


def _rank_plans(
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
    unsharded = replace(cfg, parallelism=_SINGLE)
    base = build_workload(unsharded, single, on_gpu=hardware.is_gpu, device_memory=hardware.gpu_memory)
    limit = usable_bytes(hardware) / (1 + ESTIMATE_ERROR)
    plans: list[Plan] = []
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
            plans.append(Plan(each, workload, memory, estimate_time(workload, hardware)))
            if each.mesh.pp == 1:
                break  # without a pipeline, a smaller micro-batch is not faster
    if not plans and smallest is None and not left_out.reasons:
        cfg.parallelism.resolve(choice.world)  # raises the reason: degrees that cannot multiply to the world size
    if not plans:
        raise ConfigError(_nothing_fits(smallest, least, choice, hardware, left_out))
    plans.sort(key=lambda plan: (plan.time.seconds, plan.memory.peak))
    best: dict[tuple[object, ...], Plan] = {}
    for plan in plans:
        parallelism = plan.candidate.parallelism
        key = plan.candidate.mesh, parallelism.strategy, parallelism.pp_schedule
        if best.setdefault(key, plan) is not plan:
            left_out.add("another policy or micro-batch size is faster on the same mesh")
    return list(best.values())


def legal_plans(
    cfg: TrainConfig, shape: ModelShape, choice: Choice, hardware: Hardware, left_out: LeftOut, count: int
) -> list[Plan]:
    """Return the first `count` plans of `_rank_plans` that pass all checks of the config.

    Raises ConfigError like `_rank_plans`, and with the problems if no plan passes.
    """
    legal: list[Plan] = []
    for plan in _rank_plans(cfg, shape, choice, hardware, left_out):
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
        """Return what environment.json and result.json hold beside the measured figures."""
        return {
            "gpu": self.hardware.name,
            "processes": self.workload.mesh.world,
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh with its policies and its micro-batch size."""

    parallelism: ParallelismConfig
    mesh: MeshShape
    micro_batch_size: int

    def overrides(self, base: ParallelismConfig) -> list[str]:
        """Return the overrides that turn a config with the section `base` into this candidate's."""
        chosen, stated = field_values(self.parallelism), field_values(base)
        names = ("strategy", *AXES, "sequence_parallel", "activation_checkpointing", "pp_schedule")
        changed = [f"parallelism.{name}={_text(chosen[name])}" for name in names if chosen[name] != stated[name]]
        return [*changed, f"training.micro_batch_size={self.micro_batch_size}"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What the planner may choose, and the machine that it chooses for."""

    world: int
    ranks_per_node: int
    fixed: Collection[str] = ()
    """Keys that the command line sets; the planner keeps their values."""


@dataclass(slots=True)
class LeftOut:
    """Reasons for leaving candidates out, with their number."""

    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, reason: str) -> None:
        """Count one candidate."""
        self.reasons[reason] += 1


def candidates(cfg: TrainConfig, shape: ModelShape, choice: Choice, left_out: LeftOut) -> Iterator[Candidate]:
    """Yield the legal candidates, for each mesh and policy the larger micro-batches first.

    Args:
        cfg: The run; its degrees are replaced unless the command line sets them.
        shape: Sizes of the model.
        left_out: Filled with the reasons for leaving others out.
    """
    for mesh in mesh_shapes(choice.world):
        if not _keeps(mesh, cfg.parallelism, choice):
            continue
        if reason := _unsuitable(mesh, cfg, shape, choice):
            left_out.add(reason)
            continue
        for parallelism in _policies(mesh, cfg.parallelism, choice, shape, cfg):
            problems = [
                *model_problems(parallelism, mesh, shape),
                *row_problems("training.seq_len", cfg.training.seq_len, parallelism, mesh),
                *attention_problems(cfg.model, mesh, cfg.cluster.device, packs=cfg.data.pack, trains=True, shape=shape),
                *recompute_problems(cfg.model, parallelism, mesh),
                *compile_problems(cfg.model, parallelism, mesh, shape),
                *torch_problems(section(cfg, PeftConfig), parallelism, mesh),
                *quantized_problems(section(cfg, PeftConfig), parallelism, mesh, shape),
            ]
            if problems:
                left_out.add(problems[0])
                continue
            yield from _micro_batches(cfg, parallelism, mesh, choice, left_out)


def _keeps(mesh: MeshShape, base: ParallelismConfig, choice: Choice) -> bool:
    """Return whether a mesh has the degrees that the command line sets."""
    return all(
        base.degree(axis) in (-1, mesh.degree(axis)) for axis in AXES if f"parallelism.{axis}" in choice.fixed
    ) and (not _fixed_strategy(choice) or base.strategy is Strategy.fsdp2 or mesh.dp_replicate == choice.world)


def _fixed_strategy(choice: Choice) -> bool:
    return "parallelism.strategy" in choice.fixed


def _unsuitable(mesh: MeshShape, cfg: TrainConfig, shape: ModelShape, choice: Choice) -> str:
    """Return why a mesh that may be legal is not considered, or an empty string."""
    node, free = choice.ranks_per_node, [axis for axis in AXES if f"parallelism.{axis}" not in choice.fixed]
    if "tp" in free and mesh.tp > node:
        return f"parallelism.tp > {node}: its collectives, four per layer, would cross nodes"
    if "cp" in free and mesh.cp > 1 and cfg.training.seq_len // mesh.cp < _SHORT_ROW:
        return f"parallelism.cp: would leave fewer than {_SHORT_ROW:,} tokens of a row per rank"
    if "ep" in free and mesh.ep > 1 and not shape.experts:
        return "parallelism.ep > 1: the model is dense"
    if "pp" in free and mesh.pp > (shape.layers or 1):
        return f"parallelism.pp > {shape.layers}: more stages than layers"
    if cfg.training.global_batch_size % mesh.dp:
        return f"training.global_batch_size={cfg.training.global_batch_size}: not a multiple of the dp size"
    inner = mesh.world // (mesh.pp * mesh.dp_replicate)
    if "dp_replicate" in free and mesh.dp_replicate > 1 and inner % min(node, choice.world) and inner > 1:
        return "parallelism.dp_replicate: a replica would not fill whole nodes"
    return ""


def _policies(
    mesh: MeshShape, base: ParallelismConfig, choice: Choice, shape: ModelShape, cfg: TrainConfig
) -> Iterator[ParallelismConfig]:
    """Yield the config of a mesh with each schedule and policy that the command line leaves open."""
    degrees: dict[str, Any] = {axis: mesh.degree(axis) for axis in AXES}
    strategy = base.strategy if _fixed_strategy(choice) else Strategy.fsdp2
    if not _fixed_strategy(choice) and mesh.world == 1:
        strategy = Strategy.single
    fixed_policy = {"parallelism.activation_checkpointing"} & set(choice.fixed)
    policies: tuple[ActivationCheckpointing, ...] = (base.activation_checkpointing,) if fixed_policy else _POLICIES
    if cfg.model.compile == "true" and not fixed_policy:
        policies = tuple(each for each in policies if each is not ActivationCheckpointing.selective)
    schedules = (base.pp_schedule,) if mesh.pp == 1 or "parallelism.pp_schedule" in choice.fixed else _SCHEDULES
    for schedule in schedules:
        stages = mesh.pp * (1 if schedule in ("GPipe", "1F1B") else base.stages_per_rank)
        if stages > (shape.layers or stages):  # a stage would have no layer
            continue
        for policy in policies:
            try:
                built = replace(
                    base,
                    strategy=strategy,
                    sequence_parallel=mesh.tp > 1 and _shards_sequence(mesh, cfg, base, choice),
                    activation_checkpointing=policy,
                    pp_schedule=schedule,
                    **degrees,
                )
            except ConfigError:  # a value that the command line sets excludes it, such as cpu_offload with pp
                continue
            yield built
    if strategy is Strategy.fsdp2 and not _fixed_strategy(choice) and mesh.dp_replicate == mesh.world > 1:
        try:
            whole = replace(base, strategy=Strategy.ddp, sequence_parallel=False, cpu_offload=False, **degrees)
        except ConfigError:  # such as prefetch, which only fsdp2 has
            return
        for policy in policies:
            yield replace(whole, activation_checkpointing=policy)


def _shards_sequence(mesh: MeshShape, cfg: TrainConfig, base: ParallelismConfig, choice: Choice) -> bool:
    """Return whether to shard hidden states over tp: always, unless set otherwise, or if tp does not divide a row."""
    if "parallelism.sequence_parallel" in choice.fixed:
        return base.sequence_parallel
    return cfg.training.seq_len % (2 * mesh.cp * mesh.tp) == 0


def _micro_batches(
    cfg: TrainConfig, parallelism: ParallelismConfig, mesh: MeshShape, choice: Choice, left_out: LeftOut
) -> Iterator[Candidate]:
    """Yield the micro-batch sizes that divide a rank's share, the largest first."""
    training = cfg.training
    rows = training.global_batch_size // mesh.dp
    if "training.micro_batch_size" in choice.fixed:
        sizes = [training.micro_batch_size]
    else:
        sizes = [size for size in (16, 8, 4, 2, 1) if size <= min(rows, _LARGEST_MICRO_BATCH) and rows % size == 0]
    problems: list[str] = []
    for size in sizes:
        if mesh.pp > 1 or training.ramp or "training.micro_batch_size" in choice.fixed:
            problems = batch_problems(replace(training, micro_batch_size=size), parallelism, mesh)
            if problems:
                continue
        yield Candidate(parallelism, mesh, size)
    if problems:
        left_out.add(problems[0])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """Config of a run on one mesh, or the reasons why it cannot run there."""

    name: str
    cfg: FinetuneConfig
    problems: tuple[str, ...] = ()

    @property
    def is_legal(self) -> bool:
        """Whether the config can run on the mesh."""
        return not self.problems


def plan_mesh(
    name: str, parallelism: ParallelismConfig, cfg: FinetuneConfig, processes: int, shape: ModelShape
) -> MeshPlan:
    """Plan `cfg` on a mesh, with the global batch size and the sequence length of `cfg`."""
    planned = replace(cfg, parallelism=parallelism)
    problems = validate(planned, processes, shape)
    return MeshPlan(name, cfg, tuple(problems)) if problems else MeshPlan(name, fit_micro_batches(planned, processes))


def plan_all(
    cfg: FinetuneConfig, processes: int, shape: ModelShape, recompute: Sequence[ActivationCheckpointing] | None = None
) -> list[MeshPlan]:
    """Return a plan for every mesh of `processes`, including those that cannot run, with the reasons.

    Args:
        recompute: Policies of activation checkpointing to combine with each mesh; None: only that of `cfg`.
    """
    return [
        plan_mesh(name_of(parallelism, processes), parallelism, cfg, processes, shape)
        for parallelism in all_layouts(processes, cfg.parallelism, recompute)
    ]
