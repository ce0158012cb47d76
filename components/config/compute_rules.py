"""Rules about kernels: attention, loss, float8, torch.compile and activation checkpointing."""

from __future__ import annotations

import importlib.util
import math
from functools import cache

from packaging.version import Version

from components.config.schema.cluster import Device
from components.config.schema.model import (
    NO_FLEX_BACKWARD,
    Attention,
    DType,
    Float8,
    LossMethod,
    ModelConfig,
    Qat,
    RopeType,
)
from components.config.schema.objective import TeacherConfig
from components.config.schema.parallelism import (
    SPLIT_BACKWARD,
    ActivationCheckpointing,
    MeshShape,
    ParallelismConfig,
    PipelineSchedule,
    Strategy,
)
from components.config.schema.run import PeftConfig
from components.config.schema.training import TasksConfig
from components.config.shape import ModelShape

CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**27}
"""Number of logits (tokens x vocabulary) of a chunk of the loss on a device of unknown memory: large enough that the
matmuls run at full speed and hide the update of the weight's gradient after each chunk."""
_CHUNK_SHARE, _CHUNK_LOGIT_BYTES = 36, 14
"""A chunk takes at most 1 / 36 of a GPU; 14 bytes per logit: bfloat16, and three float32 tensors."""
_WHOLE_ROWS = frozenset({
    *("big_bird", "bloom", "codegen", "cpmant", "falcon", "falcon_mamba", "gpt_neo", "gpt_neox_japanese", "gptj"),
    *("jamba", "mamba", "mamba2", "moshi", "mpt", "openai-gpt", "recurrent_gemma", "rembert", "roformer", "rwkv"),
    *("xglm", "xlnet", "zamba"),
})  # fmt: skip
"""Model types whose rows hold one document on one rank: their attention is code of their own, or a state passes from
token to token in functions that Meshbook does not know. Others show it by the layer types in their config.json."""
_EAGER_ONLY = frozenset({"flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma"})
"""Model types whose attention has a soft cap or sinks and is otherwise full or sliding."""

_UNBIASED_ROUTERS = frozenset({
    *("aria_text", "cohere2_moe", "deepseek_v2", "flex_olmo", "gemma4", "gemma4_text", "gpt_oss", "granitemoe"),
    *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "jamba", "llama4", "llama4_text", "mellum", "minimax"),
    *("mistral4", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe"),
    *("qwen3_next", "zaya"),
})  # fmt: skip
"""Mixtures of experts whose routers choose by their scores alone; the ranks find others."""


def compile_problems(
    model: ModelConfig, parallelism: ParallelismConfig, mesh: MeshShape, shape: ModelShape
) -> list[str]:
    """Return the problems of compiled layers (model.compile)."""
    if model.compile != "true":
        return []
    problems = []
    if mesh.pp > 1 and parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            f"parallelism.pp_schedule={parallelism.pp_schedule}: splits the backward, which compiled layers do "
            "not support; set model.compile=false or parallelism.pp_schedule=Interleaved1F1B"
        )
    if shape.experts and mesh.ep == 1 and DType.float64 in (model.dtype, model.compute_dtype):
        problems.append(
            "model.compile=true: experts in float64 run in a loop over the experts that received tokens, which "
            "cannot be compiled; set model.compile=false, or model.dtype=float32"
        )
    return problems


def precision_problems(model: ModelConfig, parallelism: ParallelismConfig, teacher: TeacherConfig | None) -> list[str]:
    """Return the problems of model.compute_dtype: without FSDP2, matmuls use the stored dtype or bfloat16."""
    compute, strategy = model.compute_dtype, parallelism.strategy
    if strategy == Strategy.fsdp2 or compute in (DType.auto, DType.bfloat16):
        return []
    stored = {"model.dtype": model.stored_dtype()}
    if teacher is not None and teacher.dtype is not None:
        stored["teacher.dtype"] = teacher.dtype
    return [
        f"model.compute_dtype={compute}: parallelism.strategy={strategy} computes with the stored weights, which are "
        f"in {dtype}; set {key}={compute}, or parallelism=fsdp2"
        for key, dtype in stored.items()
        if dtype not in (compute, DType.auto)
    ]


def async_tp_problems(model: ModelConfig, parallelism: ParallelismConfig, device: Device, *, packs: bool) -> list[str]:
    """Return the problems of parallelism.async_tp, which the compiler applies to layers on GPUs."""
    if not parallelism.async_tp:
        return []
    key = "parallelism.async_tp=true"
    if device == Device.cpu:
        return [f"{key}: needs the symmetric memory of GPUs, but cluster.device=cpu; set it to false"]
    if model.compiles(parallelism, packs=packs, on_gpu=True):
        return []
    reason = model.uncompiled_because(parallelism, packs=packs) if model.compile == "auto" else "model.compile=false"
    return [f"{key}: only compiled layers overlap, and they are not, because of {reason}; set model.compile=true"]


def torch_problems(peft: PeftConfig | None, parallelism: ParallelismConfig, mesh: MeshShape) -> list[str]:
    """Return the problems of settings that need a later torch than the installed one."""
    installed = _installed_torch()
    if not installed:  # a login node: checked on rank 0
        return []
    problems, release = [], Version(installed).release
    if peft is not None and peft.quantizes and parallelism.strategy == Strategy.fsdp2 and release < (2, 12):
        problems.append(sharded_bytes_problem(installed))
    if mesh.pp > 1 and release < (2, 13):
        problems += split_backward_problems(parallelism.pp_schedule, installed)
    return problems


@cache
def _installed_torch() -> str:
    """Return the version of the installed torch; empty without one."""
    from importlib.metadata import PackageNotFoundError, version  # 10 ms, which few commands need

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def sharded_bytes_problem(installed: str) -> str:
    """Return the message for 4-bit weights under FSDP2 of this version of torch."""
    return (
        f"peft.method=qlora: parallelism.strategy=fsdp2 of torch {installed} shards weights of floating-point numbers "
        "only, not of packed 4-bit codes; install torch 2.12 or later, or set parallelism=ddp or peft=lora"
    )


def split_backward_problems(schedule: PipelineSchedule, installed: str) -> list[str]:
    """Return the problem of a schedule that splits the backward, under a version of torch before 2.13.

    It adds the gradients of all outputs of an operator, counts gradients of weights that are used twice too often, and
    fails for custom autograd functions, such as the chunked loss.
    """
    if schedule not in SPLIT_BACKWARD:
        return []
    return [
        f"parallelism.pp_schedule={schedule}: splits the backward, in which torch {installed} computes wrong gradients "
        "of weights that a stage uses twice; install torch 2.13 or later, or set "
        "parallelism.pp_schedule=Interleaved1F1B"
    ]


def torchao_problems(key: str) -> list[str]:
    """Return the problem of a setting that needs torchao, given as KEY=VALUE, if torchao is not installed."""
    if importlib.util.find_spec("torchao") is not None:
        return []
    return [f"{key}: torchao is not installed; run pip install 'meshbook[quantization]'"]


def loss_problems(
    model: ModelConfig, parallelism: ParallelismConfig, mesh: MeshShape, device: Device, tasks: TasksConfig
) -> list[str]:
    """Return the problems of liger-kernel's fused loss (model.loss=liger)."""
    if model.loss != LossMethod.liger:
        return []
    problems = []
    if device == Device.cpu:
        problems.append(
            "model.loss=liger: liger-kernel only runs on GPUs, but cluster.device=cpu; set model.loss=chunked"
        )
    if mesh.tp > 1:
        problems.append(
            f"model.loss=liger: liger-kernel needs the full vocabulary, but parallelism.tp={mesh.tp} shards it; "
            "set model.loss=chunked"
        )
    if mesh.pp > 1 and parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            f"model.loss=liger: parallelism.pp_schedule={parallelism.pp_schedule} runs the backward twice, but "
            "liger-kernel supports it once; set model.loss=chunked"
        )
    if tasks.tasks:
        problems.append(
            "model.loss=liger: liger-kernel returns no log-probabilities of tokens, which "
            f"evaluation.tasks={tasks.tasks} need; set model.loss=chunked, or evaluation.tasks=[]"
        )
    return problems


def recompute_problems(model: ModelConfig, parallelism: ParallelismConfig, mesh: MeshShape) -> list[str]:
    """Return the problems of selective activation checkpointing, which needs uncompiled layers, an unsplit backward and
    activations on the device."""
    if parallelism.activation_checkpointing != ActivationCheckpointing.selective:
        return []
    problems = []
    if parallelism.activation_offload:
        problems.append(
            "parallelism.activation_checkpointing=selective: holds its tensors outside of autograd, where they cannot "
            "be offloaded; set it to none or full, or set parallelism.activation_offload=false"
        )
    if model.compile == "true":
        problems.append(
            "parallelism.activation_checkpointing=selective: a compiled layer is recomputed as one unit (the compiler "
            "already stores what is expensive); set it to none, full or alternate, or set model.compile=false"
        )
    if mesh.pp > 1 and parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            "parallelism.activation_checkpointing=selective: needs an unsplit backward, but "
            f"parallelism.pp_schedule={parallelism.pp_schedule} splits it; set it to full, or set "
            "parallelism.pp_schedule=Interleaved1F1B"
        )
    return problems


NO_DEVICE_MEMORY = (
    "parallelism.activation_offload=true: there is no device memory to save on a {device}; set it to false"
)


def offload_problems(parallelism: ParallelismConfig, mesh: MeshShape, device: Device) -> list[str]:
    """Return the problems of offloaded activations, which autograd saves and uses once."""
    if not parallelism.activation_offload:
        return []
    problems = []
    if device == Device.cpu:
        problems.append(NO_DEVICE_MEMORY.format(device=device))
    if mesh.pp > 1 and parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            f"parallelism.activation_offload=true: parallelism.pp_schedule={parallelism.pp_schedule} splits the "
            "backward, which uses saved tensors twice; set parallelism.activation_offload=false or "
            "parallelism.pp_schedule=Interleaved1F1B"
        )
    return problems


def attention_problems(
    model: ModelConfig, mesh: MeshShape, device: Device, *, packs: bool, trains: bool, shape: ModelShape
) -> list[str]:
    """Return the problems of model.attention with packed rows, cp or training on a CPU.

    Args:
        shape: Of an unknown family, ranks decide between sdpa and eager, and whether rows can be packed.
    """
    key, family = f"model.attention={model.attention}", shape.family
    problems = _whole_row_problems(mesh, shape, packs=packs)
    is_sdpa = model.attention in (Attention.sdpa, Attention.sdpa_flash)
    if family in _EAGER_ONLY and is_sdpa:
        return [f"{key}: {family} has a soft cap or sinks, which it does not compute; set model.attention=eager"]
    supported = "eager" if family in _EAGER_ONLY else "sdpa"
    if not is_sdpa and (model.attention != Attention.eager or family not in {None, *_EAGER_ONLY}):
        if packs:
            problems.append(
                f"{key}: does not receive the document bounds of packed rows; set model.attention={supported} or "
                "data.pack=false"
            )
        if mesh.cp > 1:
            problems.append(
                f"{key}: parallelism.cp={mesh.cp} splits rows, which {supported} supports; set parallelism.cp=1 or "
                f"model.attention={supported}"
            )
    if model.attention == Attention.sdpa_flash and mesh.cp > 1:
        problems.append(
            f"model.attention=sdpa_flash: parallelism.cp={mesh.cp} uses attention masks, which the flash kernel does "
            "not support; set model.attention=sdpa"
        )
    if model.attention == Attention.flex_attention and device == Device.cpu and trains:
        problems.append(NO_FLEX_BACKWARD)
    return problems


def _whole_row_problems(mesh: MeshShape, shape: ModelShape, *, packs: bool) -> list[str]:
    """Return the problems of packed rows and of cp with models that mix the tokens of a row in unknown ways."""
    if shape.other_layers:
        reason = f"the model has layers of type {', '.join(shape.other_layers)}"
    elif shape.family in _WHOLE_ROWS:
        reason = f"{shape.family} models mix tokens by functions of their own"
    else:
        return []
    problems = []
    if packs:
        problems.append(f"data.pack=true: {reason}, which would mix the documents of a row; set data.pack=false")
    if mesh.cp > 1:
        problems.append(
            f"parallelism.cp={mesh.cp}: {reason}, whose rows cannot be divided over ranks; set parallelism.cp=1"
        )
    return problems


def float8_problems(
    model: ModelConfig, parallelism: ParallelismConfig, mesh: MeshShape, device: Device, *, adapts: bool
) -> list[str]:
    """Return the problems of float8 linear layers (torchao)."""
    if model.float8 == Float8.none:
        return []
    key = f"model.float8={model.float8}"
    problems = []
    if device == Device.cpu and not model.float8_emulate:
        problems.append(
            f"{key}: CPUs have no float8 matmuls, but cluster.device=cpu; set model.float8=none "
            "(model.float8_emulate=true emulates its rounding, slowly)"
        )
    if mesh.tp > 1:
        problems.append(
            f"{key}: linear layers sharded by parallelism.tp={mesh.tp} do not run torchao's float8 matmuls; set "
            "model.float8=none, or parallelism.tp=1"
        )
    if adapts:
        problems.append(f"{key}: linear layers with adapters do not run in float8; set model.float8=none, or peft=none")
    if mesh.pp > 1 and parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            f"{key}: parallelism.pp_schedule={parallelism.pp_schedule} splits the backward, which float8 layers do "
            "not support; set model.float8=none or parallelism.pp_schedule=Interleaved1F1B"
        )
    if not problems and not model.float8_emulate and not model.compiles(parallelism, packs=True, on_gpu=True):
        reason = model.uncompiled_because(parallelism, packs=True) or f"model.compile={model.compile}"
        problems.append(
            f"{key}: scaling and casting make it slower than bfloat16 unless the layers are compiled; they are not, "
            f"because of {reason}; set model.float8=none, or let them be compiled"
        )
    return problems


def qat_problems(model: ModelConfig, parallelism: ParallelismConfig, mesh: MeshShape, *, adapts: bool) -> list[str]:
    """Return the problems of quantization-aware training (torchao)."""
    if model.qat == Qat.none:
        return []
    key, problems = f"model.qat={model.qat}", []
    if mesh.tp > 1:
        problems.append(
            f"{key}: torchao does not quantize weights sharded by parallelism.tp={mesh.tp}; set parallelism.tp=1, or "
            "model.qat=none"
        )
    if adapts:
        problems.append(f"{key}: the weights under adapters are frozen, so they cannot adapt to it; set peft=none")
    if model.float8 != Float8.none:
        problems.append(f"{key}: model.float8={model.float8} replaces the same layers; set model.float8=none")
    if mesh.pp > 1 and parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            f"{key}: parallelism.pp_schedule={parallelism.pp_schedule} splits the backward, which torchao's layers do "
            "not support; set parallelism.pp_schedule=Interleaved1F1B, or model.qat=none"
        )
    return problems


def router_problems(model: ModelConfig, shape: ModelShape, *, adapts: bool) -> list[str]:
    """Reject a change of routers' biases where there are none, or where they are frozen."""
    key, problems = f"model.router_bias_rate={model.router_bias_rate:g}", []
    if model.router_bias_rate and shape.experts == 0:
        problems.append(f"{key}: balances the experts of a mixture, and {shape.family} has none; set it to 0")
    elif model.router_bias_rate and shape.family in _UNBIASED_ROUTERS:
        problems.append(no_router_bias(model.router_bias_rate, str(shape.family)))
    if model.router_bias_rate and adapts:
        problems.append(f"{key}: the weights under adapters are frozen, and so are biases; set it to 0, or peft=none")
    return problems


def no_router_bias(rate: float, model: str) -> str:
    """Return the message for a model whose routers have no bias."""
    return (
        f"model.router_bias_rate={rate:g}: routers of {model} add no bias to the scores of experts; set it to 0, and "
        "balance experts by model.router_aux=sequence"
    )


def rope_problems(model: ModelConfig, shape: ModelShape) -> list[str]:
    """Reject scaled rotary positions for a model without any."""
    if model.rope.type is RopeType.none or shape.rotary is not False:
        return []
    return [
        f"model.rope.type={model.rope.type}: the model has no rotary position embeddings that transformers can scale; "
        "set model/rope=none, or choose another model"
    ]


def chunk_logits(memory_bytes: float) -> int:
    """Return the number of logits of a chunk of the loss on a GPU: the largest power of two that takes at most 1/36 of
    its memory with what is computed from them.

    2**27 on 80 GB, as large as matmuls need to run at full speed; larger chunks, on GPUs with more memory, add to the
    gradient of the head less often.
    """
    return int(2 ** math.floor(math.log2(memory_bytes / _CHUNK_SHARE / _CHUNK_LOGIT_BYTES)))


def vocabulary_problem(path: str, teacher: int, student: int) -> str:
    """Return the message for a teacher with a smaller vocabulary than the student's."""
    return (
        f"teacher.path={path}: the teacher's vocabulary has {teacher:,} entries, fewer than the student's "
        f"{student:,}, so some of the student's tokens have no probability under it; use a teacher with at least "
        f"{student:,} entries"
    )


def top_k_problem(top_k: int, vocabulary: int) -> str:
    """Return the message for more most likely tokens than the student's vocabulary has."""
    return (
        f"teacher.top_k={top_k}: must be at most {vocabulary:,}, the entries of the student's vocabulary; 64 usually "
        "holds most of the probability"
    )
