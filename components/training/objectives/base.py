"""Interface between an objective, the LM head and the training step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.objective import ObjectiveKind
from components.protocol.errors import ConfigError
from components.training.loss import count_targets

CROSS_ENTROPY = "cross_entropy"
"""Metric of an objective whose loss is another one: a held-out loss is the cross-entropy of the data."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Sharding of the LM head's weight along the vocabulary."""

    group: dist.ProcessGroup | None = None
    """Process group the vocabulary is sharded over (tp); None if it is not sharded."""
    first: int = 0
    """First token id of this rank's shard."""
    largest_shard: int = 0
    """Token ids of the largest shard. All ranks derive the number of chunks from it: chunks need collectives."""
    size: int = 0
    """Token ids of all shards; 0 if not sharded."""


class HeadOutput(StrEnum):
    """Outputs of an LM head that takes targets."""

    loss_sum = "loss_sum"
    """Sum of the token losses, a scalar."""
    token_losses = "token_losses"
    """Losses (batch, seq); 0 where the target is ignored."""
    hidden_states = "hidden_states"
    """The head's input (batch, seq, hidden), unsharded over tp."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Logits of a chunk of tokens, with all that their losses depend on."""

    scores: torch.Tensor  # (tokens, this rank's vocabulary)
    """Logits; for `TokenLoss.of_chunk` in float32 or float64."""
    targets: torch.Tensor  # (tokens,) int64
    """Target of each token; IGNORED where there is no loss."""
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """Sharding of the logits along the vocabulary, with the process group of reductions over it."""
    weights: torch.Tensor | None = None  # (tokens,), dtype of the logits
    """Factor of each token's loss; None: 1."""
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each (tokens, ...)
    """`Batch.token_values` of these tokens, floats as integers (`batch.bits_of`)."""
    per_token: bool = False
    """Whether to return the losses (tokens,) instead of their sum."""
    with_gradient: bool = True
    """Whether to return the gradient with respect to the logits."""

    def position(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index (tokens, 1) of each target in this rank's vocabulary, and whether it is there, (tokens,)."""
        index, size = self.targets - self.vocabulary.first, self.scores.shape[-1]
        is_local = (self.targets != IGNORED) & (index >= 0) & (index < size)
        return index.clamp(0, size - 1)[:, None], is_local


class TokenLoss:
    """Base of the losses of a target token: from logits by autograd, or from a chunk of logits with its gradient.

    A loss without `per_token` needs a model that returns losses (model.loss=chunked), one without `of_chunk` needs a
    model that returns logits (model.loss=logits).
    """

    sums: torch.Tensor | None = None  # (metrics,) float64
    """Sums over this rank's target tokens of the objective's metrics, since `take_sums`; None: none were added."""

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of logits (batch, seq, vocabulary), a scalar in float32 or float64.

        Args:
            targets: (batch, seq); IGNORED where there is no loss.
            weights: Factor of each token's loss, (batch, seq); None: 1.
        """
        losses = self.per_token(logits, targets)
        return losses.sum() if weights is None else (losses * weights.to(losses.dtype)).sum()

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the losses (batch, seq) of logits (batch, seq, vocabulary); 0 where the target is ignored."""
        raise NotImplementedError(f"{type(self).__name__} has no losses per token of logits; set model.loss=chunked")

    def of_chunk(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss sum of a chunk, or its losses (tokens,), and the gradient with respect to the logits.

        The gradient is (tokens, this rank's vocabulary), or None without `with_gradient`; rows of ignored targets may
        hold any value. The logits may be overwritten.
        """
        raise NotImplementedError(f"{type(self).__name__} has no losses of chunks; set model.loss=logits")

    def with_token_values(self, model: Any, batches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches with the `Batch.token_values` that the loss uses; by default as they are. A collective.

        Called before each step's forward passes, and for each batch of an evaluation.

        Args:
            model: The trained model, a `Prepared`.
            batches: This rank's parts of the micro-batches, under cp a shard of each row.
        """
        return list(batches)

    def add_sums(self, *sums: torch.Tensor) -> None:
        """Add to the sums of the objective's metrics, scalars in their order. Not for frozen dataclasses."""
        added = torch.stack([each.detach().double() for each in sums])
        self.sums = added if self.sums is None else self.sums + added

    def take_sums(self, metrics: int) -> torch.Tensor:
        """Return the sums (metrics,) float64 since the last call."""
        if self.sums is None:
            return torch.zeros(metrics, dtype=torch.float64)
        sums, self.sums = self.sums, None
        return sums


@dataclass(frozen=True, slots=True)
class RowScores:
    """Log-probabilities of a step's rows on one rank, in the order of its micro-batches.

    In packed rows, each sequence counts as a row here, and those without tokens as rows without targets.
    """

    log_probs: torch.Tensor  # (rows,) float64
    """Sum of the log-probabilities of each row's targets, reduced over cp."""
    lengths: torch.Tensor  # (rows,) float64
    """Number of targets of each row."""
    values: Mapping[str, torch.Tensor]  # each (rows, ...)
    """Per-row values of the data set, by name: see `Batch.rows`."""

    @classmethod
    def joined(cls, parts: Sequence[RowScores]) -> RowScores:
        """Return the scores of several passes as one."""
        return cls(
            torch.cat([part.log_probs for part in parts]),
            torch.cat([part.lengths for part in parts]),
            {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values},
        )


@dataclass(frozen=True, slots=True)
class RowWeights:
    """Loss of a step's rows, and the factors of their token losses that give its gradient."""

    loss_sum: torch.Tensor  # scalar, float64
    """Sum of the losses of this rank's units."""
    factors: torch.Tensor  # (rows,) float64
    """Factor of each row's token losses: minus the derivative of `loss_sum` by the row's log-probability."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)  # scalars, float64
    """Sums over this rank's units, by name; their means over all units are logged."""
    every: int = 1
    """2: only every second row of a micro-batch, beginning with the first, is trained on; the factors of the others are
    0, and the second pass leaves them out."""


class TokenObjective(ABC):
    """Sum of token losses, divided once by the number of units in the whole optimizer step.

    Sum and number are taken over all micro-batches and ranks, so that the same samples give the same loss on every
    mesh.
    """

    unit: str = "target token"
    """Name of a unit: target token, pair."""
    token_loss: TokenLoss
    """Loss of each target token."""
    metrics: tuple[str, ...] = ()
    """Names of the sums over units that are logged besides the loss: of `TokenLoss.add_sums`."""
    metrics_per_target: bool = False
    """Whether the metrics are means over target tokens, whatever the unit."""

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of units of a micro-batch of whole rows, a float64 scalar on its device.

        By default, the targets that are not ignored.
        """
        return count_targets(batch.targets)


class RowObjective(TokenObjective):
    """Function of the log-probabilities of whole rows, whose metrics are `RowWeights.metrics`.

    It takes two passes: a forward without gradients for the log-probabilities, then a forward and backward of token
    losses weighted per row. By the chain rule this gives the gradient of the function, and the logits of a whole row
    are never needed at once. `token_loss` is the negative log-probability of a target.
    """

    @abstractmethod
    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of units of a micro-batch of whole rows, a float64 scalar on its device."""

    def row_values(self, model: Any, batches: Sequence[Batch]) -> Mapping[str, torch.Tensor]:
        """Return additional `RowScores.values` of micro-batches, computed at every step. A collective.

        Args:
            model: The trained model, a `Prepared`.
            batches: This rank's parts of the micro-batches, under cp a shard of each row.
        """
        return {}

    def step_sums(self, scores: RowScores) -> torch.Tensor | None:
        """Return sums over a rank's rows, (n,) float64, whose totals over all ranks `weights` needs; None: none."""
        return None

    @abstractmethod
    def weights(self, scores: RowScores, step_sums: torch.Tensor | None = None) -> RowWeights:
        """Return the loss of a step's rows on one rank, and the factor of each row's token losses.

        Args:
            scores: Rows of one rank, of all micro-batches of the step (in an evaluation, of all batches).
            step_sums: `step_sums` of the rows of all ranks.
        """


def row_objective(objective: TokenObjective) -> RowObjective | None:
    """Return an objective if it is one of rows, None if it is a sum of token losses.

    Raises ConfigError for objects with another interface, with what to rename.
    """
    name = f"objective {type(objective).__name__}"
    former = sorted({"needs_row_scores", "with_token_values", "token_sums"} & set(dir(objective)))
    if former or not isinstance(objective, TokenObjective):
        raise ConfigError(
            f"{name}{' with ' if former else ''}{', '.join(former)}: must inherit training.TokenObjective, or "
            "training.RowObjective instead of needs_row_scores = True; remove needs_row_scores and the methods of the "
            "other kind, and move with_token_values and token_sums to token_loss, the latter as add_sums"
        )
    loss = objective.token_loss
    if not isinstance(loss, TokenLoss):
        raise ConfigError(f"{name}: token_loss={type(loss).__name__} must inherit training.TokenLoss")
    try:
        signature(loss.of_chunk).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{name}: {type(loss).__name__}.of_chunk must take one argument, a training.Chunk; replace its parameters "
            "by (self, chunk), and rename scores to chunk.scores, targets to chunk.targets and so on"
        ) from error
    return objective if isinstance(objective, RowObjective) else None


def check_dropout(model: Any, kind: ObjectiveKind) -> None:
    """Raise ConfigError for a model with dropout, which would score the same rows differently in each pass."""
    config = model.config.get_text_config().to_dict()
    rates = {key: value for key, value in config.items() if "drop" in key and isinstance(value, float) and value > 0}
    if rates:
        raise ConfigError(
            f"model.path: the model's config has {', '.join(f'{key}={value}' for key, value in rates.items())}, but "
            f"objective.kind={kind} compares passes over the same rows, which would use different dropout masks; set "
            "these values to 0 in its config.json, or use another model"
        )
