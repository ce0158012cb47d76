"""Split of the global batch into micro-batches: the same sequences per step on every mesh."""

from __future__ import annotations

from dataclasses import replace

from components.config.layouts import micro_batch_rule
from components.config.schema.parallelism import MeshShape, ParallelismConfig
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
        rule = micro_batch_rule(parallelism.pp_schedule, mesh.pp, size // mesh.dp)
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
        if fits and (mesh.pp == 1 or micro_batch_rule(parallelism.pp_schedule, mesh.pp, rows // size) is None):
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
