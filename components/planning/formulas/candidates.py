"""Every way to run a workload on N ranks that is legal, and the reasons for leaving the others out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from components.config.errors import ConfigError
from components.config.meshes import mesh_shapes
from components.config.micro_batches import batch_problems
from components.config.rules.compute_rules import (
    attention_problems,
    compile_problems,
    recompute_problems,
    torch_problems,
)
from components.config.rules.mesh_rules import model_problems, quantized_problems, row_problems
from components.config.schema.checks import field_values
from components.config.schema.parallelism import (
    AXES,
    ONE_F_ONE_B,
    ActivationCheckpointing,
    MeshShape,
    ParallelismConfig,
    PipelineSchedule,
    Strategy,
)
from components.config.schema.peft import PeftConfig
from components.config.schema.recipes import TrainConfig, section
from components.config.shape import ModelShape

POLICIES = (ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full)
SCHEDULES = (ONE_F_ONE_B, PipelineSchedule("Interleaved1F1B"), PipelineSchedule("ZBVZeroBubble"))
"""Schedules to choose from if the command line sets none."""
SHORT_ROW = 4096
"""Rows of fewer tokens per rank than this are not split by cp: attention is then a small part of the step."""
LARGEST_MICRO_BATCH = 16


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
                *attention_problems(
                    cfg.model, mesh, cfg.cluster.device, packs=cfg.data.pack, trains=True, family=shape.family
                ),
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
    if "cp" in free and mesh.cp > 1 and cfg.training.seq_len // mesh.cp < SHORT_ROW:
        return f"parallelism.cp: would leave fewer than {SHORT_ROW:,} tokens of a row per rank"
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
    policies: tuple[ActivationCheckpointing, ...] = (base.activation_checkpointing,) if fixed_policy else POLICIES
    if cfg.model.compile == "true" and not fixed_policy:
        policies = tuple(each for each in policies if each is not ActivationCheckpointing.selective)
    schedules = (base.pp_schedule,) if mesh.pp == 1 or "parallelism.pp_schedule" in choice.fixed else SCHEDULES
    for schedule in schedules:
        stages = mesh.pp * (1 if schedule in ("GPipe", "1F1B") else base.stages_per_rank)
        if stages > (shape.layers or stages):
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
        sizes = [size for size in (16, 8, 4, 2, 1) if size <= min(rows, LARGEST_MICRO_BATCH) and rows % size == 0]
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
