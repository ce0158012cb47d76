"""Layouts of a run over its processes: all meshes of N processes, shares of heads and layers, and micro-batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Any

from components.config.schema.parallelism import (
    AXES,
    ActivationCheckpointing,
    MeshShape,
    ParallelismConfig,
    PipelineSchedule,
    Strategy,
)
from components.config.schema.recipes import Config, section, with_section
from components.config.schema.training import TrainingConfig

RECOMPUTE = tuple(policy for policy in ActivationCheckpointing if policy != ActivationCheckpointing.auto)
"""Policies of activation checkpointing, except `auto`, which selects one of them."""
_DEGREE = "[0-9]{1,6}"
_NAME = re.compile(rf"(?:ddp{_DEGREE}|(?:(?:{'|'.join(AXES)}){_DEGREE})(?:_(?:{'|'.join(AXES)}){_DEGREE})*(?:_sp)?)")
"""Mesh names such as pp2_dp_shard2_tp2_sp, without the optional policy of activation checkpointing at the end."""


def mesh_shapes(processes: int) -> Iterator[MeshShape]:
    """Yield every combination of axis degrees whose product is `processes`."""
    for degrees in _factorizations(processes, len(AXES)):
        yield MeshShape(**dict(zip(AXES, degrees, strict=True)))


def _factorizations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered tuple of `factors` integers whose product is `number`, in ascending order."""
    if factors == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for others in _factorizations(number // first, factors - 1):
                yield first, *others


def all_layouts(
    processes: int, base: ParallelismConfig, recompute: Sequence[ActivationCheckpointing] | None = None
) -> Iterator[ParallelismConfig]:
    """Yield every mesh of `processes` under fsdp2 (for tp > 1 with and without sequence parallel), and ddp.

    All other values of `base` (pp schedule, cp attention, tp plan) are kept.

    Args:
        recompute: Policies of activation checkpointing to combine with each mesh; None: only that of `base`.
    """
    for layout in _meshes(processes, base):
        for policy in recompute or (base.activation_checkpointing,):
            yield replace(layout, activation_checkpointing=policy)


def _meshes(processes: int, base: ParallelismConfig) -> Iterator[ParallelismConfig]:
    for shape in mesh_shapes(processes):
        degrees = asdict(shape)
        for sequence_parallel in (False, True) if shape.tp > 1 else (False,):
            yield replace(base, strategy=Strategy.fsdp2, sequence_parallel=sequence_parallel, **degrees)
    if processes > 1:
        replicated: dict[str, Any] = {**dict.fromkeys(AXES, 1), "dp_replicate": processes}
        yield replace(base, strategy=Strategy.ddp, sequence_parallel=False, cpu_offload=False, **replicated)


def name_of(parallelism: ParallelismConfig, processes: int) -> str:
    """Return the name of a mesh: its axes of size > 1, or `ddp` and its size.

    `sp` is appended for sequence parallel, then the policy of activation checkpointing unless it is none.
    """
    degrees = asdict(parallelism.resolve(processes))
    policy = parallelism.activation_checkpointing
    policy_suffix = [str(policy)] * (policy != ActivationCheckpointing.none)
    if parallelism.strategy == Strategy.ddp:
        return "_".join([f"ddp{processes}", *policy_suffix])
    axes = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1]
    axes = axes + ["sp"] * parallelism.sequence_parallel or [str(parallelism.strategy)]
    return "_".join(axes + policy_suffix)


def layout_of(name: str, base: ParallelismConfig) -> ParallelismConfig | None:
    """Parse a name from `name_of`; return None for any other name. The policy defaults to that of `base`."""
    policy = next((each for each in RECOMPUTE if name.endswith(f"_{each}")), None)
    name = name.removesuffix(f"_{policy}")
    base = replace(base, activation_checkpointing=policy or base.activation_checkpointing)
    if not _NAME.fullmatch(name):
        return None
    if name.startswith("ddp"):
        return next(each for each in all_layouts(int(name[3:]), base) if each.strategy == Strategy.ddp)
    parts = name.removesuffix("_sp").replace("dp_", "dp-").split("_")
    degrees = {re.sub(r"\d+$", "", part).replace("-", "_"): int(re.findall(r"\d+$", part)[0]) for part in parts}
    axes: dict[str, Any] = {axis: degrees.get(axis, 1) for axis in AXES}
    return replace(base, strategy=Strategy.fsdp2, sequence_parallel=name.endswith("_sp"), **axes)


class AttentionLayout(StrEnum):
    """Distribution of attention heads over the tp axis."""

    sharded = "sharded"
    kv_replicated = "kv_replicated"
    replicated = "replicated"


def attention_layout(heads: int, kv_heads: int, tp: int) -> AttentionLayout:
    """Return how query heads and key/value heads are distributed over `tp` ranks.

    sharded: tp divides both counts. kv_replicated: tp divides the query heads and is a multiple of the kv heads, each
    of which is replicated on tp / kv_heads ranks. replicated: otherwise; every rank computes all heads."""
    if heads % tp == 0 and kv_heads % tp == 0:
        return AttentionLayout.sharded
    if heads % tp == 0 and tp % kv_heads == 0:
        return AttentionLayout.kv_replicated
    return AttentionLayout.replicated


def local_heads(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Return the number of query heads and of kv heads that a tp rank computes."""
    if attention_layout(heads, kv_heads, tp) == AttentionLayout.replicated:
        return heads, kv_heads
    return heads // tp, max(kv_heads // tp, 1)


def ulysses_divides(heads: int, kv_heads: int, cp: int) -> bool:
    """Return whether the heads of a rank can be sharded evenly over cp, with kv heads repeated if they are too few."""
    return heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the decoder layers of each pipeline stage, as even as possible, with extra layers on the middle stages.

    The first stage also holds the embedding and the last the LM head, so these two get the smaller share.
    """
    base, extra = divmod(layers, stages)
    middle_first = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))
    sizes = [base + (stage in middle_first[:extra]) for stage in range(stages)]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def batch_problems(training: TrainingConfig, parallelism: ParallelismConfig, mesh: MeshShape) -> list[str]:
    """Return the problems of the global batch sizes for which no micro-batch size exists."""
    sizes = {f"training.batch_size_ramp[{i}].global_batch_size": size for i, (_, size) in enumerate(training.ramp)}
    sizes["training.global_batch_size"] = training.global_batch_size
    largest = training.micro_batch_size
    found = [each for key, size in sizes.items() for each in _size_problems(key, size, largest, parallelism, mesh)]
    if not found and fitting_micro_batch(training, parallelism, mesh) is None:
        return [
            f"training.batch_size_ramp={training.batch_size_ramp}: no micro-batch size suits "
            f"parallelism.pp_schedule={parallelism.pp_schedule} in every stage; change training.batch_size_ramp, or "
            "choose parallelism.pp_schedule=GPipe"
        ]
    return found


def _size_problems(key: str, size: int, largest: int, parallelism: ParallelismConfig, mesh: MeshShape) -> list[str]:
    """Return the problem of a global batch of `size` with micro-batches of at most `largest` sequences."""
    if size % mesh.dp:
        near = -(-size // mesh.dp) * mesh.dp
        return [
            f"{key}={size}: must be a multiple of dp={mesh.dp}, so that data-parallel ranks get equal shares; "
            f"set {key}={near}, or change parallelism.dp_shard"
        ]
    rows = size // mesh.dp
    if not any(_fits(rows, each, parallelism, mesh) for each in range(1, min(largest, rows) + 1)):
        rule = _schedule_rule(parallelism.pp_schedule, mesh.pp, rows)
        return [
            f"{key}={size}: leaves {rows} micro-batches per step, but {rule}; change {key}, or choose "
            "parallelism.pp_schedule=GPipe"
        ]
    return []


def fitting_micro_batch(training: TrainingConfig, parallelism: ParallelismConfig, mesh: MeshShape) -> int | None:
    """Return the largest micro-batch size up to `training.micro_batch_size` that the mesh and schedule allow in every
    step, or None."""
    rows = [size // mesh.dp for size in (*(size for _, size in training.ramp), training.global_batch_size)]
    for size in range(min(training.micro_batch_size, *rows), 0, -1):
        if all(_fits(each, size, parallelism, mesh) for each in rows):
            return size
    return None


def _fits(rows: int, size: int, parallelism: ParallelismConfig, mesh: MeshShape) -> bool:
    """Return whether a rank's `rows` of a step can be split into micro-batches of `size` rows."""
    return rows % size == 0 and (mesh.pp == 1 or _schedule_rule(parallelism.pp_schedule, mesh.pp, rows // size) is None)


def fit_micro_batches(cfg: Config, world_size: int) -> Config:
    """Return a valid config with `training.micro_batch_size` reduced to what its mesh of `world_size` ranks allows.

    The micro-batch size affects speed and memory but no result, so that one config runs on every mesh.
    """
    training = section(cfg, TrainingConfig)
    if training is None:
        return cfg
    size = fitting_micro_batch(training, cfg.parallelism, cfg.parallelism.resolve(world_size))
    return with_section(cfg, training, replace(training, micro_batch_size=size or training.micro_batch_size))


def _schedule_rule(schedule: PipelineSchedule, pp: int, micro_batches: int) -> str | None:
    """Return the schedule's requirement on the number of micro-batches per step that is violated, or None."""
    if schedule == "1F1B" and micro_batches < pp:
        return f"1F1B needs at least as many micro-batches as stages, {pp}"
    if schedule == "DualPipeV" and micro_batches < 2 * pp:
        return f"DualPipeV needs at least as many micro-batches as stages, {2 * pp}"
    rounds = max(1, micro_batches // pp)
    if str(schedule).startswith("Interleaved") and micro_batches % rounds:
        return f"{schedule} runs {rounds} rounds over pp={pp} and needs a multiple of {rounds} micro-batches"
    return None
