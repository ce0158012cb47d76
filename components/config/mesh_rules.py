"""Meshes of N processes, shares of heads and layers, micro-batches, and rules about the axes that a model supports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from components.config.schema.parallelism import (
    AXES,
    ActivationCheckpointing,
    ContextAttention,
    MeshShape,
    ParallelismConfig,
    PipelineSchedule,
    Strategy,
    UnevenHeads,
)
from components.config.schema.recipes import Config, section, with_section
from components.config.schema.run import ALL_LINEAR, PeftConfig
from components.config.schema.training import TrainingConfig
from components.config.shape import (
    PLANNED_MLP,
    AttentionLayout,
    ModelShape,
    attention_layout,
    local_heads,
    ulysses_divides,
)

RECOMPUTE = tuple(policy for policy in ActivationCheckpointing if policy != ActivationCheckpointing.auto)
"""Policies of activation checkpointing, except `auto`, which selects one of them."""
_DEGREE = "[0-9]{1,6}"
_NAME = re.compile(rf"(?:ddp{_DEGREE}|(?:(?:{'|'.join(AXES)}){_DEGREE})(?:_(?:{'|'.join(AXES)}){_DEGREE})*(?:_sp)?)")
"""Mesh names such as pp2_dp_shard2_tp2_sp, without the optional policy of activation checkpointing at the end."""
_QUANTIZED_TOGETHER = 64
"""Consecutive inputs of a layer that share a scale under QLoRA (NF4)."""
_SPLIT_INPUTS = {
    **dict.fromkeys(PLANNED_MLP | {"glm4", "phi3"}, ("self_attn.o_proj", "mlp.down_proj")),
    **dict.fromkeys(("gpt_oss", "mixtral", "olmoe", "qwen3_moe"), ("self_attn.o_proj", "")),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
    "starcoder2": ("self_attn.o_proj", "mlp.c_proj"),
}
"""Model type -> the linear layers of attention and MLPs whose inputs its tp plan splits."""
_GATHERED_HEADS = frozenset({"gpt2", "olmo2", "olmo3", "olmoe", "phi3"})
"""Model types whose tp plan computes all heads on every rank, whether or not tp divides them."""
_NOT_STAGED = frozenset({"openai-gpt", "zamba", "zamba2"})
"""Model types whose forward cannot run in a stage: it uses the shape of the ids or, in each layer, the embeddings."""
NO_TP_PLAN = frozenset({
    *("biogpt", "bitnet", "bloom", "codegen", "ctrl", "dbrx", "diffllama", "falcon"),
    *("falcon_mamba", "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "gptj", "jetmoe", "mamba", "mamba2", "mpt"),
    *("openai-gpt", "opt", "persimmon", "recurrent_gemma", "rwkv", "xglm", "xlstm", "zamba", "zamba2"),
})  # fmt: skip
"""Model types without a tensor-parallel plan, in transformers and in components/distributed/tp_plan.py."""


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
        return next(layout for layout in all_layouts(int(name[3:]), base) if layout.strategy == Strategy.ddp)
    parts = name.removesuffix("_sp").replace("dp_", "dp-").split("_")
    degrees = {re.sub(r"\d+$", "", part).replace("-", "_"): int(re.findall(r"\d+$", part)[0]) for part in parts}
    axes: dict[str, Any] = {axis: degrees.get(axis, 1) for axis in AXES}
    return replace(base, strategy=Strategy.fsdp2, sequence_parallel=name.endswith("_sp"), **axes)


def batch_problems(training: TrainingConfig, parallelism: ParallelismConfig, mesh: MeshShape) -> list[str]:
    """Return the problems of the global batch sizes for which no micro-batch size exists."""
    sizes = {f"training.batch_size_ramp[{i}].global_batch_size": size for i, (_, size) in enumerate(training.ramp)}
    sizes["training.global_batch_size"] = training.global_batch_size
    largest = training.micro_batch_size
    found = [
        problem for key, size in sizes.items() for problem in _size_problems(key, size, largest, parallelism, mesh)
    ]
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
        if all(_fits(row, size, parallelism, mesh) for row in rows):
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


def model_problems(parallelism: ParallelismConfig, mesh: MeshShape, shape: ModelShape) -> list[str]:
    """Return what the mesh does not divide, and axes that the model's forward does not support. Called before loading
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
    """Return the problem of QLoRA layers whose inputs tp cannot split, of the families in _SPLIT_INPUTS.

    The ranks check all layers of every family before they load weights.
    """
    if peft is None or not peft.quantizes or mesh.tp == 1 or parallelism.tp_plan or shape.family not in _SPLIT_INPUTS:
        return []
    of_attention, of_mlp = _SPLIT_INPUTS[shape.family]
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
    if mesh.tp > 1 and parallelism.sequence_parallel and shape.family == "gemma4_text" and shape.experts:
        problems.append(
            "parallelism.sequence_parallel=true: the experts of Gemma 4 take the tokens of all rows together, which tp "
            "does not shard with the hidden states; set parallelism.sequence_parallel=false"
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
    reason = " and ".join(
        text
        for text, applies in (
            (f"cp {mesh.cp} splits a row into {2 * mesh.cp} chunks", mesh.cp > 1),
            (f"sequence parallel splits it over tp {mesh.tp}", parallelism.sequence_parallel),
        )
        if applies
    )
    return [f"{key}={seq_len}: must be a multiple of {multiple}, because {reason}; change {key}"]
