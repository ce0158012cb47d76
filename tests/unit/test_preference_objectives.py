"""Preference objectives on given log-probabilities: row weights against automatic differentiation of the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from components.config.schema.objective import DPOConfig, KTOConfig, ORPOConfig, PairLoss, SimPOConfig
from components.data.pairs import DESIRABLE
from components.training import DPO, KTO, ORPO, SimPO
from components.training.objectives import RowScores
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from components.training.objectives.preference import REFERENCE


def scores(log_probs: list[float], reference: list[float], lengths: list[float], desirable: list[float]) -> RowScores:
    def vector(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    values = {REFERENCE: vector(reference), DESIRABLE: vector(desirable)}
    return RowScores(vector(log_probs), vector(lengths), values)


def test_kto_subtracts_the_reference_point_of_all_ranks_without_differentiating_it() -> None:
    """Two answers on this rank, two on another one whose sums arrive by `step_sums`; the last unit is padding."""
    objective = KTO(KTOConfig(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5))
    here = scores([-10, -7, -12, -9, 0, 0], [-11, -9, -10, -12, 0, 0], [5, 4, 6, 3, 0, 0], [1, 1, 0, 0, 0, 0])
    assert objective.step_sums(here).tolist() == [2 + 3, 2]
    weights = objective.weights(here, torch.tensor([6.0, 4.0], dtype=torch.float64))
    point, sigmoid = 6 / 4, lambda value: 1 / (1 + torch.exp(torch.tensor(-value, dtype=torch.float64)))
    good, bad = sigmoid(0.5 * (1 - point)), sigmoid(0.5 * (point - -2))
    assert weights.loss_sum.item() == pytest.approx(float(1.5 * (1 - good) + 0.5 * (1 - bad)), rel=1e-14)
    expected = [float(1.5 * 0.5 * good * (1 - good)), 0, -float(0.5 * 0.5 * bad * (1 - bad)), 0, 0, 0]
    assert weights.factors.tolist() == pytest.approx(expected, rel=1e-14)
    assert weights.every == 2
    assert weights.metrics["kl"].item() == 2 * point  # a sum over the units of this rank
    assert weights.metrics["accuracy"].item() == 1


def test_kto_reference_point_is_at_least_zero() -> None:
    objective = KTO(KTOConfig(beta=0.5))
    here = scores([-10, -9, -12, -9], [-11, -7, -10, -8], [5, 4, 6, 3], [1, 1, 0, 0])
    weights = objective.weights(here, objective.step_sums(here))
    assert weights.metrics["kl"].item() == 0
    with pytest.raises(ValueError, match="step_sums"):
        objective.weights(here)


@pytest.mark.parametrize(
    "objective",
    [
        DPO(DPOConfig(beta=0.3, label_smoothing=0.1)),
        DPO(DPOConfig(beta=0.3, loss=PairLoss.hinge, sft_weight=0.5)),
        DPO(DPOConfig(beta=0.3, loss=PairLoss.ipo)),
        SimPO(SimPOConfig()),
        ORPO(ORPOConfig()),
    ],
)
def test_row_weights_are_minus_the_derivative_of_the_loss(objective: DPO | SimPO | ORPO) -> None:
    rows = ([-10.0, -14, -3, -2, 0, 0], [-11.0, -13, -4, -2.5, 0, 0], [5.0, 4, 6, 3, 0, 0])
    weights = objective.weights(scores(*rows, [0.0] * 6))
    assert weights.factors[4:].tolist() == [0, 0]  # padding
    for row in range(4):
        change = 1e-6
        losses = []
        for sign in (1, -1):
            moved = list(rows[0])
            moved[row] += sign * change
            losses.append(objective.weights(scores(moved, rows[1], rows[2], [0.0] * 6)).loss_sum.item())
        assert weights.factors[row].item() == pytest.approx(-(losses[0] - losses[1]) / (2 * change), abs=1e-8)


def orpo_of_logits(logits: torch.Tensor, targets: torch.Tensor, method: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ORPO's loss of logits (2, seq, vocabulary) and their gradient, as a training step computes them."""
    objective = ORPO(ORPOConfig(beta=0.1))
    identity = torch.eye(logits.shape[-1], dtype=logits.dtype)
    values = logits.clone().requires_grad_()

    def per_token(weights: torch.Tensor | None) -> torch.Tensor:
        if method == "logits":
            loss = objective.token_loss
            return loss.per_token(values, targets) if weights is None else loss.of_logits(values, targets, weights)
        flat = Targets(targets.flatten(), None, None if weights is None else weights.flatten())
        losses = linear_token_loss(
            values.flatten(0, 1), identity, None, flat, Head(), objective.token_loss, per_token=weights is None
        )
        return losses.view(targets.shape) if weights is None else losses

    is_target = targets != -100
    with torch.no_grad():
        log_probs = -per_token(None).double().sum(1)
    rows = objective.weights(RowScores(log_probs, is_target.sum(1).double(), {}))
    per_token(rows.factors[:, None] * is_target).backward()
    return rows.loss_sum, values.grad


@pytest.mark.parametrize("certain", [12.0, 17.0, 40.0])
@pytest.mark.parametrize("method", ["logits", "chunked"])
def test_orpo_of_a_nearly_certain_answer_is_that_of_float64(method: str, certain: float) -> None:
    """The rejected answer's log-probability rounds to 0 in float32; 1 - its probability must not."""
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, 3, -100], [4, 5, 0, -100]])
    logits[1] += certain * torch.nn.functional.one_hot(targets[1].clamp(min=0), 6)
    exact = logits.double().requires_grad_()
    others = exact.scatter(2, targets.clamp(min=0)[..., None], -torch.inf).logsumexp(-1)
    target_logits = exact.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    means = -((others - target_logits).exp().log1p() * (targets >= 0)).sum(1) / 3  # log p = -log(1 + odds of others)
    log_odds = means - (-means.expm1()).log()
    loss = -0.1 * torch.nn.functional.logsigmoid(log_odds[0] - log_odds[1]) - means[0]
    loss.backward()
    ours, gradient = orpo_of_logits(logits, targets, method)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient, exact.grad.float(), rtol=1e-4, atol=1e-6)


def test_kto_loss_of_a_large_margin_does_not_round_to_zero() -> None:
    rows = scores([-10, -7], [-60, -7], [5, 4], [1, 1])
    weights = KTO(KTOConfig(beta=1.0)).weights(rows, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert weights.loss_sum.item() == pytest.approx(1 / (1 + math.exp(50)), rel=1e-12, abs=0)
    assert weights.factors[0].item() == pytest.approx(weights.loss_sum.item(), rel=1e-12, abs=0)


def test_orpo_is_finite_for_answers_of_probability_one() -> None:
    weights = ORPO(ORPOConfig()).weights(scores([0.0, 0.0, -1e-18, -3.0], [0.0] * 4, [5.0] * 4, [0.0] * 4))
    assert torch.isfinite(weights.loss_sum)
    assert torch.isfinite(weights.factors).all()
