"""One optimizer step.

The loss of a step is the sum of its losses divided by the number of its units (target tokens, pairs), both summed over
all micro-batches and ranks. The count is reduced before the first forward, every strategy sums gradients, and nothing
is averaged over ranks, so the same samples give the same loss curve on every mesh. The routers' auxiliary loss
(setup/router_loss.py) is summed and divided in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.batch import Batch
from components.checkpoint.tensors import Optimizers, list_optimizers
from components.distributed.pipeline.schedule import Pipeline, pad_to_longest
from components.training.forward import head_keywords, local_batch, training_loss, weigh_rows
from components.training.loss import all_ranks, count_inputs, count_targets, reduce_loss, sum_over_ranks
from components.training.objectives import PLAIN, TokenObjective, row_objective
from components.training.optimizers.gradients import clip_gradients, equalize_replicas, gradient_norm
from components.training.optimizers.optim import step_if_finite
from components.training.setup.prepared import Prepared
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
    local_batches = [local_batch(batch, settings, settings.router_loss) for batch in device_batches]
    seconds = torch.tensor([seconds_at_peak], dtype=torch.float64).to(settings.device, non_blocking=True)
    # units, targets, tokens, seconds at peak
    totals = sum_over_ranks(torch.cat([torch.stack([local_count, local_targets, local_tokens]), seconds]))
    units, targets = totals[0].clamp(min=1), totals[1].clamp(min=1)

    local_batches = objective.token_loss.with_token_values(model, local_batches)
    measured, row_loss = None, None
    if rows is not None:
        local_batches, scores, weighted = weigh_rows(model, local_batches, rows)
        row_loss = weighted.loss_sum
        measured = torch.stack(
            [scores.lengths[:: weighted.every].sum(), *(weighted.metrics[name] for name in objective.metrics)]
        )
        measured = sum_over_ranks(measured * settings.counts_rows)
        targets = measured[0].clamp(min=1)
    if settings.router_loss is not None:
        settings.router_loss.start_step(targets)  # per target token, whatever the units of the objective
    if pipeline is not None:
        loss_sum = _through_pipeline(pipeline, model, local_batches, objective, units)
    else:
        loss_sum = _forward_backward(model, local_batches, objective, units)

    optimizers = list_optimizers(optimizer)
    parameters = [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]
    equalize_replicas(parameters)
    norm = gradient_norm(parameters, None if pipeline is None else pipeline.group)
    clip_gradients(parameters, norm, settings.max_grad_norm)
    for each in optimizers:
        skipped = step_if_finite(each, norm)
        each.zero_grad(set_to_none=True)
    if model.average is not None:
        model.average.update(skipped)

    # Row losses are complete on every cp rank, so one of them counts; token losses are local to each cp rank.
    losses = [loss_sum * settings.counts_tokens if row_loss is None else row_loss * settings.counts_rows]
    if settings.router_loss is not None:
        losses.append(settings.router_loss.step_sum() * (units / targets))
    loss, _ = reduce_loss(losses, local_count, dp_group=all_ranks(), check_finite=False)
    # A device reads the requests here, not when the host queues this copy: a signal counts in the step it arrives in.
    ended = [totals.new_zeros(3) if requests is None else requests.to(settings.device, non_blocking=True)]
    if rows is None:
        token_sums = objective.token_loss.take_sums(len(objective.metrics))
        ended.append(token_sums.to(settings.device, non_blocking=True) * settings.counts_tokens)
    flags, metrics = sum_over_ranks(torch.cat(ended)).tensor_split((3,))
    norm, skipped = (each.to(settings.device, torch.float64, non_blocking=True)[None] for each in (norm, skipped))
    tokens = totals[2:3]
    if measured is not None:
        tokens, metrics = measured[:1], measured[1:]
    vector = torch.cat([loss / units, norm, tokens, skipped, flags, totals[3:], metrics / units])
    return StepNumbers(vector, (*FIELDS, *objective.metrics))


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
    return pipeline.forward_backward(batches, None, head_keywords(max_targets, objective.token_loss), units)
