"""The forward of a micro-batch: what training, evaluation and the first pass of objectives of whole rows share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.distributed.context_parallel import shard_rows
from components.training.objectives import PLAIN, Objective, RowScores, RowWeights, TokenLoss
from components.training.setup.prepared import Prepared, StepSettings
from components.training.setup.router_loss import SEQUENCE_WEIGHTS, RouterLoss, sequence_weights


def local_part(batch: Batch, settings: StepSettings, router_loss: RouterLoss | None = None) -> Batch:
    """Return what this rank computes of a micro-batch on its device: under cp a part of each row.

    Args:
        batch: Whole rows, on the device.
        router_loss: If given, decoder layers get the weights of sequences that their routers' loss needs.
    """
    if router_loss is not None:
        weights = sequence_weights(batch.targets, batch.document_bounds)
        batch = replace(batch, layer_inputs={**batch.layer_inputs, SEQUENCE_WEIGHTS: weights})
    return shard_rows(batch, settings.mesh)


def forward_loss(model: Prepared, batch: Batch, token_loss: TokenLoss = PLAIN.token_loss) -> torch.Tensor:
    """Forward a micro-batch without a backward; return the sum of this rank's token losses.

    A forward of a sharded model is a collective: call it on all ranks.

    Args:
        batch: This rank's part: see `local_part`.
    """
    output = _forward(model, batch, token_loss, per_token=False)
    if output is None:
        return torch.zeros((), dtype=torch.float64, device=model.settings.device)
    return output


def training_loss(model: Prepared, batch: Batch, token_loss: TokenLoss) -> torch.Tensor:
    """Return the sum of a micro-batch's token losses, to run the backward of. Not for pipelines."""
    # Rows are padded on the right: under causal attention no real token attends to padding, so no mask is needed; the
    # attention that models are built with asks for none, and so never makes the host wait.
    inputs, settings = batch.model_inputs(), model.settings
    with autocast(settings):
        if settings.takes_targets:
            of_head = head_keywords(batch.target_count, token_loss)
            return model.called(**inputs, **batch.head_inputs(), **of_head, use_cache=False)
        logits = model.called(**inputs, use_cache=False).logits
    return token_loss.of_logits(logits, batch.targets, batch.token_weights)


@torch.no_grad()
def score_rows(model: Prepared, batches: Sequence[Batch]) -> RowScores:
    """Return the log-probabilities of the targets of whole rows, of micro-batches one after another. A collective.

    Under pp they are right on the ranks of the last stage and zero on the others.

    Args:
        batches: This rank's parts: see `local_part`.
    """
    log_probs, lengths = [], []
    for batch in batches:
        plain = replace(batch, layer_inputs={}, token_weights=None)
        losses = _forward(model, plain, PLAIN.token_loss, per_token=True)
        if losses is None:
            losses = torch.zeros(batch.targets.shape, dtype=torch.float64, device=model.settings.device)
        log_probs.append(-losses.double().sum(1))
        lengths.append((batch.targets != IGNORED).sum(1).double())
    sums = torch.stack([torch.cat(log_probs), torch.cat(lengths)])  # (2, rows)
    mesh = model.settings.mesh
    if mesh is not None and mesh.size("cp") > 1:
        dist.all_reduce(sums, group=mesh["cp"].get_group())
    return RowScores(sums[0], sums[1], Batch.joined_rows(batches))


def weigh_rows(
    model: Prepared, batches: Sequence[Batch], objective: Objective
) -> tuple[list[Batch], RowScores, RowWeights]:
    """Return micro-batches with the token weights of an objective of whole rows, and what they follow from.

    A collective.
    """
    scores = score_rows(model, batches)
    weighted = objective.weights(scores)
    factors = weighted.factors.split([batch.shape[0] for batch in batches])
    parts = [
        replace(batch, token_weights=factor[:, None].expand(batch.shape).contiguous())
        for batch, factor in zip(batches, factors, strict=True)
    ]
    return parts, scores, weighted


def head_keywords(target_count: int | None, token_loss: TokenLoss, *, per_token: bool = False) -> dict[str, Any]:
    """Return the keywords of a model that takes targets, besides the tensors of `Batch.head_inputs`."""
    return {"target_count": target_count, "token_loss": token_loss, "per_token": per_token}


def autocast(settings: StepSettings) -> AbstractContextManager[None]:
    """Context of a forward in the type that the strategy leaves to autocast."""
    if settings.autocast is None:
        return nullcontext()
    return torch.autocast(settings.device.type, dtype=settings.autocast)


def _forward(model: Prepared, batch: Batch, token_loss: TokenLoss, *, per_token: bool) -> torch.Tensor | None:
    """Return the sum of token losses, or the losses (batch, seq); None on pipeline ranks without the last stage."""
    settings, pipeline = model.settings, model.pipeline
    of_head = None
    if settings.takes_targets:
        of_head = head_keywords(batch.target_count, token_loss, per_token=per_token)
    if pipeline is not None:
        output: Any = pipeline.forward(batch, of_head)
        if output is None:
            return None
    else:
        targets = {} if of_head is None else batch.head_inputs() | of_head
        with autocast(settings):
            output = model.module(**batch.model_inputs(), **targets, use_cache=False)
            output = output if settings.takes_targets else output.logits
    if settings.takes_targets:
        return output
    if per_token:
        return token_loss.per_token(output, batch.targets)
    return token_loss.of_logits(output, batch.targets, batch.token_weights)
