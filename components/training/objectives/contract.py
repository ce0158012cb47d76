"""Interface between an objective, the LM head and the training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from components.batch import Batch


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


NOT_SHARDED = Vocabulary()
"""Vocabulary of a head that is not sharded."""


class HeadOutput(StrEnum):
    """Outputs of an LM head that takes targets."""

    loss_sum = "loss_sum"
    """Sum of the token losses, a scalar."""
    token_losses = "token_losses"
    """Losses (batch, seq); 0 where the target is ignored."""
    hidden_states = "hidden_states"
    """The head's input (batch, seq, hidden), unsharded over tp."""


class TokenLoss(Protocol):
    """Loss per target token: from logits by autograd, or from a chunk of logits together with its gradient."""

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of logits (batch, seq, vocabulary), a scalar in float32 or float64.

        Args:
            targets: (batch, seq); IGNORED where there is no loss.
            weights: Factor of each token's loss, (batch, seq); None: 1.
        """

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the losses (batch, seq) of logits (batch, seq, vocabulary); 0 where the target is ignored."""

    def of_chunk(
        self,
        scores: torch.Tensor,
        targets: torch.Tensor,
        vocabulary: Vocabulary,
        weights: torch.Tensor | None,
        values: Mapping[str, torch.Tensor],
        *,
        per_token: bool,
        with_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss sum of a chunk of tokens, and its gradient with respect to the logits or None.

        Args:
            scores: Logits (chunk, this rank's vocabulary) in float32 or float64.
            targets: (chunk,).
            weights: Factor of each token's loss, (chunk,); None: 1.
            values: `Batch.token_values` of these tokens, each (chunk, ...), floats as integers (`batch.bits_of`).
            per_token: Return the losses (chunk,) instead of their sum.
            with_gradient: Compute the gradient (chunk, this rank's vocabulary); rows of ignored targets may hold any
                value.
        """


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


class Objective(Protocol):
    """Loss that is a sum over units, divided once by the number of units in the whole optimizer step.

    Sum and number are taken over all micro-batches and ranks, so that the same samples give the same loss on every
    mesh. An objective is either a sum of token losses, or a function of the log-probabilities of whole rows
    (`needs_row_scores`). The second kind takes two passes: a forward without gradients for the log-probabilities, then
    a forward and backward of token losses weighted per row. By the chain rule this gives the same gradient, and the
    logits of a whole row are never needed at once.
    """

    @property
    def unit(self) -> str:
        """Name of a unit: target token, pair."""

    @property
    def token_loss(self) -> TokenLoss:
        """Loss of each target token."""

    @property
    def needs_row_scores(self) -> bool:
        """Whether token losses are weighted per row by `weights`."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of `RowWeights.metrics`, or of the sums that `token_sums` returns."""

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of units of a micro-batch of whole rows, a float64 scalar on its device."""

    def with_token_values(self, model: Any, batches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches with the `Batch.token_values` that the token loss uses. A collective.

        Called before each step's forward passes, and for each batch of an evaluation.

        Args:
            model: The trained model, a `Prepared`.
            batches: This rank's parts of the micro-batches, under cp a shard of each row.
        """

    def token_sums(self) -> torch.Tensor | None:
        """Return the sums (metrics,) float64 over this rank's target tokens since the last call; None: none."""

    def row_values(self, model: Any, batches: Sequence[Batch]) -> Mapping[str, torch.Tensor]:
        """Return additional `RowScores.values` of micro-batches, computed at every step. A collective.

        Args:
            model: The trained model, a `Prepared`.
            batches: This rank's parts of the micro-batches, under cp a shard of each row.
        """

    def step_sums(self, scores: RowScores) -> torch.Tensor | None:
        """Return sums over a rank's rows, (n,) float64, whose totals over all ranks `weights` needs; None: none."""

    def weights(self, scores: RowScores, step_sums: torch.Tensor | None = None) -> RowWeights:
        """Return the loss of a step's rows on one rank, and the factor of each row's token losses.

        Args:
            scores: Rows of one rank, of all micro-batches of the step (in an evaluation, of all batches).
            step_sums: `step_sums` of the rows of all ranks.
        """
