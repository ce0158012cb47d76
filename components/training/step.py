"""One optimizer step.

The loss of a step is the sum of its losses over the number of its units (target tokens, pairs), both over every
micro-batch and every rank. The count is known before the first forward, each strategy sums gradients, and nothing is
averaged over ranks: the same samples give the same curve on every mesh. What routers add (router.py) is summed and
divided alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from components.batch import Batch
from components.checkpoint.tensors import Optimizers, list_optimizers
from components.distributed.pipeline.schedule import Pipeline, pad_to_longest
from components.training.forward import head_keywords, local_part, training_loss, weigh_rows
from components.training.loss import reduce_loss
from components.training.metrics import FIELDS, StepNumbers
from components.training.objectives import PLAIN, Objective
from components.training.optimizers.gradients import clip_gradients, equalize_replicas, gradient_norm
from components.training.optimizers.optim import step_if_finite
from components.training.setup.prepared import Prepared
from components.training.sync import get_sync_ctx


def train_step(
    model: Prepared,
    batches: Sequence[Batch],
    optimizer: Optimizers,
    objective: Objective = PLAIN,
    asked: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> StepNumbers:
    """Do one optimizer step over the micro-batches of this rank; the host never waits for the device.

    Args:
        batches: Micro-batches (micro_batch, seq), the same number on every rank.
        optimizer: One, or several by name, which share one gradient norm and one decision to skip the update.
        objective: What is optimized; by default the cross-entropy of the next token.
        asked: (preempt, interrupt, save) of this rank; the numbers report whether any rank was asked.
    """
    settings, pipeline = model.settings, model.pipeline
    work = 0.0 if settings.work is None else settings.work.seconds_at_peak(batches)
    if pipeline is not None and batches[0].document_bounds is None:
        batches = pad_to_longest(batches)
    moved = [batch.to(settings.device) for batch in batches]
    counted = torch.stack([objective.count(batch) for batch in moved]).sum() * settings.counts_rows
    parts = [local_part(batch, settings, settings.router_loss) for batch in moved]
    flags = torch.tensor((*asked, work), dtype=torch.float64).to(settings.device, non_blocking=True)
    totals = sum_over_ranks(torch.cat([counted[None], flags]))  # units, flags, work
    units = totals[0].clamp(min=1)
    if settings.router_loss is not None:
        settings.router_loss.start_step(units)

    measured, row_loss = None, None
    if objective.needs_row_scores:
        parts, scores, weighted = weigh_rows(model, parts, objective)
        row_loss = weighted.loss_sum
        measured = torch.stack([scores.lengths.sum(), *(weighted.metrics[name] for name in objective.metrics)])
    if pipeline is not None:
        loss_sum = _through_pipeline(pipeline, model, parts, objective, units)
    else:
        loss_sum = _forward_backward(model, parts, objective, units)

    optimizers = list_optimizers(optimizer)
    parameters = [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]
    equalize_replicas(parameters)
    norm = gradient_norm(parameters, None if pipeline is None else pipeline.group)
    clip_gradients(parameters, norm, settings.max_grad_norm)
    for each in optimizers:
        skipped = step_if_finite(each, norm)
        each.zero_grad(set_to_none=True)

    # The loss of whole rows is known to every cp rank; of token losses each has those of its tokens.
    losses = [loss_sum * settings.counts_tokens if row_loss is None else row_loss * settings.counts_rows]
    if settings.router_loss is not None:
        losses.append(settings.router_loss.step_sum())
    # No check, which would make the host wait: a loss that is not finite shows in the metrics.
    loss, count = reduce_loss(losses, counted, dp_group=all_ranks(), check_finite=False)
    norm, skipped = (each.to(settings.device, torch.float64, non_blocking=True)[None] for each in (norm, skipped))
    tokens, metrics = count, totals[:0]
    if measured is not None:
        measured = sum_over_ranks(measured * settings.counts_rows)
        tokens, metrics = measured[:1], measured[1:] / count.clamp(min=1)
    vector = torch.cat([loss / count.clamp(min=1), norm, tokens, skipped, totals[1:], metrics])
    return StepNumbers(vector, (*FIELDS, *objective.metrics))


def sum_over_ranks(vector: torch.Tensor) -> torch.Tensor:
    """Return the sum of a vector over all ranks, in place."""
    if (ranks := all_ranks()) is not None:
        dist.all_reduce(vector, group=ranks)
    return vector


def all_ranks() -> dist.ProcessGroup | None:
    """Return the group of all ranks; None where this one is alone."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def _forward_backward(model: Prepared, batches: list[Batch], objective: Objective, units: torch.Tensor) -> torch.Tensor:
    """Add the gradients of all micro-batches; return the sum of this rank's token losses in float64."""
    settings = model.settings
    loss_sum = torch.zeros((), dtype=torch.float64, device=settings.device)
    for index, batch in enumerate(batches):
        with get_sync_ctx(model.called, index == len(batches) - 1, settings.defer_grad_sync):
            loss = training_loss(model, batch, objective.token_loss)
            (loss / units.to(loss.dtype)).backward()
        loss_sum += loss.detach()
    return loss_sum


def _through_pipeline(
    pipeline: Pipeline, model: Prepared, batches: list[Batch], objective: Objective, units: torch.Tensor
) -> torch.Tensor:
    """Let the schedule add the gradients of all micro-batches; return the sum of this rank's token losses."""
    if not model.settings.takes_targets:
        return pipeline.forward_backward(
            batches,
            lambda logits, batch: objective.token_loss.of_logits(logits, batch.targets, batch.token_weights),
            {},
            units,
        )
    counts = [batch.target_count for batch in batches]
    most = None if None in counts else max(filter(None, counts), default=0)
    return pipeline.forward_backward(batches, None, head_keywords(most, objective.token_loss), units)
