"""Objectives on preferences: DPO with its variants IPO and hinge, SimPO and ORPO on pairs, KTO on labeled answers.

Each is a function of the log-probabilities of whole answers, so its gradient is a weighted sum of the gradients of
token losses, with one weight per row (base.py). Two neighboring rows form a unit: the chosen and the rejected
answer of a pair, or under KTO an answer and the same prompt with the answer of another sample.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.objective import (
    DPOConfig,
    KTOConfig,
    ORPOConfig,
    PairConfig,
    PairLoss,
    SimPOConfig,
)
from components.data.pairs import DESIRABLE
from components.training.objectives.base import RowObjective, RowScores, RowWeights, TokenLoss
from components.training.objectives.cross_entropy import CrossEntropy

REFERENCE = "reference_log_probs"
"""Name in `Batch.rows` of the log-probability of each row's targets under the reference model."""


class _PairLosses(NamedTuple):
    """Losses of pairs, and what they compare."""

    losses: torch.Tensor  # (pairs,)
    rewards: torch.Tensor  # (pairs, 2): chosen, rejected
    """Implicit rewards; the margin is that of the chosen answer minus that of the rejected one."""


ReferenceScorer = Callable[[Any, Sequence[Batch]], torch.Tensor]
"""Function that returns the log-probabilities (rows,) of micro-batches under the reference, given the trained model."""


class Preference(RowObjective):
    """Mean loss over units of two rows; the base of the objectives below.

    Args:
        reference: Scores each step's rows under the reference model; None: `Batch.rows` holds the log-probabilities.
    """

    unit = "pair"
    token_loss: TokenLoss = CrossEntropy()
    uses_reference = True
    """Whether the loss compares log-probabilities with those under a reference model."""

    def __init__(self, reference: ReferenceScorer | None = None) -> None:
        self.reference = reference
        self.load_reference: Callable[[], Any] | None = None
        """Loads the reference model (`Prepared`) for a resumed run that lacks its log-probabilities; a collective."""
        self.keeps_adapters = False
        """Whether the reference is the model with the adapters that training begins with, not the one without any."""
        self.reference_weights = ""
        """Identity of the weights and the dtype of the reference model; "": unknown."""

    @property
    def needs_stored_reference(self) -> bool:
        """Whether the data must hold the log-probabilities under the reference model."""
        return self.uses_reference and self.reference is None

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of units (two rows each), a float64 scalar; padding rows do not count."""
        return _is_real(batch.sum_sequences(batch.targets != IGNORED)).sum().to(torch.float64)

    def row_values(self, model: Any, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
        """Return the log-probabilities under the reference model if they are computed at every step."""
        return {} if self.reference is None else {REFERENCE: self.reference(model, batches)}


class PairPreference(Preference):
    """Mean loss over preference pairs, plus `sft_weight` times the mean negative log-probability per chosen token."""

    metrics = (
        *("margin", "accuracy", "reward_chosen", "reward_rejected"),
        *("log_prob_chosen", "log_prob_rejected", "log_prob_accuracy"),
    )

    def __init__(self, cfg: PairConfig, reference: ReferenceScorer | None = None) -> None:
        super().__init__(reference)
        self.sft_weight = cfg.sft_weight

    @abstractmethod
    def pair_losses(self, log_probs: torch.Tensor, lengths: torch.Tensor, reference: torch.Tensor) -> _PairLosses:
        """Return the losses of pairs, differentiable by `log_probs`.

        Args:
            log_probs: Log-probabilities of the (chosen, rejected) answers, (pairs, 2) float64.
            lengths: Number of target tokens, at least 1, (pairs, 2) float64.
            reference: Log-probabilities under the reference model, (pairs, 2) float64; zeros if none is needed.
        """

    def weights(self, scores: RowScores, step_sums: torch.Tensor | None = None) -> RowWeights:
        """Return the loss of a step's pairs on one rank, and the factor of each row's token losses."""
        row_log_probs = scores.log_probs.detach().requires_grad_()  # (rows,)
        real = _is_real(scores.lengths)  # (pairs,)
        lengths = scores.lengths.view(-1, 2).clamp(min=1)
        reference = scores.values[REFERENCE] if self.uses_reference else torch.zeros_like(scores.log_probs)
        with torch.enable_grad():
            log_probs = row_log_probs.view(-1, 2)
            losses, rewards = self.pair_losses(log_probs, lengths, reference.view(-1, 2))
            if self.sft_weight:
                losses = losses - self.sft_weight * log_probs[:, 0] / lengths[:, 0]
            loss = losses.where(real, 0.0).sum()
        (gradient,) = torch.autograd.grad(loss, row_log_probs)
        rewards = rewards.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        metrics = {
            "margin": margins,
            "accuracy": (margins > 0).to(torch.float64),
            "reward_chosen": rewards[:, 0],
            "reward_rejected": rewards[:, 1],
            "log_prob_chosen": scores.log_probs[0::2],
            "log_prob_rejected": scores.log_probs[1::2],
            "log_prob_accuracy": (scores.log_probs[0::2] > scores.log_probs[1::2]).to(torch.float64),
        }
        sums = {name: each.where(real, 0.0).sum() for name, each in metrics.items()}
        return RowWeights(loss.detach(), -gradient, sums)


class DPO(PairPreference):
    """Direct preference optimization (Rafailov et al. 2023), IPO (Azar et al. 2023), or the hinge loss of SLiC.

    The reward of an answer is beta x log-ratio, where the log-ratio is the log-probability minus the reference's. Of
    the margin m between the rewards of a pair:

    - sigmoid: -log sigmoid(m), equation 7 of the DPO paper. Label smoothing e (cDPO, Mitchell 2023) is the assumed
      probability that a preference label is flipped: -(1 - e) log sigmoid(m) - e log sigmoid(-m).
    - hinge: max(0, 1 - m) (Zhao et al. 2023; Liu et al. 2023).
    - ipo: (d - 1 / (2 beta))^2, equation 17 of the IPO paper, where d is the difference of the log-ratios per token.
      Averaging over tokens makes beta independent of the length; the paper's authors do it too, as TRL notes.
    """

    def __init__(self, cfg: DPOConfig, reference: ReferenceScorer | None = None) -> None:
        super().__init__(cfg, reference)
        self.beta, self.loss, self.label_smoothing = cfg.beta, cfg.loss, cfg.label_smoothing

    def pair_losses(self, log_probs: torch.Tensor, lengths: torch.Tensor, reference: torch.Tensor) -> _PairLosses:
        """Return the losses of pairs: see `PairPreference.pair_losses`."""
        log_ratios = log_probs - reference
        if self.loss is PairLoss.ipo:
            log_ratios = log_ratios / lengths
        rewards = self.beta * log_ratios  # (pairs, 2)
        margins = rewards[:, 0] - rewards[:, 1]
        match self.loss:
            case PairLoss.sigmoid:
                flipped = self.label_smoothing
                losses = -(1 - flipped) * F.logsigmoid(margins) - flipped * F.logsigmoid(-margins)
            case PairLoss.hinge:
                losses = F.relu(1 - margins)
            case PairLoss.ipo:
                losses = (margins / self.beta - 1 / (2 * self.beta)).square()
        return _PairLosses(losses, rewards)


class SimPO(PairPreference):
    """Simple preference optimization (Meng et al. 2024), equation 6: -log sigmoid(margin - gamma).

    The reward of an answer is beta x its mean log-probability per token; there is no reference model.
    """

    uses_reference = False

    def __init__(self, cfg: SimPOConfig) -> None:
        super().__init__(cfg)
        self.beta, self.gamma = cfg.beta, cfg.gamma

    def pair_losses(self, log_probs: torch.Tensor, lengths: torch.Tensor, reference: torch.Tensor) -> _PairLosses:
        """Return the losses of pairs: see `PairPreference.pair_losses`."""
        rewards = self.beta * log_probs / lengths  # (pairs, 2)
        return _PairLosses(-F.logsigmoid(rewards[:, 0] - rewards[:, 1] - self.gamma), rewards)


class ORPO(PairPreference):
    """Odds-ratio preference optimization (Hong et al. 2024), equations 6 and 7; there is no reference model.

    -log sigmoid(log odds of the chosen answer - those of the rejected one) is weighted by beta, the paper's lambda, and
    `sft_weight` (1 in the paper) weights the loss of supervised fine-tuning on the chosen answer. The probability of an
    answer is the exponential of its mean log-probability per token.
    """

    uses_reference = False
    token_loss = CrossEntropy(near_one=True)

    def __init__(self, cfg: ORPOConfig) -> None:
        super().__init__(cfg)
        self.beta = cfg.beta

    def pair_losses(self, log_probs: torch.Tensor, lengths: torch.Tensor, reference: torch.Tensor) -> _PairLosses:
        """Return the losses of pairs: see `PairPreference.pair_losses`."""
        means = log_probs / lengths  # (pairs, 2)
        log_odds = means - _log_1m_exp(means)
        return _PairLosses(-self.beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1]), self.beta * means)


class KTO(Preference):
    """Mean loss over labeled answers (Ethayarajh et al. 2024, equation 8).

    The reward of an answer is its log-ratio (log-probability minus the reference's), and its loss is

    - desirable_weight x (1 - sigmoid(beta x (reward - z))) for a desirable answer,
    - undesirable_weight x (1 - sigmoid(beta x (z - reward))) for an undesirable one.

    The reference point z estimates the KL divergence of the policy from the reference model: the mean log-ratio of
    prompts with the answers of other prompts, at least 0, without a gradient. It is taken over all samples of the
    optimizer step (in an evaluation, over all samples), so it does not depend on the mesh or the micro-batch size.
    Rows alternate: an answer, then the prompt with the answer of another sample.
    """

    unit = "answer"
    metrics = ("accuracy", "reward", "kl", "log_prob")

    def __init__(self, cfg: KTOConfig, reference: ReferenceScorer | None = None) -> None:
        super().__init__(reference)
        self.beta = cfg.beta
        self.desirable_weight, self.undesirable_weight = cfg.desirable_weight, cfg.undesirable_weight

    def step_sums(self, scores: RowScores) -> torch.Tensor:
        """Return the sum of the log-ratios of the mismatched answers, and their number, (2,) float64."""
        log_ratios = (scores.log_probs - scores.values[REFERENCE])[1::2]
        real = _is_real(scores.lengths)
        return torch.stack([log_ratios.where(real, 0.0).sum(), real.sum().double()])

    def weights(self, scores: RowScores, step_sums: torch.Tensor | None = None) -> RowWeights:
        """Return the loss of a step's answers on one rank, and the factor of each row's token losses.

        Raises ValueError without `step_sums`.
        """
        if step_sums is None:
            raise ValueError("KTO.weights needs step_sums, the sums of KTO.step_sums over all ranks")
        real, desirable = _is_real(scores.lengths), scores.values[DESIRABLE][0::2]  # (answers,)
        log_ratios = (scores.log_probs - scores.values[REFERENCE])[0::2]
        reference_point = (step_sums[0] / step_sums[1].clamp(min=1)).clamp(min=0)
        sign = 2 * desirable - 1
        weight = (self.desirable_weight * desirable + self.undesirable_weight * (1 - desirable)) * real
        margins = sign * (log_ratios - reference_point)
        loss = torch.sigmoid(-self.beta * margins)  # 1 - sigmoid would round to 0 for large margins
        # The derivative of the loss by the answer's log-probability; mismatched answers are not trained on.
        factors = torch.zeros_like(scores.log_probs)
        factors[0::2] = weight * self.beta * sign * loss * (1 - loss)
        metrics = {
            "accuracy": (margins > 0).double(),
            "reward": self.beta * log_ratios,
            "kl": reference_point.expand(len(real)),
            "log_prob": scores.log_probs[0::2],
        }
        sums = {name: each.where(real, 0.0).sum() for name, each in metrics.items()}
        return RowWeights((weight * loss).sum(), factors, sums, every=2)


def _is_real(lengths: torch.Tensor) -> torch.Tensor:
    """Return whether each pair has targets in both rows, (pairs,) bool. lengths: targets of each row, (rows,)."""
    return (lengths.view(-1, 2) > 0).all(1)


def _log_1m_exp(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(values)) for values of at most 0; 0 counts as the largest float32 below it."""
    return torch.log(-torch.expm1(values.clamp(max=-torch.finfo(torch.float32).smallest_normal)))
