"""What a dry run changes in a config, and the configs that it refuses; imports no torch."""

from __future__ import annotations

from dataclasses import replace

from components.config.micro_batches import fit_micro_batches
from components.config.schema.checks import raise_all
from components.config.schema.model import Attention, DType, Float8, Fused, LossMethod, Qat
from components.config.schema.optimizer import AdamW8bitConfig
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.recipes import DistillConfig, TrainConfig

PLAYED_ATTENTION = (Attention.sdpa, Attention.sdpa_flash, Attention.eager)
DOCUMENTS = 8
"""Documents of a packed row, all of one length. Their number affects the size of attention masks only."""

STORED_TOKENS = 64
"""Tokens per target of a stored teacher, the default of scripts/teacher.py."""


def played_config(cfg: TrainConfig, world: int, on_gpu: bool) -> tuple[TrainConfig, list[str]]:
    """Return the config that a dry run plays instead of `cfg`, and notes on the differences.

    Args:
        world: Number of ranks.
        on_gpu: Whether the ranks run on GPUs.

    Raises ConfigError with all parts of the config that cannot be played.
    """
    raise_all(_problems(cfg))
    cfg = fit_micro_batches(cfg, world)
    model, notes = cfg.model, []
    if on_gpu:
        notes.append("without what a GPU adds: rounding by the allocator, buffers of NCCL, workspaces of kernels")
    else:
        notes.append("with the copies that gloo makes in all-gathers and reduce-scatters")
    compiles = model.compiles(cfg.parallelism, packs=cfg.data.pack, on_gpu=on_gpu)
    if compiles:
        notes.append(f"model.compile={model.compile}: played without compilation, which saves fewer activations")
    if model.loss is LossMethod.liger:
        model = replace(model, loss=LossMethod.chunked)
        notes.append("model.loss=liger: played as chunked")
    if on_gpu and model.compute_dtype is DType.auto and model.dtype is not DType.float64:
        model = replace(model, compute_dtype=DType.bfloat16)
        notes.append("model.compute_dtype=auto: bfloat16")
    dtype = model.stored_dtype(frozen_on_gpu=on_gpu and cfg.peft.adapts)
    # Compiled layers store no more activations than fused ones.
    fuses = compiles or model.fuses(cfg.parallelism, packs=cfg.data.pack, on_gpu=on_gpu)
    model = replace(model, dtype=dtype, compile="false", fused=Fused.all if fuses else Fused.none)
    if cfg.parallelism.ep > 1:
        notes.append("routing is balanced: every expert gets as many tokens")
    if cfg.data.pack:
        notes.append(f"data.pack=true: rows of {DOCUMENTS} documents")
    if isinstance(cfg, DistillConfig) and cfg.teacher.path is None:
        notes.append(f"teacher.stored: {STORED_TOKENS} tokens per target")
    if isinstance(cfg.optimizer, AdamW8bitConfig):
        notes.append(f"optimizer={cfg.optimizer.kind}: its update is played without compilation, with more temporaries")
    if cfg.parallelism.cpu_offload and on_gpu:
        notes.append("parallelism.cpu_offload=true: parameters and optimizer state are not in the peak; gradients are")
    parallelism = replace(cfg.parallelism, activation_offload=False)
    if cfg.parallelism.activation_offload:
        notes.append("parallelism.activation_offload=true: played without, so activations are in the peak")
    training = replace(cfg.training, batch_size_ramp=[], seq_len_ramp=[])
    logging = replace(cfg.logging, peak_tflops=None)
    return replace(cfg, model=model, parallelism=parallelism, training=training, logging=logging), notes


def _problems(cfg: TrainConfig) -> list[str]:
    model, policy = cfg.model, cfg.parallelism.activation_checkpointing
    problems = []
    if policy is ActivationCheckpointing.auto:
        problems.append(
            f"parallelism.activation_checkpointing={policy}: depends on the device's memory, so a dry run needs the "
            "policy itself; set it to none, selective, full or alternate"
        )
    if model.attention not in PLAYED_ATTENTION:
        problems.append(
            f"model.attention={model.attention}: its kernels need a GPU, which a dry run does not use; set "
            "model.attention=sdpa"
        )
    if model.float8 is not Float8.none:
        problems.append(f"model.float8={model.float8}: a dry run has no float8 GEMM to play; set model.float8=none")
    if model.qat is not Qat.none:
        problems.append(f"model.qat={model.qat}: a dry run does not play fake quantization; set model.qat=none")
    return problems
