"""Cross-entropy of the next token: pretraining and supervised fine-tuning."""

from __future__ import annotations

import torch

from components.batch import Batch
from components.config.schema.objective import NextTokenConfig
from components.training.loss import count_targets
from components.training.objectives.contract import RowScores, RowWeights
from components.training.objectives.cross_entropy import CrossEntropy


class NextToken:
    """The mean cross-entropy of target tokens, with the label smoothing and the z-loss of the config.

    Evaluation reports the plain cross-entropy, `PLAIN`.
    """

    unit = "target token"
    needs_row_scores = False
    metrics: tuple[str, ...] = ()

    def __init__(self, cfg: NextTokenConfig | None = None) -> None:
        """`cfg` None: neither label smoothing nor z-loss."""
        self.token_loss = CrossEntropy() if cfg is None else CrossEntropy(cfg.label_smoothing, cfg.z_loss)

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of targets that are not ignored, a float64 scalar."""
        return count_targets(batch.targets)

    def weights(self, scores: RowScores) -> RowWeights:
        """Raise: a sum of token losses needs no weights."""
        raise NotImplementedError("NextToken is a sum of token losses")


PLAIN = NextToken()
"""The cross-entropy of target tokens and nothing else."""
