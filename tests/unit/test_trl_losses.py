"""Losses and gradients of preference objectives equal those of TRL's trainers on the same log-probabilities.

TRL's loss functions run as they are, on a trainer without its constructor and a model that returns given token
log-probabilities.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.config.schema.objective import DPOConfig, KTOConfig, ORPOConfig, PairLoss, SimPOConfig
from components.data.pairs import DESIRABLE
from components.training import DPO, KTO, ORPO, Preference, SimPO
from components.training.objectives import RowScores
from components.training.objectives.preference import REFERENCE

pytest.importorskip("trl", reason="the extra `dev` is not installed; make install-dev installs it")

PAIRS, SEQ = 4, 12
LENGTHS = torch.tensor([[5, 7], [3, 3], [8, 2], [1, 6]])  # (pairs, 2): chosen, rejected


def drawn(seed: int) -> torch.Tensor:
    """Token log-probabilities (2 x pairs, seq - 1), all chosen answers first; 0 outside of the answer."""
    generator = torch.Generator().manual_seed(seed)
    values = -2 * torch.rand(2 * PAIRS, SEQ - 1, generator=generator, dtype=torch.float64) - 0.1
    return values * completion_mask()[:, 1:]


def completion_mask() -> torch.Tensor:
    """(2 x pairs, seq) int64: the answers, after a prompt of two tokens."""
    positions, ends = torch.arange(SEQ), 2 + LENGTHS.T.reshape(-1, 1)
    return ((positions >= 2) & (positions < ends)).long()


def trainer(**attributes: Any) -> Any:
    """Attributes of a TRL trainer in one process."""

    def same(values: torch.Tensor) -> torch.Tensor:
        return values

    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)
    defaults = {
        "accelerator": accelerator, "model": SimpleNamespace(training=True), "args": SimpleNamespace(),
        "aux_loss_enabled": False, "precompute_ref_logps": True, "ld_alpha": None, "use_weighting": False,
        "f_divergence_type": "reverse_kl", "loss_weights": [1.0], "label_smoothing": 0.0, "alpha": 0.0,
        "_metrics": defaultdict(lambda: defaultdict(list)), "_total_train_tokens": 0, "_tp_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **attributes})


def outputs(log_probs: torch.Tensor) -> Any:
    return SimpleNamespace(
        log_probs=log_probs, entropy=log_probs.detach(), mean_logits=log_probs.detach(), is_top1=log_probs.detach() > -1
    )


def inputs(**others: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = completion_mask()
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask, "completion_mask": mask, **others}


def ours(
    objective: Preference, log_probs: torch.Tensor, reference: torch.Tensor, rows: torch.Tensor, **values: Any
) -> Any:
    """Return our mean loss and its gradient by the token log-probabilities.

    Args:
        rows: Index of each of our rows in `log_probs`, (rows,).
    """
    lengths = completion_mask().sum(1).double()
    scores = RowScores(log_probs.sum(1)[rows], lengths[rows], {REFERENCE: reference.sum(1)[rows], **values})
    weights = objective.weights(scores, objective.step_sums(scores))
    gradient, mask = torch.zeros_like(log_probs), completion_mask()[:, 1:].double()
    gradient.index_add_(0, rows, -weights.factors[:, None] * mask[rows])
    units = len(rows) // 2
    return weights.loss_sum / units, gradient / units


def check(got: tuple[torch.Tensor, torch.Tensor], loss: torch.Tensor, log_probs: torch.Tensor, bound: float) -> None:
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert float(got[0]) == pytest.approx(loss.item(), rel=bound)
    masked = gradient * completion_mask()[:, 1:]
    assert float((got[1] - masked).norm() / masked.norm()) < bound


NEIGHBORS = torch.arange(2 * PAIRS).view(2, PAIRS).T.flatten()
"""The chosen and the rejected answer of each pair side by side."""


@pytest.mark.parametrize("loss_type", list(PairLoss))
def test_dpo_losses_equal_those_of_trl(loss_type: PairLoss) -> None:
    from trl import DPOTrainer

    log_probs, reference = drawn(1).requires_grad_(), drawn(2)
    chosen, rejected = reference.sum(1).chunk(2)
    fake = trainer(beta=0.3, loss_types=[str(loss_type)])
    batch = inputs(ref_chosen_logps=chosen, ref_rejected_logps=rejected)
    loss = DPOTrainer._compute_loss(fake, lambda **_: outputs(log_probs), batch, False)
    got = ours(DPO(DPOConfig(beta=0.3, loss=loss_type)), log_probs.detach(), reference, NEIGHBORS)
    check(got, loss, log_probs, 1e-12)


def test_label_smoothing_equals_that_of_trl() -> None:
    """TRL has it in CPO's loss, which is DPO's loss of log-probabilities in place of log-ratios."""
    from trl.experimental.cpo import CPOTrainer

    log_probs, reference = drawn(1).requires_grad_(), drawn(2)
    fake = trainer(beta=0.3, loss_type="sigmoid", label_smoothing=0.1)
    loss = CPOTrainer.cpo_loss(fake, *(log_probs - reference).sum(1).chunk(2))[0].mean()
    got = ours(DPO(DPOConfig(beta=0.3, label_smoothing=0.1)), log_probs.detach(), reference, NEIGHBORS)
    check(got, loss, log_probs, 1e-12)


def test_simpo_equals_that_of_trl() -> None:
    from trl.experimental.cpo import CPOTrainer

    log_probs = drawn(1).requires_grad_()
    fake = trainer(beta=2.5, loss_type="simpo", simpo_gamma=0.8)
    loss = CPOTrainer.cpo_loss(fake, *(log_probs.sum(1) / completion_mask().sum(1)).chunk(2))[0].mean()
    check(
        ours(SimPO(SimPOConfig(beta=2.5, gamma=0.8)), log_probs.detach(), drawn(2), NEIGHBORS), loss, log_probs, 1e-12
    )


def test_odds_ratio_of_orpo_equals_that_of_trl() -> None:
    """Without the term of supervised fine-tuning, which TRL averages over the tokens of prompts as well."""
    from trl.experimental.orpo import ORPOTrainer

    log_probs = drawn(1).requires_grad_()
    means = (log_probs.sum(1) / completion_mask().sum(1)).chunk(2)
    loss = -ORPOTrainer.odds_ratio_loss(trainer(beta=0.25), *means)[0].mean()
    got = ours(ORPO(ORPOConfig(beta=0.25, sft_weight=0.0)), log_probs.detach(), drawn(2), NEIGHBORS)
    check(got, loss, log_probs, 1e-5)  # TRL computes it in float32


def test_kto_equals_that_of_trl() -> None:
    from trl import KTOTrainer

    log_probs, reference = drawn(1).requires_grad_(), drawn(2)
    labels = torch.tensor([1, 0, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
    mismatched = torch.arange(2 * PAIRS).roll(-1)  # any other answer
    fake = trainer(
        beta=0.5, loss_type="kto", desirable_weight=1.2, undesirable_weight=0.9, calculate_KL=True,
        _compute_kl_logps=lambda model, batch: log_probs.detach().sum(1)[mismatched],
    )  # fmt: skip
    batch = inputs(label=labels, ref_logps=reference.sum(1), ref_KL_logps=reference.sum(1)[mismatched])
    loss = KTOTrainer._compute_loss(fake, lambda **_: outputs(log_probs), batch, False)
    rows = torch.stack([torch.arange(2 * PAIRS), mismatched], dim=1).flatten()
    objective = KTO(KTOConfig(beta=0.5, desirable_weight=1.2, undesirable_weight=0.9))
    got = ours(objective, log_probs.detach(), reference, rows, **{DESIRABLE: labels.double().repeat_interleave(2)})
    check(got, loss, log_probs, 1e-12)
