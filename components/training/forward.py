"""The forward of a micro-batch, for training, evaluation and the scoring pass of row-weighted objectives (DPO)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.distributed.context_parallel import shard_rows
from components.training.loss import sum_over_ranks
from components.training.objectives import PLAIN, HeadOutput, RowObjective, RowScores, RowWeights, TokenLoss
from components.training.setup.prepared import Prepared, StepSettings
from components.training.setup.router_loss import SEQUENCE_WEIGHTS, RouterLoss, sequence_weights


def local_batch(batch: Batch, settings: StepSettings, router_loss: RouterLoss | None = None) -> Batch:
    """Return this rank's shard of a micro-batch: under cp a shard of each row, else the batch itself.

    Args:
        batch: Unsharded rows, on the device.
        router_loss: If given, the layer inputs include the sequence weights that the routers' loss needs.
    """
    if router_loss is not None:
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
            head_kwargs = head_keywords(batch.target_count, token_loss)
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
    keywords = head_keywords(None, PLAIN.token_loss, HeadOutput.hidden_states)
    plain = replace(batch, layer_inputs={}, token_weights=None, token_values={})
    if model.pipeline is not None:
        hidden: Any = model.pipeline.forward(plain, keywords)
    else:
        with autocast(model.settings):
            hidden = model.module(**plain.model_inputs(), **plain.head_inputs(), **keywords, use_cache=False)
    return hidden.to_local() if isinstance(hidden, DTensor) else hidden


def weigh_rows(
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


def head_keywords(
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
        head_kwargs = head_keywords(batch.target_count, token_loss, returned)
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
