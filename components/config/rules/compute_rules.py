"""Rules about how layers and the loss are computed."""

from __future__ import annotations

from components.config.schema.cluster import Device
from components.config.schema.model import NO_FLEX_BACKWARD, Attention, DType, Float8, LossMethod, ModelConfig
from components.config.schema.parallelism import SPLIT_BACKWARD, ActivationCheckpointing, MeshShape, ParallelismConfig
from components.config.shape import ModelShape


def compile_problems(
    model: ModelConfig, parallelism: ParallelismConfig, mesh: MeshShape, shape: ModelShape
) -> list[str]:
    """Return why the layers cannot be compiled."""
    if not model.compile:
        return []
    problems = []
    if mesh.pp > 1 and parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            f"parallelism.pp_schedule={parallelism.pp_schedule}: splits the backward, which compiled layers do in "
            "one piece; set model.compile=false or parallelism.pp_schedule=Interleaved1F1B"
        )
    if shape.experts and mesh.ep == 1 and DType.float64 in (model.dtype, model.compute_dtype):
        problems.append(
            "model.compile=true: experts in float64 are computed in a loop over those that got tokens, which cannot be "
            "compiled; set model.compile=false, or model.dtype=float32"
        )
    return problems


def loss_problems(model: ModelConfig, parallelism: ParallelismConfig, mesh: MeshShape, device: Device) -> list[str]:
    """Return why the requested kernel cannot compute the loss."""
    if model.loss != LossMethod.liger:
        return []
    problems = []
    if device == Device.cpu:
        problems.append(
            "model.loss=liger: liger-kernel computes on GPUs only, and cluster.device=cpu; set model.loss=chunked"
        )
    if mesh.tp > 1:
        problems.append(
            f"model.loss=liger: liger-kernel needs the whole vocabulary, and parallelism.tp={mesh.tp} shares it out; "
            "set model.loss=chunked"
        )
    if mesh.pp > 1 and parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            f"model.loss=liger: parallelism.pp_schedule={parallelism.pp_schedule} asks for gradients twice, and "
            "liger-kernel gives them once; set model.loss=chunked"
        )
    return problems


def recompute_problems(model: ModelConfig, parallelism: ParallelismConfig, mesh: MeshShape) -> list[str]:
    """Return why selective recompute is impossible: it needs a layer's backward in one piece, and not compiled."""
    if parallelism.activation_checkpointing != ActivationCheckpointing.selective:
        return []
    problems = []
    if model.compile:
        problems.append(
            "parallelism.activation_checkpointing=selective: a compiled layer is recomputed as a whole (by itself it "
            "keeps what is dear to recompute); set it to none, full or alternate, or model.compile=false"
        )
    if mesh.pp > 1 and parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            "parallelism.activation_checkpointing=selective: needs the backward of a layer in one piece, which "
            f"parallelism.pp_schedule={parallelism.pp_schedule} splits; set full, or "
            "parallelism.pp_schedule=Interleaved1F1B"
        )
    return problems


def attention_problems(model: ModelConfig, mesh: MeshShape, device: Device, *, packs: bool, trains: bool) -> list[str]:
    """Return why the requested attention cannot do what the run needs: packed rows, cp, a backward."""
    problems = []
    if packs and model.attention not in (Attention.sdpa, Attention.sdpa_flash):
        problems.append(
            f"model.attention={model.attention}: does not receive the document bounds of packed rows; set "
            "model.attention=sdpa or data.pack=false"
        )
    if model.attention == Attention.sdpa_flash and mesh.cp > 1:
        problems.append(
            f"model.attention=sdpa_flash: parallelism.cp={mesh.cp} attends to masks of its own, which the flash kernel "
            "does not take; set model.attention=sdpa"
        )
    if model.attention == Attention.flex_attention and device == Device.cpu and trains:
        problems.append(NO_FLEX_BACKWARD)
    return problems


def float8_problems(
    model: ModelConfig, parallelism: ParallelismConfig, mesh: MeshShape, device: Device, *, adapts: bool
) -> list[str]:
    """Return why linear layers cannot be computed in float8 by torchao's modules."""
    if model.float8 == Float8.none:
        return []
    key = f"model.float8={model.float8}"
    problems = []
    if device == Device.cpu and not model.float8_emulate:
        problems.append(
            f"{key}: CPUs have no float8 products, and cluster.device=cpu; set model.float8=none "
            "(model.float8_emulate=true shows its rounding, slowly)"
        )
    if mesh.tp > 1:
        problems.append(
            f"{key}: layers that parallelism.tp={mesh.tp} divides are computed from their weights alone; set "
            "model.float8=none, or parallelism.tp=1"
        )
    if adapts:
        problems.append(f"{key}: layers with adapters are not computed in float8; set model.float8=none, or peft=none")
    if mesh.pp > 1 and parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            f"{key}: parallelism.pp_schedule={parallelism.pp_schedule} splits the backward, which float8 layers do "
            "in one piece; set model.float8=none or parallelism.pp_schedule=Interleaved1F1B"
        )
    return problems
