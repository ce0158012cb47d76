"""The divergence from a teacher's k most likely tokens against autograd of the formula on k + 1 outcomes."""

from __future__ import annotations

import itertools

import pytest
import torch

from components.batch import bits_of
from components.config.schema.objective import DistillationConfig, Divergence
from components.config.teacher_files import LOG_PROBS, TARGET_LOG_PROB, TOKEN_IDS
from components.training.objectives.contract import NOT_SHARDED
from components.training.objectives.distillation import DistillationLoss, TopK, find_top_k, top_k_divergence

TOKENS, VOCABULARY = 7, 23


def logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(TOKENS, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def outcomes(probabilities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Probabilities of each of the k tokens and of any other token, (tokens, k + 1)."""
    of_k = probabilities.gather(1, ids)
    return torch.cat([of_k, 1 - of_k.sum(-1, keepdim=True)], dim=1)


def formula(kind: Divergence, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if kind == Divergence.forward_kl:
        return (p * (p / q).log()).sum(-1)
    if kind == Divergence.reverse_kl:
        return (q * (q / p).log()).sum(-1)
    middle = (p + q) / 2
    return ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1)) / 2


@pytest.mark.parametrize(("kind", "k"), itertools.product(Divergence, [1, 5, VOCABULARY - 1, VOCABULARY]))
def test_value_and_gradient_are_those_of_the_formula(kind: Divergence, k: int) -> None:
    teacher, student = logits(0), logits(1).requires_grad_()
    p = teacher.softmax(-1)
    ids = p.topk(k).indices
    if k == VOCABULARY:
        expected = formula(kind, p, student.softmax(-1))
    else:
        expected = formula(kind, outcomes(p, ids), outcomes(student.softmax(-1), ids))
    (gradient,) = torch.autograd.grad(expected.sum(), student)

    stored = find_top_k(teacher.log_softmax(-1), k, NOT_SHARDED)
    assert torch.equal(stored.ids, ids)
    got, got_gradient = top_k_divergence(kind, stored, student.detach().log_softmax(-1), NOT_SHARDED)
    torch.testing.assert_close(got, expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got_gradient, gradient, rtol=1e-10, atol=1e-10)


def test_forward_kl_has_the_published_gradient() -> None:
    teacher, student = logits(2), logits(3)
    p, q = teacher.softmax(-1), student.softmax(-1)
    stored = find_top_k(teacher.log_softmax(-1), 4, NOT_SHARDED)
    _, gradient = top_k_divergence(Divergence.forward_kl, stored, student.log_softmax(-1), NOT_SHARDED)
    in_k = torch.zeros_like(p, dtype=torch.bool).scatter(1, stored.ids, True)
    p_rest, q_rest = ((each * ~in_k).sum(-1, keepdim=True) for each in (p, q))
    expected = torch.where(in_k, q - p, q - p_rest * q / q_rest)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_a_tiny_remaining_probability_is_exact() -> None:
    """1 - the sum of the k probabilities would be 0 in float32."""
    teacher = torch.zeros(1, VOCABULARY)
    teacher[0, 0] = 40.0
    stored = find_top_k(teacher.log_softmax(-1), 1, NOT_SHARDED)
    expected = teacher.double().log_softmax(-1)[0, 1:].logsumexp(-1)
    assert stored.log_probs[0, 1].item() == pytest.approx(expected.item(), rel=1e-6)
    student = teacher.flip(1)
    value, gradient = top_k_divergence(Divergence.forward_kl, stored, student.log_softmax(-1), NOT_SHARDED)
    assert value.item() == pytest.approx(40, rel=1e-5)
    assert gradient.isfinite().all()


def test_loss_of_stored_values_mixes_temperature_and_cross_entropy() -> None:
    cfg = DistillationConfig(temperature=2.0, cross_entropy_weight=0.25)
    teacher, student = logits(4), logits(5).requires_grad_()
    targets = torch.tensor([3, -100, 0, 22, 7, -100, 11])
    stored = find_top_k((teacher / 2).log_softmax(-1), 6, NOT_SHARDED)
    log_probs = stored.log_probs.float()
    of_targets = teacher.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0].float() * (targets >= 0)
    values = {LOG_PROBS: log_probs, TOKEN_IDS: stored.ids.int(), TARGET_LOG_PROB: of_targets}

    p = log_probs.double().softmax(-1)  # rounded to float32 as stored
    kept = targets >= 0
    apart = formula(Divergence.forward_kl, p, outcomes((student / 2).softmax(-1), stored.ids))[kept].sum()
    entropy = torch.nn.functional.cross_entropy(student[kept], targets[kept], reduction="sum")
    expected = 0.75 * 4 * apart + 0.25 * entropy
    (gradient,) = torch.autograd.grad(expected, student)

    loss = DistillationLoss(cfg)
    got, got_gradient = loss.of_chunk(
        student.detach(),
        targets,
        NOT_SHARDED,
        None,
        {name: bits_of(value) for name, value in values.items()},
        per_token=False,
        with_gradient=True,
    )
    assert got.item() == pytest.approx(expected.item(), rel=1e-10)
    assert got_gradient is not None
    torch.testing.assert_close(got_gradient[kept], gradient[kept], rtol=1e-10, atol=1e-12)
    assert got_gradient.isfinite().all()
    sums = [apart.item(), entropy.item(), -of_targets.double().sum().item()]
    assert loss.sums is not None
    assert loss.sums.tolist() == pytest.approx(sums, rel=1e-10)


def test_positions_without_a_target_have_finite_gradients() -> None:
    """Their stored values are zeros: k times the token 0."""
    empty = {LOG_PROBS: torch.zeros(TOKENS, 4).view(torch.int32), TOKEN_IDS: torch.zeros(TOKENS, 3, dtype=torch.int32)}
    stored = TopK.of_chunk(empty, torch.float64)
    for kind in Divergence:
        value, gradient = top_k_divergence(kind, stored, logits(6).log_softmax(-1), NOT_SHARDED)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
