"""One optimizer step, and one pass over held-out data.

The loss of a step is the sum of its token losses over the number of its target tokens, both over every micro-batch
and every rank. The count is known before the first forward, each strategy sums gradients, and nothing is averaged
over ranks: the same samples give the same curve on every mesh. What routers add (router.py) is summed and divided
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from components.config.schema.model import DOCUMENTS, LONGEST_DOCUMENT
from components.distributed.context import shard_rows
from components.distributed.mesh import Mesh
from components.distributed.pipeline import Pipeline, pad_to_longest
from components.models.documents import longest_document
from components.training.gradients import clip_gradients, equalize_replicas, gradient_norm
from components.training.loss import count_targets, next_tokens, reduce_loss
from components.training.objectives import NextToken, Objective
from components.training.optim import step_if_finite
from components.training.router import SEQUENCE_WEIGHTS, RouterLoss, sequence_weights
from components.training.sync import get_sync_ctx
from components.training.token_loss import TokenLoss, most_targets
from components.training.work import StepWork

MicroBatch = dict[str, torch.Tensor]
"""input_ids and labels, each (micro_batch, seq) int64; of packed rows position_ids and documents too."""

PLAIN = NextToken()
"""The cross-entropy without terms beside it: what evaluation reports."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What stays the same over all steps of a run."""

    device: torch.device
    """Where the model computes."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: no clipping."""
    defer_grad_sync: bool = True
    """Reduce gradients in the last micro-batch only."""
    mesh: Mesh | None = None
    """Which part of each row is this rank's, and whose tokens count in sums over all ranks; None: one process."""
    autocast: torch.dtype | None = None
    """Type of matrix products where the strategy does not set it (single, ddp)."""
    router_loss: RouterLoss | None = None
    """What the routers of a mixture of experts add to the loss of a training step; evaluation is without it."""
    token_loss: TokenLoss | None = None
    """Whether the model takes targets and returns their losses; None: it returns logits."""
    work: StepWork | None = None
    """What the arithmetic of a step is measured by; None: it is not."""

    @property
    def takes_targets(self) -> bool:
        """Whether the model takes targets and returns the sum of their losses; else it returns logits."""
        return self.token_loss is not None and self.token_loss.takes_targets


def train_step(
    model: nn.Module | Pipeline,
    micro_batches: Sequence[MicroBatch],
    optimizer: torch.optim.Optimizer,
    settings: StepSettings,
    asked: tuple[float, float, float] = (0.0, 0.0, 0.0),
    objective: Objective = PLAIN,
) -> torch.Tensor:
    """Do one optimizer step over the micro-batches of this rank; the host never waits for the device.

    Args:
        micro_batches: input_ids and labels (micro_batch, seq) each, the same number on every rank.
        asked: (preempt, interrupt, save) of this rank; the returned vector says whether any rank was asked.
        objective: What is optimized.

    Returns a float64 vector of `metrics.FIELDS` on the device, equal on every rank.
    """
    work = 0.0 if settings.work is None else settings.work.seconds_at_peak(micro_batches)
    if isinstance(model, Pipeline):
        micro_batches = pad_to_longest(micro_batches)
    batches = [_local_part(batch, settings, settings.router_loss) for batch in micro_batches]
    counted = torch.stack([objective.count(batch["targets"]) for batch in batches]).sum() * _counts(settings)
    flags = torch.tensor((*asked, work), dtype=torch.float64).to(settings.device, non_blocking=True)
    totals = _sum_over_ranks(torch.cat([counted[None], flags]))  # tokens, flags, work
    tokens = totals[0].clamp(min=1)
    if settings.router_loss is not None:
        settings.router_loss.start_step(tokens)

    counts = [_most_targets(batch, settings) for batch in micro_batches]
    if isinstance(model, Pipeline):
        most = None if None in counts else max(filter(None, counts), default=0)
        loss_sum = model.forward_backward(batches, *_on_last_stage(objective, most, settings), tokens)
    else:
        loss_sum = _forward_backward(model, batches, tokens, counts, objective, settings)

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    equalize_replicas(parameters)
    norm = gradient_norm(parameters, model.group if isinstance(model, Pipeline) else None)
    clip_gradients(parameters, norm, settings.max_grad_norm)
    skipped = step_if_finite(optimizer, norm)
    optimizer.zero_grad(set_to_none=True)

    losses = [loss_sum * _counts(settings)]
    if settings.router_loss is not None:
        losses.append(settings.router_loss.step_sum())
    # No check, which would make the host wait: a loss that is not finite shows in the metrics.
    loss, count = reduce_loss(losses, counted, dp_group=_all_ranks(), check_finite=False)
    norm, skipped = (each.to(settings.device, torch.float64, non_blocking=True)[None] for each in (norm, skipped))
    return torch.cat([loss / count.clamp(min=1), norm, count, skipped, totals[1:]])


@torch.no_grad()
def evaluate(
    model: nn.Module | Pipeline,
    batches: Iterable[MicroBatch],
    settings: StepSettings,
    stopped: Callable[[], bool] | None = None,
) -> tuple[float, int]:
    """Return (mean loss per target token, number of target tokens) over the batches of all ranks.

    Every rank must bring the same number of batches: a sharded forward is a collective.

    Args:
        stopped: Called before each batch on every rank, returns the same on all of them (`StopRequest.agreed`): True
            ends the evaluation, which then returns (nan, 0).
    """
    module = model.module if isinstance(model, Pipeline | DistributedDataParallel) else model
    was_training = module.training
    module.eval()
    loss_sum, tokens = (torch.zeros((), dtype=torch.float64, device=settings.device) for _ in range(2))
    ended = False
    for batch in batches:
        if stopped is not None and stopped():
            ended = True
            break
        loss, targets = forward_loss(model, batch, settings)
        loss_sum += loss
        tokens += count_targets(targets)
    module.train(was_training)
    if ended:
        return float("nan"), 0
    counts = _counts(settings)
    reduced = reduce_loss([loss_sum * counts], tokens * counts, dp_group=_all_ranks(), check_finite=False)
    total, count = torch.cat(reduced).tolist()
    return (total / count if count else float("nan")), int(count)


def forward_loss(
    model: nn.Module | Pipeline, batch: MicroBatch, settings: StepSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward one micro-batch without a backward; return the sum of this rank's token losses, and its targets.

    A forward of a sharded model is a collective: call it on all ranks.
    """
    most, batch = _most_targets(batch, settings), _local_part(batch, settings)
    if isinstance(model, Pipeline):
        return model.loss(batch, *_on_last_stage(PLAIN, most, settings)), batch["targets"]
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return _forward(module, batch, most, PLAIN, settings), batch["targets"]


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Copy a micro-batch to the device without making the host wait."""
    if device.type == "cuda":
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _local_part(batch: MicroBatch, settings: StepSettings, router_loss: RouterLoss | None = None) -> dict[str, Any]:
    """Return what this rank computes of a micro-batch: input_ids and targets, position_ids where rows are packed or cut
    by cp, documents of packed rows and a bound on their length, router weights.
    """
    longest = longest_document(batch[DOCUMENTS]) if DOCUMENTS in batch else None
    batch = to_device(batch, settings.device)
    rows = {"input_ids": batch["input_ids"], "targets": next_tokens(batch["labels"])}
    if DOCUMENTS in batch:
        rows |= {"position_ids": batch["position_ids"], DOCUMENTS: batch[DOCUMENTS]}
    if router_loss is not None:
        rows[SEQUENCE_WEIGHTS] = sequence_weights(batch["labels"], batch.get(DOCUMENTS))
    rows = shard_rows(rows, settings.mesh)
    return rows if longest is None else {**rows, LONGEST_DOCUMENT: longest}


def _most_targets(batch: MicroBatch, settings: StepSettings) -> int | None:
    """Count the targets of a micro-batch for a model that takes them; a loss of logits does not ask."""
    return most_targets(batch["labels"]) if settings.takes_targets else None


def _counts(settings: StepSettings) -> bool:
    return settings.mesh is None or settings.mesh.counts_tokens


def _forward_backward(
    model: nn.Module,
    batches: list[MicroBatch],
    tokens: torch.Tensor,
    counts: list[int | None],
    objective: Objective,
    settings: StepSettings,
) -> torch.Tensor:
    """Add the gradients of all micro-batches; return the sum of this rank's losses in float64."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=settings.device)
    for index, (batch, most) in enumerate(zip(batches, counts, strict=True)):
        last = index == len(batches) - 1
        with get_sync_ctx(model, last, settings.defer_grad_sync):
            loss = _forward(model, batch, most, objective, settings)
            (loss / tokens.to(loss.dtype)).backward()
        loss_sum += loss.detach()
    return loss_sum


def _forward(
    model: nn.Module, batch: MicroBatch, most: int | None, objective: Objective, settings: StepSettings
) -> torch.Tensor:
    """Return the sum of a micro-batch's losses.

    Args:
        most: Host-side upper bound on the number of targets that are not ignored.
    """
    # Rows are padded on the right: under causal attention no real token sees padding, so no mask is needed; the
    # attention that models are built with asks for none, and so never makes the host wait.
    inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
    with _autocast(settings):
        if settings.takes_targets:
            return model(**inputs, targets=batch["targets"], target_count=most, objective=objective, use_cache=False)
        logits = model(**inputs, use_cache=False).logits
    return objective.loss_sum(logits, batch["targets"])


def _on_last_stage(
    objective: Objective, most: int | None, settings: StepSettings
) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None, dict[str, Any]]:
    """Return what a pipeline makes a loss of its last stage's logits with, or the keywords of a stage that does so."""
    if settings.takes_targets:
        return None, {"target_count": most, "objective": objective}
    return objective.loss_sum, {}


def _autocast(settings: StepSettings) -> AbstractContextManager[None]:
    if settings.autocast is None:
        return nullcontext()
    return torch.autocast(settings.device.type, dtype=settings.autocast)


def _sum_over_ranks(vector: torch.Tensor) -> torch.Tensor:
    if (ranks := _all_ranks()) is not None:
        dist.all_reduce(vector, group=ranks)
    return vector


def _all_ranks() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
