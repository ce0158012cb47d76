"""What a run computes with, as it is told at its start: the kernel of its attention, and what float8 changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from components.config.errors import ConfigError
from components.config.schema.model import Float8
from components.config.schema.recipes import FinetuneConfig
from components.models.float8 import float8_layers, without_float8
from components.training.loop import MicroBatch, StepSettings, evaluate
from components.training.precision import compute_dtype


def check_kernels(
    model: Any, cfg: FinetuneConfig, micro_batches: Callable[[int], Sequence[MicroBatch]], settings: StepSettings
) -> list[str]:
    """Return what the model attends by, and what float8 changes of its loss, a sentence each. Call it on all ranks.

    The gate of float8: one micro-batch of every rank is computed in float8 and without it. It finds products that are
    wrong, and models that eight bits are too few for from the start; not what adds up over many steps, and little of a
    model that has not learnt anything yet.

    Args:
        model: What training calls, filled.
        micro_batches: Returns those of a step (0, 1, ...) of this rank.

    Raises ConfigError where the attention that was asked for has no kernel here, and where the two losses differ by
    more than `model.float8_bound`, relatively.
    """
    from components.models.attention import attention_kernel  # transformers, which only a run needs

    dtype, _ = compute_dtype(cfg.model, settings.device)
    told = [attention_kernel(getattr(model, "module", model), cfg.model, dtype, settings.device, cfg.data.pack)]
    if cfg.model.float8 != Float8.none:
        told.append(_compare(model, cfg, micro_batches(0)[:1], settings))
    return told


def _compare(model: Any, cfg: FinetuneConfig, batch: Sequence[MicroBatch], settings: StepSettings) -> str:
    module: nn.Module = getattr(model, "module", model)
    with without_float8(module):
        plain, _ = evaluate(model, batch, settings)
    rounded, tokens = evaluate(model, batch, settings)
    apart = abs(rounded - plain) / plain
    losses = f"{rounded:.4f} in float8 and {plain:.4f} without over {tokens:,} target tokens, {apart:.2%} apart"
    key = f"model.float8={cfg.model.float8}"
    if not apart <= cfg.model.float8_bound:
        other = "model.float8=rowwise, " if cfg.model.float8 == Float8.tensorwise else ""
        raise ConfigError(
            f"{key}: the loss is {losses}, more than model.float8_bound={cfg.model.float8_bound:g}; set {other}"
            "model.float8=none, or a larger model.float8_bound"
        )
    emulated = ", emulated" if cfg.model.float8_emulate else ""
    return f"float8: {cfg.model.float8}{emulated}, {len(float8_layers(module))} linear layers; the loss is {losses}"
