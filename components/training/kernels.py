"""What a run computes with, for its banner: the kernel of its attention, and what float8 changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from components.config.errors import ConfigError
from components.config.schema.model import NO_FLEX_BACKWARD, Attention, Float8
from components.config.schema.recipes import FinetuneConfig
from components.distributed.pipeline import Pipeline
from components.dtypes import torch_dtype
from components.exchange import all_gather_json
from components.models.float8 import float8_layers, without_float8
from components.training.loop import MicroBatch, StepSettings, evaluate, forward_loss


def check_kernels(
    model: Any, cfg: FinetuneConfig, micro_batches: Callable[[int], Sequence[MicroBatch]], settings: StepSettings
) -> list[str]:
    """Return how the model attends, and what float8 changes of its loss, a sentence each. Call it on all ranks.

    The kernel is the one observed in a forward of one row of the first batch, in training mode and under the run's own
    autocast; compiled layers run uncompiled in it. The gate of float8: one micro-batch of every rank is computed in
    float8 and without it. It finds wrong matmuls, and models that eight bits are too few for from the start; not errors
    that add up over many steps, and few of a model that has not learned anything yet.

    Args:
        model: What training calls, filled.
        micro_batches: Returns those of a step (0, 1, ...) of this rank.

    Raises ConfigError where the attention that was asked for has no kernel here, and where the two losses differ by
    more than `model.float8_bound`, relatively.
    """
    if cfg.model.attention == Attention.flex_attention and settings.device.type == "cpu":
        raise ConfigError(NO_FLEX_BACKWARD)
    first = micro_batches(0)[:1]
    told = [_observe_attention(model, cfg, first[0], settings)]
    if cfg.model.float8 != Float8.none:
        told.append(_compare(model, cfg, first, settings))
    return told


@torch.no_grad()
def _observe_attention(model: Any, cfg: FinetuneConfig, batch: MicroBatch, settings: StepSettings) -> str:
    from components.models.attention import (  # transformers, which only a run needs
        AttentionProbe,
        ObservedAttention,
        describe_attention,
    )

    module = _module_of(model)
    row = {name: tensor[:1] for name, tensor in batch.items()}
    devices = [settings.device] if settings.device.type == "cuda" else []
    apart = model.stages_apart() if isinstance(model, Pipeline) else nullcontext()
    refused: list[str] = []
    # Dropout may draw random numbers, of which the run takes no notice. A row by itself is a shape of its own: it is
    # not worth a compilation.
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"), apart:
        probe = AttentionProbe(flash_only=cfg.model.attention == Attention.sdpa_flash)
        try:
            with probe:
                forward_loss(model, row, settings)
        except ConfigError as error:
            if not isinstance(model, Pipeline):
                raise
            refused = error.problems
    observed = probe.observed
    if isinstance(model, Pipeline):  # layers of other stages may attend otherwise, or be refused
        mine = [{**asdict(each), "dtype": str(each.dtype).removeprefix("torch.")} for each in observed]
        stages = all_gather_json([refused, mine], model.group)
        if problems := [problem for of_stage, _ in stages for problem in of_stage]:
            raise ConfigError(list(dict.fromkeys(problems)))
        observed = [
            ObservedAttention(**{**each, "dtype": torch_dtype(each["dtype"])})
            for _, of_stage in stages
            for each in of_stage
        ]
        observed = list(dict.fromkeys(observed))
    return describe_attention(module, cfg.model, observed, cfg.data.pack)


def _module_of(model: Any) -> Any:
    """Return the transformers model within what training calls."""
    return model.module if isinstance(model, DistributedDataParallel | Pipeline) else model


def _compare(model: Any, cfg: FinetuneConfig, batch: Sequence[MicroBatch], settings: StepSettings) -> str:
    module = _module_of(model)
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
