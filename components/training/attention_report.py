"""Checks of a prepared model before its first step: the attention kernel in use, and float8's effect on the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from components.batch import Batch
from components.config.schema.model import NO_FLEX_BACKWARD, Attention, Float8, ModelConfig
from components.exchange import all_gather_json, broadcast_json, this_rank
from components.models.quantization import float8_layers, without_float8
from components.protocol.errors import ConfigError
from components.torch_kernels import torch_dtype
from components.training.evaluation import evaluate
from components.training.objectives import PLAIN, TokenObjective
from components.training.prepared import Prepared
from components.training.state import TrainState
from components.training.step import forward_loss, local_batch

if TYPE_CHECKING:
    from components.models.attention import ObservedAttention
    from components.training.run import Run


def check_kernels(
    model: Prepared,
    cfg: ModelConfig,
    micro_batches: Callable[[int], Sequence[Batch]],
    run: Run | None = None,
    objective: TokenObjective = PLAIN,
) -> list[str]:
    """Print and return the attention kernel in use, and the loss with and without float8. Call it on all ranks.

    On a GPU, the installed kernels are timed first on a call of this run, and the fastest is used from now on. A
    resumed run uses the kernel of its checkpoint instead, so that its losses stay the same to the bit. The kernel is
    observed in a forward of one row of the first batch, in training mode and under the run's autocast; compiled layers
    run uncompiled in it. With float8, one micro-batch of every rank is evaluated in float8 and without. This detects
    wrong matmuls and models that do not tolerate eight bits from the start. It cannot detect errors that accumulate
    over many steps, and detects few in a model with random weights.

    Args:
        model: The prepared model, filled with weights.
        micro_batches: Function of a step's number (0, 1, ...) that returns this rank's micro-batches.
        run: Prints the lines on rank 0 and keeps the choice in its state; None: the lines are only returned.
        objective: The loss that is compared with float8.

    Raises ConfigError if the configured attention has no kernel here, or if the two losses differ by more than
    `model.float8_bound` (relative).
    """
    if cfg.attention == Attention.flex_attention and model.settings.device.type == "cpu":
        raise ConfigError(NO_FLEX_BACKWARD)
    first = micro_batches(0)[:1]
    lines = _choose_attention(model, cfg, first[0], TrainState() if run is None else run.state)
    if cfg.float8 != Float8.none:
        lines.append(_compare(model, cfg, first, objective))
    if run is not None:
        run.print(*lines)
    return lines


def _choose_attention(model: Prepared, cfg: ModelConfig, batch: Batch, state: TrainState) -> list[str]:
    """Return the lines about attention, after all ranks use the checkpoint's kernel or the fastest on rank 0."""
    # Imports transformers, which `components.training` alone must not.
    from components.models.attention import describe_attention

    observed, first = _observe_attention(model, cfg, batch)
    lines: list[str] = []
    if cfg.attention == Attention.sdpa and _can_measure(model.settings.device):
        from components.models import attention

        choice, saved = None, state.attention_kernel
        default = next((each.kernel for each in observed if not each.masked), "")
        if saved is not None and (saved == default or attention.is_usable(saved)):
            choice = [saved, f"attention kernel: {saved}, that of the checkpoint", default]
        elif this_rank() == 0 and first is not None and not any(each.dropout for each in observed):
            rates = attention.measure_kernels(attention.observed_call(*first), default)
            choice = [*attention.choose_kernel(rates, default), default]
        choice = broadcast_json(choice)
        if choice is not None:
            chosen, line, default = choice
            lines.append(line)
            state.attention_kernel = chosen
            if chosen != default:
                attention.use_kernel(chosen)
                observed, _ = _observe_attention(model, cfg, batch)
    return [describe_attention(model.module, cfg, observed, batch.document_bounds is not None), *lines]


def _can_measure(device: torch.device) -> bool:
    """Return whether kernels may be timed: only on GPUs and without run.deterministic."""
    return device.type == "cuda" and torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled()


@torch.no_grad()
def _observe_attention(
    model: Prepared, cfg: ModelConfig, batch: Batch
) -> tuple[list[ObservedAttention], tuple[Any, Any, dict[str, Any]] | None]:
    """Return the kinds of attention calls of all stages in one row's forward, and this rank's first without a mask."""
    from components.models.attention import AttentionProbe, ObservedAttention

    settings, pipeline = model.settings, model.pipeline
    row = local_batch(batch.select_rows(slice(1)).to(settings.device), settings)
    devices = [settings.device] if settings.device.type == "cuda" else []
    stages_apart = nullcontext() if pipeline is None else pipeline.stages_apart()
    problems: list[str] = []
    # The random state is restored, as dropout may draw from it. Compilation is off: a single row has a shape that no
    # training step has, which is not worth a compilation.
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"), stages_apart:
        probe = AttentionProbe(flash_only=cfg.attention == Attention.sdpa_flash)
        try:
            with probe:
                forward_loss(model, row)
        except ConfigError as error:
            if pipeline is None:
                raise
            problems = error.problems
    observed = probe.observed
    if pipeline is not None:  # layers of other stages may use another kernel, or have none
        local = [{**asdict(each), "dtype": str(each.dtype).removeprefix("torch.")} for each in observed]
        stages = all_gather_json([problems, local], pipeline.group)
        if problems := [problem for of_stage, _ in stages for problem in of_stage]:
            raise ConfigError(list(dict.fromkeys(problems)))
        observed = [
            ObservedAttention(**{**each, "dtype": torch_dtype(each["dtype"])})
            for _, of_stage in stages
            for each in of_stage
        ]
        observed = list(dict.fromkeys(observed))
    return observed, probe.first


def _compare(model: Prepared, cfg: ModelConfig, batch: Sequence[Batch], objective: TokenObjective) -> str:
    with without_float8(model.module):
        plain = evaluate(model, batch, objective).loss
    float8 = evaluate(model, batch, objective)
    in_float8, units = float8.loss, f"{float8.count:,} {float8.unit}s"
    difference = abs(in_float8 - plain) / plain
    losses = f"{in_float8:.4f} in float8 and {plain:.4f} without over {units}, {difference:.2%} apart"
    key = f"model.float8={cfg.float8}"
    if not difference <= cfg.float8_bound:
        alternative = "model.float8=rowwise, " if cfg.float8 == Float8.tensorwise else ""
        raise ConfigError(
            f"{key}: the loss is {losses}, more than model.float8_bound={cfg.float8_bound:g}; set {alternative}"
            "model.float8=none, or a larger model.float8_bound"
        )
    emulated = ", emulated" if cfg.float8_emulate else ""
    return f"float8: {cfg.float8}{emulated}, {len(float8_layers(model.module))} linear layers; the loss is {losses}"
