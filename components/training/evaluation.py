"""One pass over held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from components.batch import Batch
from components.config.schema.training import EvalWeights
from components.distributed.mesh import Mesh
from components.training.forward import forward_loss, local_batch, score_for, weights_of_rows
from components.training.loss import all_ranks, reduce_loss, sum_over_ranks
from components.training.objectives import PLAIN, Objective, RowScores
from components.training.objectives.distillation import Distillation
from components.training.setup.prepared import Prepared


class Interruptible(Protocol):
    """Attributes of a run that a pass over data uses: the mesh, the progress bar and stop requests."""

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""

    @property
    def agreed_to_stop(self) -> Callable[[], bool]:
        """Returns whether any rank has a stop request. A collective."""

    def status(self, activity: str, total: int | None = None) -> AbstractContextManager[Callable[[], None]]:
        """Return a context that shows a progress bar of an activity with `total` parts, if known.

        It yields a function that advances the bar by one part.
        """


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of a pass over held-out data; the same on every rank."""

    loss: float
    """Mean loss per unit, of a distillation the cross-entropy of the data; NaN if there are no units."""
    count: int
    """Units over all ranks; 0 if the pass was stopped."""
    unit: str = PLAIN.unit
    """Name of a unit, for logs."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over units of the objective's additional metrics."""


@torch.no_grad()
def evaluate(
    model: Prepared, batches: Iterable[Batch], objective: Objective = PLAIN, run: Interruptible | None = None
) -> Evaluation:
    """Return the mean loss per unit over the batches of all ranks; by default the plain cross-entropy.

    Every rank must pass the same number of batches, because the forward of a sharded model is a collective. For a model
    with a moving average, the loss is that of the averaged weights if training.eval_weights selects them; with `both`,
    the metric "loss_trained" is the loss of the trained weights.

    Args:
        run: Shows progress, and ends the pass once any rank has a stop request; None: neither.
    """
    with model.with_weights(model.evaluates_average):
        measured = _evaluate(model, batches, objective, run)
    if model.average is None or model.average.evaluated is not EvalWeights.both or not measured.count:
        return measured
    trained = _evaluate(model, batches, objective, run)
    if not trained.count:
        return trained
    return replace(measured, metrics={**measured.metrics, "loss_trained": trained.loss})


def _evaluate(model: Prepared, batches: Iterable[Batch], objective: Objective, run: Interruptible | None) -> Evaluation:
    """Return the mean loss per unit under the weights that the module holds."""
    was_training = model.module.training
    model.module.eval()
    total = len(batches) if isinstance(batches, Sized) else None
    with nullcontext() if run is None else run.status("evaluating", total) as advance:
        sums, stopped = _sums(model, _counted(batches, advance), objective, run)
    model.module.train(was_training)
    if stopped:
        return Evaluation(float("nan"), 0, objective.unit)
    loss, local_count, *metrics = sums.unbind()
    reduced = reduce_loss([loss], local_count, dp_group=all_ranks(), check_finite=False)
    total, count = torch.cat(reduced).tolist()
    means: dict[str, float] = {}
    if metrics:
        values = sum_over_ranks(torch.stack(metrics)).tolist()
        means = {name: value / max(count, 1) for name, value in zip(objective.metrics, values, strict=True)}
    if isinstance(objective, Distillation):  # comparable with other runs, unlike the divergence, a metric of its own
        total = means.pop("cross_entropy") * count
    return Evaluation(total / count if count else float("nan"), int(count), objective.unit, means)


def _counted(batches: Iterable[Batch], advance: Callable[[], None] | None) -> Iterator[Batch]:
    """Yield the batches, and advance the progress bar after each."""
    for batch in batches:
        yield batch
        if advance is not None:
            advance()


def _sums(
    model: Prepared, batches: Iterable[Batch], objective: Objective, run: Interruptible | None
) -> tuple[torch.Tensor, bool]:
    """Return this rank's sums (loss, units, *metrics) in float64, and whether the pass was stopped."""
    settings = model.settings
    sums = torch.zeros(2 + len(objective.metrics), dtype=torch.float64, device=settings.device)
    scores: list[RowScores] = []  # three float64 values per row
    for host_batch in batches:
        if run is not None and run.agreed_to_stop():
            return sums, True
        batch = host_batch.to(settings.device)
        local = local_batch(batch, settings)
        if objective.needs_row_scores:
            scores.append(score_for(model, [local], objective))
            sums[1] += objective.count(batch) * settings.counts_rows
        else:
            (local,) = objective.with_token_values(model, [local])
            loss = forward_loss(model, local, objective.token_loss).double() * settings.counts_tokens
            sums[:2] += torch.stack([loss, objective.count(batch) * settings.counts_rows])
    if (token_sums := objective.token_sums()) is not None:
        sums[2:] += token_sums.to(settings.device, non_blocking=True) * settings.counts_tokens
    if scores:
        weighted = weights_of_rows(model, RowScores.joined(scores), objective)
        measured = [weighted.metrics[name] for name in objective.metrics]
        sums += torch.stack([weighted.loss_sum, sums.new_zeros(()), *measured]) * settings.counts_rows
    return sums, False
