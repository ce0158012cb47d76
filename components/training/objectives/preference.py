"""Direct preference optimization (Rafailov et al. 2023)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.objective import PreferenceConfig
from components.training.objectives.contract import RowScores, RowWeights
from components.training.objectives.cross_entropy import CrossEntropy

REFERENCE = "reference_log_probs"
"""Name in `Batch.rows` of the log-probability of each row's targets under the reference model."""


class Preference:
    """Mean over pairs of -log sigmoid(beta x margin), equation 7 of the paper.

    The margin is the log-probability of the chosen answer minus that of the rejected one, each relative to the
    reference model. Rows alternate: chosen, rejected, chosen, rejected, ... Label smoothing (cDPO, Mitchell 2023) is
    the assumed probability that a preference label is flipped.
    """

    unit = "pair"
    needs_row_scores = True
    metrics = ("margin", "accuracy", "reward_chosen", "reward_rejected", "log_prob_chosen", "log_prob_rejected")

    def __init__(self, cfg: PreferenceConfig) -> None:
        self.beta, self.label_smoothing = cfg.beta, cfg.label_smoothing
        self.token_loss = CrossEntropy()

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of pairs (two rows each), a float64 scalar; padding pairs do not count."""
        return _is_real((batch.targets != IGNORED).sum(1)).sum().to(torch.float64)

    def weights(self, scores: RowScores) -> RowWeights:
        """Return the loss of a step's pairs on one rank, and the factor of each row's token losses."""
        log_probs = scores.log_probs.detach().requires_grad_()  # (rows,)
        is_real = _is_real(scores.lengths)  # (pairs,)
        with torch.enable_grad():
            rewards = self.beta * (log_probs - scores.values[REFERENCE]).view(-1, 2)  # (pairs, chosen and rejected)
            margins = rewards[:, 0] - rewards[:, 1]  # (pairs,)
            flipped = self.label_smoothing
            losses = -(1 - flipped) * F.logsigmoid(margins) - flipped * F.logsigmoid(-margins)
            loss = (losses * is_real).sum()
        (gradient,) = torch.autograd.grad(loss, log_probs)
        rewards, margins = rewards.detach(), margins.detach()
        metrics = {
            "margin": margins,
            "accuracy": (margins > 0).to(torch.float64),
            "reward_chosen": rewards[:, 0],
            "reward_rejected": rewards[:, 1],
            "log_prob_chosen": scores.log_probs[0::2],
            "log_prob_rejected": scores.log_probs[1::2],
        }
        return RowWeights(loss.detach(), -gradient, {name: (each * is_real).sum() for name, each in metrics.items()})


def _is_real(lengths: torch.Tensor) -> torch.Tensor:
    """Return whether each pair has targets in both rows, (pairs,) bool. lengths: targets of each row, (rows,)."""
    return (lengths.view(-1, 2) > 0).all(1)
