"""One optimizer step, and the forward of a micro-batch in training and evaluation.

The loss of a step is the sum of its losses divided by the number of its units (target tokens, pairs), both summed over
all micro-batches and ranks. The count is reduced before the first forward, every strategy sums gradients, and nothing
is averaged over ranks, so the same samples give the same loss curve on every mesh. The routers' auxiliary loss
(routers.py) is summed and divided in the same way. Row-weighted objectives (DPO) score their rows in a forward of
their own first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from components.batch import Batch
from components.checkpoint.tensors import Optimizers, list_optimizers
from components.config.schema.data import IGNORED
from components.distributed.pipeline_schedule import Pipeline, pad_to_longest
from components.distributed.row_shards import shard_rows
from components.training.loss import all_ranks, count_inputs, count_targets, reduce_loss, sum_over_ranks
from components.training.objectives import (
    PLAIN,
    HeadOutput,
    RowObjective,
    RowScores,
    RowWeights,
    TokenLoss,
    TokenObjective,
    row_objective,
)
from components.training.optimizers.gradients import clip_gradients, equalize_replicas, gradient_norm, step_if_finite
from components.training.prepared import Prepared, StepSettings
from components.training.routers import SEQUENCE_WEIGHTS, sequence_weights
from components.training.state import FIELDS, StepNumbers
from components.training.sync import get_sync_ctx


def train_step(
    model: Prepared,
    batches: Sequence[Batch],
    optimizer: Optimizers,
    objective: TokenObjective = PLAIN,
    requests: torch.Tensor | None = None,
) -> StepNumbers:
    """Do one optimizer step over the micro-batches of this rank; the host never waits for the device.

    Args:
        batches: Micro-batches (micro_batch, seq), the same number on every rank.
        optimizer: One optimizer, or several by name, which share one gradient norm and one decision to skip the update.
        objective: The loss function, perhaps a `RowObjective`; by default the cross-entropy of the next token.
        requests: This rank's (preempt, interrupt, save) requests, 0 or 1, in host memory, read at the end of the step:
            float64, pinned for a GPU; None: none. The result holds their sums over all ranks.
    """
    settings, pipeline, rows = model.settings, model.pipeline, row_objective(objective)
    seconds_at_peak = 0.0 if settings.flops is None else settings.flops.seconds_at_peak(batches)
    if pipeline is not None and batches[0].document_bounds is None:
        batches = pad_to_longest(batches)
    device_batches = [batch.to(settings.device) for batch in batches]
    local_count = torch.stack([objective.count(batch) for batch in device_batches]).sum() * settings.counts_rows
    local_targets = torch.stack([count_targets(batch.targets) for batch in device_batches]).sum() * settings.counts_rows
    local_tokens = local_targets
    if settings.counts_inputs:
        local_tokens = torch.stack([count_inputs(each.targets) for each in device_batches]).sum() * settings.counts_rows
    local_batches = [local_batch(batch, settings, training=True) for batch in device_batches]
    seconds = torch.tensor([seconds_at_peak], dtype=torch.float64).to(settings.device, non_blocking=True)
    # units, targets, tokens, seconds at peak
    totals = sum_over_ranks(torch.cat([torch.stack([local_count, local_targets, local_tokens]), seconds]))
    units, targets = totals[0].clamp(min=1), totals[1].clamp(min=1)

    local_batches = objective.token_loss.with_token_values(model, local_batches)
    measured, row_loss = None, None
    if rows is not None:
        local_batches, scores, weighted = _weigh_rows(model, local_batches, rows)
        row_loss = weighted.loss_sum
        measured = torch.stack(
            [scores.lengths[:: weighted.every].sum(), *(weighted.metrics[name] for name in objective.metrics)]
        )
        measured = sum_over_ranks(measured * settings.counts_rows)
        targets = measured[0].clamp(min=1)
    routers = settings.routers
    if routers is not None:
        routers.start_step(targets)  # per target token, whatever the units of the objective
    if pipeline is not None:
        loss_sum = _through_pipeline(pipeline, model, local_batches, objective, units)
    else:
        loss_sum = _forward_backward(model, local_batches, objective, units)

    # Row losses are complete on every cp rank, so one of them counts; token losses are local to each cp rank.
    losses = [loss_sum * settings.counts_tokens if row_loss is None else row_loss * settings.counts_rows]
    if routers is not None:
        losses.append(routers.step_sum() * (units / targets))
    loss, _ = reduce_loss(losses, local_count, dp_group=all_ranks(), check_finite=False)
    norm, skipped = _update(model, list_optimizers(optimizer), loss / units)
    # A device reads the requests here, not when the host queues this copy: a signal counts in the step it arrives in.
    ended = [totals.new_zeros(3) if requests is None else requests.to(settings.device, non_blocking=True)]
    if rows is None:
        token_sums = objective.token_loss.take_sums(len(objective.metrics))
        ended.append(token_sums.to(settings.device, non_blocking=True) * settings.counts_tokens)
    ended += [] if routers is None else [routers.step_loads()]
    parts = (3, 3 + len(objective.metrics) * (rows is None))
    flags, metrics, loads = sum_over_ranks(torch.cat(ended)).tensor_split(parts)
    tokens, metrics = (totals[2:3], metrics) if measured is None else (measured[:1], measured[1:])
    metrics = metrics / (targets if objective.metrics_per_target else units)
    vector = torch.cat([loss / units, norm, tokens, skipped, flags, totals[3:], metrics])
    step = StepNumbers(vector, (*FIELDS, *objective.metrics))
    return step if routers is None else routers.end_step(step, loads)


def _update(
    model: Prepared, optimizers: Sequence[torch.optim.Optimizer], loss: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip the gradients and update the weights and their average, unless the step is skipped. A collective.

    Args:
        loss: Loss of the step, the same on every rank, (1,) float64.

    Returns:
        The norm of the gradients, and 0 for an update, 1 if it was skipped since the norm is not finite, 2 for a spike;
        each (1,) float64.
    """
    settings, pipeline = model.settings, model.pipeline
    parameters = [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]
    equalize_replicas(parameters)
    norm = gradient_norm(parameters, None if pipeline is None else pipeline.group)
    clip_gradients(parameters, norm, settings.max_grad_norm)
    norms = norm.to(settings.device, torch.float64, non_blocking=True)[None]
    is_spike: torch.Tensor | None = None
    if settings.spikes is not None:
        # The mean over ranks, since a difference in the last bit must not let them decide differently.
        ranks = dist.get_world_size(group) if (group := all_ranks()) is not None else 1
        is_spike = settings.spikes.add(sum_over_ranks(torch.cat([loss, norms]) / ranks)).to(norm.device)
    for each in optimizers:
        skipped = step_if_finite(each, norm, is_spike)
        each.zero_grad(set_to_none=True)
    if model.average is not None:
        model.average.update(skipped)
    kind = skipped if is_spike is None else skipped * (1 + is_spike)
    return norms, kind.to(settings.device, torch.float64, non_blocking=True)[None]


def _forward_backward(
    model: Prepared, batches: list[Batch], objective: TokenObjective, units: torch.Tensor
) -> torch.Tensor:
    """Accumulate the gradients of all micro-batches; return the sum of this rank's token losses in float64."""
    settings = model.settings
    loss_sum = torch.zeros((), dtype=torch.float64, device=settings.device)
    for index, batch in enumerate(batches):
        with get_sync_ctx(model.called, index == len(batches) - 1, settings.defer_grad_sync):
            loss = training_loss(model, batch, objective.token_loss)
            (loss / units.to(loss.dtype)).backward()
        loss_sum += loss.detach()
    return loss_sum


def _through_pipeline(
    pipeline: Pipeline, model: Prepared, batches: list[Batch], objective: TokenObjective, units: torch.Tensor
) -> torch.Tensor:
    """Accumulate gradients by the pipeline schedule; return the sum of this rank's token losses."""
    if not model.settings.takes_targets:
        return pipeline.forward_backward(
            batches,
            lambda logits, batch: objective.token_loss.of_logits(logits, batch.targets, batch.token_weights),
            {},
            units,
        )
    counts = [batch.target_count for batch in batches]
    max_targets = None if None in counts else max(filter(None, counts), default=0)
    return pipeline.forward_backward(batches, None, _head_keywords(max_targets, objective.token_loss), units)


def local_batch(batch: Batch, settings: StepSettings, *, training: bool = False) -> Batch:
    """Return this rank's shard of a micro-batch: under cp a shard of each row, else the batch itself.

    Args:
        batch: Unsharded rows, on the device.
        training: Include the layer inputs of training: sequence weights for routers, and keys of the noise.
    """
    if training and settings.noise is not None:
        batch = settings.noise.with_keys(batch, predicts_next=not settings.counts_inputs)
    if training and settings.routers is not None:
        weights = sequence_weights(batch.targets, batch.document_bounds)
        batch = replace(batch, layer_inputs={**batch.layer_inputs, SEQUENCE_WEIGHTS: weights})
    return shard_rows(batch, settings.mesh)


def forward_loss(model: Prepared, batch: Batch, token_loss: TokenLoss = PLAIN.token_loss) -> torch.Tensor:
    """Return the sum of this rank's token losses of a micro-batch, for evaluation.

    The forward of a sharded model is a collective: call it on all ranks. Pipeline ranks without the last stage return
    zero.

    Args:
        batch: This rank's shard, from `local_batch`.
    """
    output = _forward(model, batch, token_loss, HeadOutput.loss_sum)
    if output is None:
        return torch.zeros((), dtype=torch.float64, device=model.settings.device)
    return output


def training_loss(model: Prepared, batch: Batch, token_loss: TokenLoss) -> torch.Tensor:
    """Return the sum of this rank's token losses of a micro-batch, with its autograd graph. Not for pipelines."""
    # No attention mask is passed: rows are padded on the right, so under causal attention no real token attends to
    # padding. Building a mask would also make the host wait for the device.
    inputs, settings = batch.model_inputs(), model.settings
    with autocast(settings):
        if settings.takes_targets:
            head_kwargs = _head_keywords(batch.target_count, token_loss)
            return model.called(**inputs, **batch.head_inputs(), **head_kwargs, use_cache=False)
        logits = model.called(**inputs, use_cache=False).logits
    return token_loss.of_logits(logits, batch.targets, batch.token_weights)


@torch.no_grad()
def score_rows(model: Prepared, batches: Sequence[Batch], token_loss: TokenLoss = PLAIN.token_loss) -> RowScores:
    """Return the summed log-probability of the targets of each row, or of each packed sequence. A collective.

    Under pp, ranks without the last stage return zeros.

    Args:
        batches: This rank's shards, from `local_batch`.
        token_loss: Negative log-probability of a target.
    """
    log_probs, lengths = [], []
    for batch in batches:
        plain = replace(batch, layer_inputs={}, token_weights=None)
        losses = _forward(model, plain, token_loss, HeadOutput.token_losses)
        if losses is None:
            losses = torch.zeros(batch.targets.shape, dtype=torch.float64, device=model.settings.device)
        log_probs.append(-batch.sum_sequences(losses))
        lengths.append(batch.sum_sequences(batch.targets != IGNORED))
    sums = torch.stack([torch.cat(log_probs), torch.cat(lengths)])  # (2, sequences)
    mesh = model.settings.mesh
    if mesh is not None and mesh.size("cp") > 1:
        dist.all_reduce(sums, group=mesh["cp"].get_group())
    return RowScores(sums[0], sums[1], Batch.joined_rows(batches))


@torch.no_grad()
def score_tokens(model: Prepared, batch: Batch, token_loss: TokenLoss) -> torch.Tensor | None:
    """Return the loss of each token of a micro-batch, (batch, seq); 0 where the target is ignored. A collective.

    Pipeline ranks without the last stage return None.

    Args:
        batch: This rank's shard, from `local_batch`.
    """
    return _forward(model, batch, token_loss, HeadOutput.token_losses)


@torch.no_grad()
def last_hidden(model: Prepared, batch: Batch) -> torch.Tensor | None:
    """Return the hidden states (batch, seq, hidden) that enter the LM head, unsharded over tp. A collective.

    For models with a loss head. Pipeline ranks without the last stage return None.

    Args:
        batch: This rank's shard, from `local_batch`.
    """
    keywords = _head_keywords(None, PLAIN.token_loss, HeadOutput.hidden_states)
    plain = replace(batch, layer_inputs={}, token_weights=None, token_values={})
    if model.pipeline is not None:
        hidden: Any = model.pipeline.forward(plain, keywords)
    else:
        with autocast(model.settings):
            hidden = model.module(**plain.model_inputs(), **plain.head_inputs(), **keywords, use_cache=False)
    return hidden.to_local() if isinstance(hidden, DTensor) else hidden


def _weigh_rows(
    model: Prepared, batches: Sequence[Batch], objective: RowObjective
) -> tuple[list[Batch], RowScores, RowWeights]:
    """Score the rows of a step, and return the micro-batches with token weights, the scores, and the row weights.

    A collective.
    """
    scores = score_for(model, batches, objective)
    row_weights = weights_of_rows(model, scores, objective)
    factors = row_weights.factors.split([batch.shape[0] * batch.sequences for batch in batches])
    weighted = [
        _trained_part(replace(batch, token_weights=batch.spread_sequences(factor)), row_weights.every)
        for batch, factor in zip(batches, factors, strict=True)
    ]
    return weighted, scores, row_weights


def _trained_part(batch: Batch, every: int) -> Batch:
    """Leave out the sequences that are not trained on: rows, or the targets of sequences within rows."""
    if batch.sequence_ids is None or every == 1:
        return batch.select_rows(slice(None, None, every))
    trained = batch.sequence_ids % every == 0  # (rows, seq)
    layer_inputs = dict(batch.layer_inputs)
    if (weights := layer_inputs.get(SEQUENCE_WEIGHTS)) is not None:  # the routers' loss: number of targets, sequence
        layer_inputs[SEQUENCE_WEIGHTS] = torch.stack([weights[..., 0] * trained, weights[..., 1]], dim=-1)
    return replace(batch, targets=batch.targets.where(trained, IGNORED), layer_inputs=layer_inputs)


def score_for(model: Prepared, batches: Sequence[Batch], objective: RowObjective) -> RowScores:
    """Return the scores of the rows of micro-batches, with the values that the objective adds. A collective."""
    scores = score_rows(model, batches, objective.token_loss)
    return replace(scores, values={**scores.values, **objective.row_values(model, batches)})


def weights_of_rows(model: Prepared, scores: RowScores, objective: RowObjective) -> RowWeights:
    """Return the objective's row weights, with its statistics over the rows of all ranks. A collective."""
    sums = objective.step_sums(scores)
    return objective.weights(scores, None if sums is None else sum_over_ranks(sums * model.settings.counts_rows))


def _head_keywords(
    target_count: int | None, token_loss: TokenLoss, output: HeadOutput = HeadOutput.loss_sum
) -> dict[str, Any]:
    """Return the keyword arguments that a model with a loss head takes besides `Batch.head_inputs`."""
    return {"target_count": target_count, "token_loss": token_loss, "output": output}


def autocast(settings: StepSettings) -> AbstractContextManager[None]:
    """Return the autocast context of a forward; a null context where FSDP2 sets the compute dtype."""
    if settings.autocast is None:
        return nullcontext()
    return torch.autocast(settings.device.type, dtype=settings.autocast)


def _forward(model: Prepared, batch: Batch, token_loss: TokenLoss, returned: HeadOutput) -> torch.Tensor | None:
    """Return the sum of token losses, or the losses (batch, seq); None on pipeline ranks without the last stage."""
    settings, pipeline = model.settings, model.pipeline
    head_kwargs = None
    if settings.takes_targets:
        head_kwargs = _head_keywords(batch.target_count, token_loss, returned)
    if pipeline is not None:
        output: Any = pipeline.forward(batch, head_kwargs)
        if output is None:
            return None
    else:
        targets = {} if head_kwargs is None else batch.head_inputs() | head_kwargs
        with autocast(settings):
            output = model.module(**batch.model_inputs(), **targets, use_cache=False)
            output = output if settings.takes_targets else output.logits
    if settings.takes_targets:
        return output
    if returned == HeadOutput.token_losses:
        return token_loss.per_token(output, batch.targets)
    return token_loss.of_logits(output, batch.targets, batch.token_weights)
