"""Checks of a prepared model before its first step: its attention kernel, and what float8 changes of its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Protocol

import torch

from components.batch import Batch
from components.config.errors import ConfigError
from components.config.schema.model import NO_FLEX_BACKWARD, Attention, Float8, ModelConfig
from components.dtypes import torch_dtype
from components.exchange import all_gather_json
from components.models.float8 import float8_layers, without_float8
from components.training.evaluation import evaluate
from components.training.forward import forward_loss, local_part
from components.training.setup.prepared import Prepared


class Says(Protocol):
    """What `check_kernels` takes of a run."""

    def say(self, *lines: str) -> None:
        """Print lines on rank 0."""


def check_kernels(
    model: Prepared, cfg: ModelConfig, micro_batches: Callable[[int], Sequence[Batch]], run: Says | None = None
) -> list[str]:
    """Print and return how the model attends, and what float8 changes of its loss. Call it on all ranks.

    The kernel is the one observed in a forward of one row of the first batch, in training mode and under the run's own
    autocast; compiled layers run uncompiled in it. The gate of float8: one micro-batch of every rank is computed in
    float8 and without it. It finds wrong matmuls, and models that eight bits are too few for from the start; not errors
    that add up over many steps, and few of a model that has not learned anything yet.

    Args:
        model: With its weights.
        micro_batches: Returns those of a step (0, 1, ...) of this rank.
        run: Prints the sentences; None: they are only returned.

    Raises ConfigError where the attention that was asked for has no kernel here, and where the two losses differ by
    more than `model.float8_bound`, relatively.
    """
    if cfg.attention == Attention.flex_attention and model.settings.device.type == "cpu":
        raise ConfigError(NO_FLEX_BACKWARD)
    first = micro_batches(0)[:1]
    found = [_observe_attention(model, cfg, first[0])]
    if cfg.float8 != Float8.none:
        found.append(_compare(model, cfg, first))
    if run is not None:
        run.say(*found)
    return found


@torch.no_grad()
def _observe_attention(model: Prepared, cfg: ModelConfig, batch: Batch) -> str:
    from components.models.attention import (  # transformers, which only a run needs
        AttentionProbe,
        ObservedAttention,
        describe_attention,
    )

    settings, pipeline = model.settings, model.pipeline
    row = local_part(batch.first_rows(1).to(settings.device), settings)
    devices = [settings.device] if settings.device.type == "cuda" else []
    apart = nullcontext() if pipeline is None else pipeline.stages_apart()
    refused: list[str] = []
    # Dropout may draw random numbers, of which the run takes no notice. A row by itself is a shape of its own: it is
    # not worth a compilation.
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"), apart:
        probe = AttentionProbe(flash_only=cfg.attention == Attention.sdpa_flash)
        try:
            with probe:
                forward_loss(model, row)
        except ConfigError as error:
            if pipeline is None:
                raise
            refused = error.problems
    observed = probe.observed
    if pipeline is not None:  # layers of other stages may attend otherwise, or be refused
        mine = [{**asdict(each), "dtype": str(each.dtype).removeprefix("torch.")} for each in observed]
        stages = all_gather_json([refused, mine], pipeline.group)
        if problems := [problem for of_stage, _ in stages for problem in of_stage]:
            raise ConfigError(list(dict.fromkeys(problems)))
        observed = [
            ObservedAttention(**{**each, "dtype": torch_dtype(each["dtype"])})
            for _, of_stage in stages
            for each in of_stage
        ]
        observed = list(dict.fromkeys(observed))
    return describe_attention(model.module, cfg, observed, batch.document_bounds is not None)


def _compare(model: Prepared, cfg: ModelConfig, batch: Sequence[Batch]) -> str:
    with without_float8(model.module):
        plain = evaluate(model, batch).loss
    in_float8 = evaluate(model, batch)
    rounded, tokens = in_float8.loss, in_float8.count
    apart = abs(rounded - plain) / plain
    losses = f"{rounded:.4f} in float8 and {plain:.4f} without over {tokens:,} target tokens, {apart:.2%} apart"
    key = f"model.float8={cfg.float8}"
    if not apart <= cfg.float8_bound:
        other = "model.float8=rowwise, " if cfg.float8 == Float8.tensorwise else ""
        raise ConfigError(
            f"{key}: the loss is {losses}, more than model.float8_bound={cfg.float8_bound:g}; set {other}"
            "model.float8=none, or a larger model.float8_bound"
        )
    emulated = ", emulated" if cfg.float8_emulate else ""
    return f"float8: {cfg.float8}{emulated}, {len(float8_layers(model.module))} linear layers; the loss is {losses}"
