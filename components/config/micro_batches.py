"""Split of the global batch into micro-batches: the same sequences per step on every mesh."""

from __future__ import annotations

from dataclasses import replace

from components.config.schema.parallelism import MeshShape, ParallelismConfig, PipelineSchedule
from components.config.schema.recipes import Config, section, with_section
from components.config.schema.training import TrainingConfig


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
