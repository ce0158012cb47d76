"""Split of the global batch into micro-batches: the same sequences per step on every mesh."""

from __future__ import annotations

from dataclasses import replace

from components.config.schema.parallelism import MeshShape, ParallelismConfig, PipelineSchedule
from components.config.schema.recipes import Config, section, with_section
from components.config.schema.training import TrainingConfig


def batch_problems(training: TrainingConfig, parallelism: ParallelismConfig, mesh: MeshShape) -> list[str]:
    """Return the problems of the global batch size for which no micro-batch size exists."""
    size, key = training.global_batch_size, "training.global_batch_size"
    if size % mesh.dp:
        near = -(-size // mesh.dp) * mesh.dp
        return [
            f"{key}={size}: must be a multiple of dp={mesh.dp}, so that data-parallel ranks get equal shares; "
            f"set {key}={near}, or change parallelism.dp_shard"
        ]
    if fitting_micro_batch(training, parallelism, mesh) is None:
        rule = _schedule_rule(parallelism.pp_schedule, mesh.pp, size // mesh.dp)
        return [
            f"{key}={size}: leaves {size // mesh.dp} micro-batches per step, but {rule}; change {key}, or choose "
            "parallelism.pp_schedule=GPipe"
        ]
    return []


def fitting_micro_batch(training: TrainingConfig, parallelism: ParallelismConfig, mesh: MeshShape) -> int | None:
    """Return the largest micro-batch size up to `training.micro_batch_size` that the mesh and schedule allow, or
    None."""
    rows = training.global_batch_size // mesh.dp
    for size in range(min(training.micro_batch_size, rows), 0, -1):
        fits = rows % size == 0
        if fits and (mesh.pp == 1 or _schedule_rule(parallelism.pp_schedule, mesh.pp, rows // size) is None):
            return size
    return None


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
