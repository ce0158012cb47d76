"""The rules that need several sections and the number of processes. Imports no torch."""

from __future__ import annotations

from components.config.errors import ConfigError
from components.config.schema.parallelism import (
    AttentionLayout,
    MeshShape,
    ParallelismConfig,
    UnevenHeads,
    attention_layout,
)
from components.config.schema.recipes import FinetuneConfig, RecipeConfig
from components.config.shape import ModelShape


def validate(cfg: RecipeConfig, world_size: int, shape: ModelShape | None = None) -> list[str]:
    """Return every problem of `cfg` on `world_size` processes, each one sentence with value, rule and key.

    `shape` is what is known of the model without loading it; unknown numbers (None) are checked on rank 0 later.
    """
    try:
        mesh = cfg.parallelism.resolve(world_size)
    except ConfigError as error:
        return error.problems
    problems = model_problems(cfg.parallelism, mesh, shape or ModelShape())
    if isinstance(cfg, FinetuneConfig):
        problems += _batch_problems(cfg, mesh)
    return problems


def model_problems(parallelism: ParallelismConfig, mesh: MeshShape, shape: ModelShape) -> list[str]:
    """Return what of the model's shape the mesh cannot divide. Checked before loading and again after."""
    problems: list[str] = []
    if shape.heads is not None and mesh.tp > 1 and parallelism.uneven_heads == UnevenHeads.refuse:
        kv_heads = shape.kv_heads or shape.heads
        if attention_layout(shape.heads, kv_heads, mesh.tp) == AttentionLayout.replicated:
            problems.append(
                f"parallelism.tp={mesh.tp}: the model has {shape.heads} attention heads and {kv_heads} kv heads, "
                f"which {mesh.tp} ranks cannot share evenly; change parallelism.tp, or set "
                "parallelism.uneven_heads=replicate to compute attention on every tp rank"
            )
    if shape.layers is not None and shape.layers < mesh.pp:
        problems.append(f"parallelism.pp={mesh.pp}: the model has only {shape.layers} layers; set pp to that or less")
    if mesh.ep > 1 and shape.experts == 0:
        problems.append(f"parallelism.ep={mesh.ep}: the model is dense, it has no experts; set parallelism.ep=1")
    elif shape.experts is not None and shape.experts % mesh.ep:
        problems.append(
            f"parallelism.ep={mesh.ep}: does not divide the model's {shape.experts} experts; change parallelism.ep"
        )
    return problems


def _batch_problems(cfg: FinetuneConfig, mesh: MeshShape) -> list[str]:
    samples = cfg.training.micro_batch_size * mesh.dp
    if cfg.training.global_batch_size % samples == 0:
        return []
    return [
        f"training.global_batch_size={cfg.training.global_batch_size}: must be a multiple of micro_batch_size x dp = "
        f"{cfg.training.micro_batch_size} x {mesh.dp} = {samples}; change training.global_batch_size, "
        "training.micro_batch_size or parallelism.dp_shard"
    ]
