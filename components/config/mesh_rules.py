"""Rules about what the mesh must divide (heads, layers, experts, rows, ...), and about axes that a model excludes."""

from __future__ import annotations

from collections.abc import Iterable

from components.config.layouts import AttentionLayout, attention_layout, local_heads, ulysses_divides
from components.config.schema.parallelism import ContextAttention, MeshShape, ParallelismConfig, UnevenHeads
from components.config.schema.run import ALL_LINEAR, PeftConfig
from components.config.shape import PLANNED_MLP, ModelShape

_QUANTIZED_TOGETHER = 64
"""Consecutive inputs of a layer that share a scale under QLoRA (NF4)."""
SPLIT_INPUTS = {
    **dict.fromkeys(PLANNED_MLP | {"glm4", "phi3"}, ("self_attn.o_proj", "mlp.down_proj")),
    **dict.fromkeys(("gpt_oss", "mixtral", "olmoe", "qwen3_moe"), ("self_attn.o_proj", "")),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
    "starcoder2": ("self_attn.o_proj", "mlp.c_proj"),
}
"""Model type -> the linear layers of attention and MLPs whose inputs its tp plan splits."""
_GATHERED_HEADS = frozenset({"gpt2", "olmo2", "olmo3", "olmoe", "phi3"})
"""Model types whose tp plan computes all heads on every rank, whether or not tp divides them."""
_NOT_STAGED = frozenset({"bamba", "nemotron_h", "openai-gpt"})
"""Model types whose forward fails in a stage: it uses the type or outputs of every layer, or the shape of the ids."""

NO_TP_PLAN = frozenset({
    *("bamba", "biogpt", "bitnet", "bloom", "codegen", "ctrl", "dbrx", "diffllama", "falcon", "falcon_h1"),
    *("falcon_mamba", "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "gptj", "jetmoe", "mamba", "mamba2", "mpt"),
    *("openai-gpt", "opt", "persimmon", "recurrent_gemma", "rwkv", "xglm", "xlstm", "zamba", "zamba2"),
})  # fmt: skip
"""Model types without a tensor-parallel plan, in transformers and in components/distributed/tensor/tp_plan.py."""


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


def quantized_inputs_problem(tp: int, layers: Iterable[str]) -> str:
    """Return the problem of QLoRA layers, each with its number of inputs, whose inputs tp would split in a block."""
    return (
        f"parallelism.tp={tp}: splits the inputs of layers that are quantized {_QUANTIZED_TOGETHER} inputs at a time, "
        f"and must leave each rank a multiple of {_QUANTIZED_TOGETHER}: {', '.join(layers)}; change parallelism.tp, "
        "set peft=lora, or name other layers in peft.targets"
    )


def quantized_problems(
    peft: PeftConfig | None, parallelism: ParallelismConfig, mesh: MeshShape, shape: ModelShape
) -> list[str]:
    """Return the problem of QLoRA layers whose inputs tp cannot split, of the families in SPLIT_INPUTS.

    The ranks check all layers of every family before they load weights.
    """
    if peft is None or not peft.quantizes or mesh.tp == 1 or parallelism.tp_plan or shape.family not in SPLIT_INPUTS:
        return []
    of_attention, of_mlp = SPLIT_INPUTS[shape.family]
    sizes = {of_mlp: 4 * (shape.hidden or 0) if shape.family == "gpt2" and shape.mlp is None else shape.mlp}
    if shape.heads is not None:
        layout = attention_layout(shape.heads, shape.kv_heads or shape.heads, mesh.tp)
        if layout != AttentionLayout.replicated or shape.family in _GATHERED_HEADS:
            sizes[of_attention] = shape.heads * (shape.head_dim or (shape.hidden or 0) // shape.heads)
    uneven = [
        f"{name} ({size})"
        for name, size in sizes.items()
        if name and size and size % (_QUANTIZED_TOGETHER * mesh.tp)
        if any(t == ALL_LINEAR or f".{name}".endswith(f".{t}") or t.endswith(f".{name}") for t in peft.targets)
    ]
    return [quantized_inputs_problem(mesh.tp, uneven)] if uneven else []


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
    if mesh.tp > 1 and shape.family in NO_TP_PLAN and parallelism.tp_plan is None:
        problems.append(
            f"parallelism.tp={mesh.tp}: {shape.family} models have no tensor-parallel plan; set parallelism.tp=1, or "
            "provide a plan by parallelism.tp_plan=module.path:name"
        )
    if mesh.pp > 1 and shape.family in _NOT_STAGED:
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
