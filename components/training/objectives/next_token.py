"""Cross-entropy of the next token: pretraining and supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from components.batch import Batch
from components.config.schema.objective import NextTokenConfig
from components.training.loss import count_targets
from components.training.objectives.contract import RowScores, RowWeights
from components.training.objectives.cross_entropy import CrossEntropy


class NextToken:
    """Mean cross-entropy of target tokens, with the config's label smoothing and z-loss.

    Evaluation uses the plain cross-entropy, `PLAIN`.
    """

    unit = "target token"
    needs_row_scores = False
    metrics: tuple[str, ...] = ()

    def __init__(self, cfg: NextTokenConfig | None = None) -> None:
        """Create the objective; `cfg` None: without label smoothing and z-loss."""
        self.token_loss = CrossEntropy() if cfg is None else CrossEntropy(cfg.label_smoothing, cfg.z_loss)

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of targets that are not ignored, a float64 scalar."""
        return count_targets(batch.targets)

    def with_token_values(self, model: Any, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches unchanged: the loss depends on logits and targets only."""
        return list(batches)

    def token_sums(self) -> None:
        """Return None: there are no metrics besides the loss."""

    def row_values(self, model: Any, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
        """Return no values: rows are not scored."""
        return {}

    def step_sums(self, scores: RowScores) -> None:
        """Return None: there are no row weights."""

    def weights(self, scores: RowScores, step_sums: torch.Tensor | None = None) -> RowWeights:
        """Raise NotImplementedError: a sum of token losses has no row weights."""
        raise NotImplementedError("NextToken is a sum of token losses and has no row weights")


PLAIN = NextToken()
"""Cross-entropy of target tokens without label smoothing and z-loss."""
