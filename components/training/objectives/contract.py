"""The contract between an objective, the model's head and the training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from components.batch import Batch


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How the vocabulary's rows of the head are sharded over ranks."""

    group: dist.ProcessGroup | None = None
    """Process group the vocabulary is sharded over (tp); None if it is not sharded."""
    first: int = 0
    """First token id of this rank's shard."""
    largest_shard: int = 0
    """Token ids of the largest shard. All ranks derive the number of chunks from it: each chunk is a collective."""
    size: int = 0
    """Token ids of all ranks; 0: as many as there are logits."""


NOT_SHARDED = Vocabulary()
"""Every rank holds the whole head."""


class TokenLoss(Protocol):
    """A loss per target token: from logits by autograd, or from a chunk of the logits with its gradient at once."""

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
        *,
        per_token: bool,
        with_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the losses of a chunk of tokens and the gradient of their sum.

        Args:
            scores: Logits (chunk, this rank's vocabulary) in float32 or float64.
            targets: (chunk,).
            weights: Factor of each token's loss, (chunk,); None: 1.
            per_token: Return the losses (chunk,) instead of their sum.
            with_gradient: Return the gradient of the scores; its rows of ignored targets may hold any value.
        """


@dataclass(frozen=True, slots=True)
class RowScores:
    """What an objective of whole rows knows of the rows of a step on one rank, in the order of its micro-batches."""

    log_probs: torch.Tensor  # (rows,) float64
    """Sum of the log-probabilities of each row's targets, completed over cp."""
    lengths: torch.Tensor  # (rows,) float64
    """Targets of each row."""
    values: Mapping[str, torch.Tensor]  # each (rows, ...)
    """`Batch.rows`."""


@dataclass(frozen=True, slots=True)
class RowWeights:
    """The loss of a step's rows, and what their token losses are weighted by to get its gradient."""

    loss_sum: torch.Tensor  # scalar, float64
    """Sum of the losses of this rank's units."""
    factors: torch.Tensor  # (rows,) float64
    """Factor of the token losses of each row: minus the derivative of `loss_sum` by the row's log-probability."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)  # scalars, float64
    """Sums over this rank's units, by name; the mean over all units is logged."""


class Objective(Protocol):
    """A loss that is a sum over units, divided once by their number in the whole optimizer step.

    The sum and the number are taken over every micro-batch and every rank, so that the same samples give the same loss
    on every mesh. An objective is either a sum of token losses, or a function of the log-probabilities of whole rows
    (`needs_row_scores`). The second kind takes two passes: a forward without gradients for the log-probabilities, and
    the forward and backward of token losses that are weighted by row, which gives the same gradient by the chain rule
    and needs no logits of whole rows.
    """

    @property
    def unit(self) -> str:
        """Name of what is counted: target token, pair."""

    @property
    def token_loss(self) -> TokenLoss:
        """The loss of each target token."""

    @property
    def needs_row_scores(self) -> bool:
        """Whether token losses are weighted by `weights`."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what `weights` measures."""

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of units of whole rows, a float64 scalar on their device."""

    def weights(self, scores: RowScores) -> RowWeights:
        """Return the loss of the rows of a step on one rank, and the factor of each row's token losses."""
