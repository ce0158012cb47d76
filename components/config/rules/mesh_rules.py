"""Rules about what the mesh must divide (attention heads, MLP features, layers, experts, rows), and about models whose
forward rules out an axis."""

from __future__ import annotations

from components.config.layouts import AttentionLayout, attention_layout, local_heads, ulysses_divides
from components.config.schema.parallelism import ContextAttention, MeshShape, ParallelismConfig, UnevenHeads
from components.config.shape import ModelShape

NOT_STAGED = frozenset({"bamba", "nemotron_h", "openai-gpt"})
"""Model types whose forward fails in a stage: it uses the type or outputs of every layer, or the shape of the ids."""


def model_problems(parallelism: ParallelismConfig, mesh: MeshShape, shape: ModelShape) -> list[str]:
    """Return what the mesh cannot divide of the model, and the axes that its forward rules out. Checked before loading
    the model and again after it."""
    problems: list[str] = []
    if shape.heads is not None and mesh.tp > 1 and parallelism.uneven_heads == UnevenHeads.refuse:
        kv_heads = shape.kv_heads or shape.heads
        if attention_layout(shape.heads, kv_heads, mesh.tp) == AttentionLayout.replicated:
            problems.append(
                f"parallelism.tp={mesh.tp}: the model has {shape.heads} attention heads and {kv_heads} kv heads, "
                f"which cannot be sharded evenly over {mesh.tp} ranks; change parallelism.tp, or set "
                "parallelism.uneven_heads=replicate to compute attention on every tp rank"
            )
    if shape.tp_divides_mlp and shape.mlp is not None and shape.mlp % mesh.tp and parallelism.tp_plan is None:
        problems.append(
            f"parallelism.tp={mesh.tp}: does not divide the {shape.mlp} features of the model's MLPs; change "
            "parallelism.tp"
        )
    problems += _forward_problems(parallelism, mesh, shape)
    stages = len(parallelism.stage_ranks(mesh.pp))
    if shape.layers is not None and shape.layers < stages:
        fewer = ", or parallelism.pp_schedule=1F1B (one stage per rank)" if stages > mesh.pp else ""
        problems.append(
            f"parallelism.pp={mesh.pp}: {parallelism.pp_schedule} needs {stages} stages, but the model has only "
            f"{shape.layers} layers; set a smaller parallelism.pp{fewer}"
        )
    if shape.heads is not None and mesh.cp > 1 and parallelism.cp_attention == ContextAttention.ulysses:
        heads, kv_heads = local_heads(shape.heads, shape.kv_heads or shape.heads, mesh.tp)
        if not ulysses_divides(heads, kv_heads, mesh.cp):
            problems.append(
                f"parallelism.cp_attention=ulysses: cp {mesh.cp} cannot shard the {heads} heads and {kv_heads} kv "
                "heads of a rank evenly; set parallelism.cp_attention=all_gather, or another parallelism.cp"
            )
    if mesh.ep > 1 and shape.experts == 0:
        problems.append(f"parallelism.ep={mesh.ep}: the model is dense (no experts); set parallelism.ep=1")
    elif shape.experts is not None and shape.experts % mesh.ep:
        problems.append(
            f"parallelism.ep={mesh.ep}: does not divide the model's {shape.experts} experts; change parallelism.ep"
        )
    return problems


def _forward_problems(parallelism: ParallelismConfig, mesh: MeshShape, shape: ModelShape) -> list[str]:
    """Return the axes that the model's forward rules out."""
    problems = []
    inputs = (
        "the model computes inputs of each layer from the token ids "
        f"(hidden_size_per_layer_input={shape.per_layer_input})"
    )
    if mesh.pp > 1 and shape.per_layer_input:
        problems.append(
            f"parallelism.pp={mesh.pp}: {inputs}, which only the first stage receives; set parallelism.pp=1"
        )
    if mesh.pp > 1 and shape.family in NOT_STAGED:
        problems.append(
            f"parallelism.pp={mesh.pp}: the forward of {shape.family} models cannot be split into stages; set "
            "parallelism.pp=1"
        )
    if mesh.tp > 1 and parallelism.sequence_parallel and shape.per_layer_input:
        problems.append(
            f"parallelism.sequence_parallel=true: {inputs}, which tp does not shard with the hidden states; set "
            "parallelism.sequence_parallel=false"
        )
    return problems


def row_problems(key: str, seq_len: int, parallelism: ParallelismConfig, mesh: MeshShape) -> list[str]:
    """Return the problem of rows of `seq_len` tokens (the value of `key`) that cp and sequence parallel cannot
    shard."""
    multiple = parallelism.sequence_multiple(mesh)
    if seq_len % multiple == 0:
        return []
    why = " and ".join(
        text
        for text, applies in (
            (f"cp {mesh.cp} splits a row into {2 * mesh.cp} chunks", mesh.cp > 1),
            (f"sequence parallel splits it over tp {mesh.tp}", parallelism.sequence_parallel),
        )
        if applies
    )
    return [f"{key}={seq_len}: must be a multiple of {multiple}, because {why}; change {key}"]
