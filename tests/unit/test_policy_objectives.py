"""Losses, gradients and advantages of sampled answers equal TRL's, in float64, where TRL's own normalization is exact.

TRL's `_compute_loss` runs as it is on attributes instead of a trainer, with the log-probabilities of given logits. It
sees what its trainer would see: two processes with two micro-batches of three answers each, whose gradients are
averaged over processes and summed over micro-batches. Meshbook sees the whole step, in chunks that straddle answers.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from components.config.schema.data import IGNORED
from components.config.schema.objective import (
    AdvantageScale,
    Baseline,
    CISPOConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    KLEstimator,
    PolicyConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from components.config.schema.rollouts import Normalization, RolloutsConfig
from components.training.objectives.base import Chunk, RowScores, Vocabulary
from components.training.objectives.policy import (
    ADVANTAGE,
    OLD,
    REFERENCE_TOKENS,
    WEIGHT,
    SequencePolicy,
    TokenPolicy,
    advantages_of,
    summed_rewards,
)

PROCESSES, MICRO, ROWS, SEQ, VOCABULARY = 2, 2, 3, 7, 11
ANSWERS = PROCESSES * MICRO * ROWS
LENGTHS = torch.tensor([7, 2, 5, 1, 7, 3, 6, 4, 7, 2, 3, 5])
CUT = LENGTHS == SEQ
EXACT = 1e-15
DIFFERENT = 1e-3
"""A loss with another normalization differs by more than this."""
ROLLOUTS = RolloutsConfig(max_new_tokens=SEQ, group=4, batches=2)


class Step:
    """Answers of a step with random logits, and log-probabilities under other weights near them."""

    def __init__(self, seed: int = 0, temperature: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.temperature = temperature
        self.logits = normal(ANSWERS, SEQ, VOCABULARY)
        self.tokens = torch.randint(0, VOCABULARY, (ANSWERS, SEQ), generator=generator)
        self.mask = (torch.arange(SEQ)[None] < LENGTHS[:, None]).long()
        log_probs = self.of(self.logits)
        self.old, self.reference = log_probs + 0.3 * normal(ANSWERS, SEQ), log_probs + 0.3 * normal(ANSWERS, SEQ)
        rewards = torch.rand(ANSWERS, generator=generator, dtype=torch.float64).numpy()
        advantages = advantages_of(GRPOConfig(), rewards, 4, [1] * ANSWERS)
        self.advantages = torch.tensor(np.concatenate(advantages))

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        log_probs = (logits / self.temperature).log_softmax(-1)
        return log_probs.gather(2, self.tokens[: len(logits), :, None])[..., 0]


def trl(
    step: Step, kind: str, *, cfg: PolicyConfig, level: str = "token", other_tokens: int = 0, cut: bool = False
) -> tuple[float, torch.Tensor]:
    """TRL's loss, and the gradient of all logits as its trainer has it after a step."""
    from trl import GRPOTrainer, RLOOTrainer

    used = step.mask * (~CUT)[:, None] if cut else step.mask
    total, gradient = 0.0, torch.zeros_like(step.logits)
    accelerator = SimpleNamespace(
        num_processes=PROCESSES, gather=lambda each: each, reduce=lambda each, reduction: each, sync_gradients=True
    )
    for process in range(PROCESSES):
        for micro in range(MICRO):
            start = (process * MICRO + micro) * ROWS
            rows = slice(start, start + ROWS)
            leaf = step.logits[rows].clone().requires_grad_()
            own = (leaf / step.temperature).log_softmax(-1).gather(2, step.tokens[rows][..., None])[..., 0]
            trainer: Any = SimpleNamespace(
                _get_per_token_logps_and_entropies=lambda *a, own=own, **k: (own, torch.zeros_like(own), None),
                aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
                importance_sampling_level=level, beta=cfg.beta, loss_type=kind, epsilon_low=cfg.clip_low,
                epsilon_high=1 + cfg.clip_high if kind == "cispo" else cfg.clip_high,
                args=SimpleNamespace(
                    delta=None, use_bias_correction_kl=False, steps_per_generation=MICRO * (2 if other_tokens else 1)
                ),
                model=SimpleNamespace(training=True), current_gradient_accumulation_steps=MICRO,
                max_completion_length=SEQ, accelerator=accelerator, _entropy_bonus_enabled=False, use_vllm=False,
                vllm_importance_sampling_correction=False, _metrics=defaultdict(lambda: defaultdict(list)),
            )  # fmt: skip
            inputs = {
                "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
                "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
                "completion_ids": step.tokens[rows],
                "completion_mask": used[rows],
                "advantages": step.advantages[rows],
                "old_per_token_logps": step.old[rows],
                "ref_per_token_logps": step.reference[rows],
                "num_items_in_batch": used.sum().double() + other_tokens,
                "old_logps": (step.old * step.mask)[rows].sum(1),
            }
            loss = (RLOOTrainer if kind == "rloo" else GRPOTrainer)._compute_loss(trainer, None, inputs)
            if kind == "rloo":
                loss = loss / MICRO  # by transformers' Trainer
            loss.backward()
            gradient[rows] += leaf.grad / PROCESSES
            total += loss.item() / PROCESSES
    return total, gradient


def ours(step: Step, cfg: PolicyConfig, *, cut: bool = False) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a step: sums over chunks of ten tokens, divided once by the units of the step."""
    policy = TokenPolicy(cfg, replace(ROLLOUTS, temperature=step.temperature))
    targets = step.tokens.masked_fill(step.mask == 0, IGNORED)
    if cut:
        targets = targets.masked_fill(CUT[:, None], IGNORED)
    units = ANSWERS if policy.unit == "answer" else int((targets != IGNORED).sum())
    weights = [[policy.token_weight(length)] * SEQ for length in LENGTHS.tolist()]
    values = {
        ADVANTAGE: step.advantages[:, None].expand(-1, SEQ), OLD: step.old, REFERENCE_TOKENS: step.reference,
        WEIGHT: torch.tensor(weights, dtype=torch.float64),
    }  # fmt: skip
    bits = {name: each.contiguous().view(torch.int64).flatten() for name, each in values.items()}
    total, gradient = 0.0, torch.zeros_like(step.logits).flatten(0, 1)
    for start in range(0, ANSWERS * SEQ, 10):
        part = slice(start, start + 10)
        chunk = Chunk(
            step.logits.flatten(0, 1)[part].clone(), targets.flatten()[part], Vocabulary(),
            values={name: each[part] for name, each in bits.items()},
        )  # fmt: skip
        loss, grad = policy.token_loss.of_chunk(chunk)
        total += loss.item()
        gradient[part] = grad * (targets.flatten()[part] != IGNORED)[:, None]  # as the loss head does
    return total / units, gradient.view_as(step.logits) / units


def ours_of_answers(step: Step, cfg: PolicyConfig) -> tuple[float, torch.Tensor]:
    """Loss and gradient by two passes: factors of answers, then weighted token losses."""
    log_probs = (step.of(step.logits) * step.mask).sum(1)
    values = {ADVANTAGE: step.advantages, OLD: (step.old * step.mask).sum(1)}
    weighted = SequencePolicy(cfg, ROLLOUTS).weights(RowScores(log_probs, LENGTHS.double(), values))
    leaf = step.logits.clone().requires_grad_()
    (weighted.factors[:, None] * -step.of(leaf) * step.mask).sum().backward()
    return weighted.loss_sum.item() / ANSWERS, leaf.grad / ANSWERS


def gap(theirs: tuple[float, torch.Tensor], own: tuple[float, torch.Tensor]) -> float:
    """Largest difference of the loss and of its gradient."""
    return max(abs(theirs[0] - own[0]), float((theirs[1] - own[1]).abs().max()))


WIDE = {"clip_low": 0.2, "clip_high": 0.28}
TOKEN_LOSSES: dict[str, tuple[str, PolicyConfig, bool]] = {
    "grpo": ("grpo", GRPOConfig(**WIDE), False),
    "grpo, KL in the loss (k3)": ("grpo", GRPOConfig(**WIDE, beta=0.1), False),
    "grpo, cut answers masked": ("grpo", GRPOConfig(**WIDE), True),
    "dr_grpo": ("dr_grpo", DrGRPOConfig(**WIDE), False),
    "dapo": ("dapo", DAPOConfig(**WIDE), False),
    "dapo, cut answers masked": ("dapo", DAPOConfig(**WIDE), True),
    "cispo": ("cispo", CISPOConfig(clip_high=0.28), False),
    "cispo, KL in the loss (k3)": ("cispo", CISPOConfig(clip_high=0.28, beta=0.1), False),
}
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="the extra `dev` is not installed; make install-dev installs it"
)


@needs_trl
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_token_losses_equal_trl(name: str, temperature: float) -> None:
    kind, cfg, cut = TOKEN_LOSSES[name]
    step = Step(temperature=temperature)
    assert gap(trl(step, kind, cfg=cfg, cut=cut), ours(step, cfg, cut=cut)) < EXACT


@needs_trl
@pytest.mark.parametrize(
    ("kind", "level", "cfg"),
    [("grpo", "sequence", GSPOConfig(**WIDE)), ("rloo", "token", RLOOConfig(**WIDE))],
    ids=["gspo", "rloo"],
)
def test_losses_of_whole_answers_equal_trl(kind: str, level: str, cfg: PolicyConfig) -> None:
    step = Step()
    assert gap(trl(step, kind, cfg=cfg, level=level), ours_of_answers(step, cfg)) < EXACT


@needs_trl
@pytest.mark.parametrize(
    ("kind", "other_tokens", "cfg"), [("bnpo", 0, DAPOConfig(**WIDE)), ("dapo", 80, DAPOConfig(**WIDE))]
)
def test_trl_differs_where_its_normalization_depends_on_micro_batches(
    kind: str, other_tokens: int, cfg: PolicyConfig
) -> None:
    """Control: the comparison sees a wrong denominator, that of a micro-batch and that of two steps."""
    step = Step()
    assert gap(trl(step, kind, cfg=cfg, other_tokens=other_tokens), ours(step, cfg)) > DIFFERENT


@pytest.mark.parametrize("planted", ["clip", "weight", "advantage"])
def test_comparison_sees_a_planted_fault(planted: str) -> None:
    step, cfg = Step(), GRPOConfig(**WIDE)
    right = ours(step, cfg)
    if planted == "clip":
        cfg = GRPOConfig(clip_low=0.2, clip_high=0.2)
    elif planted == "weight":
        cfg = DrGRPOConfig(**WIDE)
    else:
        step.advantages = step.advantages.roll(1)
    assert gap(ours(step, cfg), right) > DIFFERENT


def test_answers_that_serve_one_update_have_the_gradient_of_reinforce() -> None:
    """Without old log-probabilities the ratio is 1: GSPO and RLOO are then sums of token losses, CISPO equals DAPO."""
    step = Step()
    step.old = step.of(step.logits)
    for cfg in (GSPOConfig(), RLOOConfig()):
        assert float((ours_of_answers(step, cfg)[1] - ours(step, cfg)[1]).abs().max()) < EXACT
    assert float((ours(step, CISPOConfig())[1] - ours(step, DAPOConfig())[1]).abs().max()) < EXACT
    leaf = step.logits.clone().requires_grad_()
    (-(step.of(leaf) * step.mask * step.advantages[:, None]).sum() / ANSWERS).backward()
    assert float((ours(step, RLOOConfig())[1] - leaf.grad).abs().max()) < EXACT


@pytest.mark.parametrize(("kl", "reverse"), [(KLEstimator.k2, True), (KLEstimator.k3, False)])
def test_gradient_of_the_kl_term_is_that_of_a_divergence(kl: KLEstimator, reverse: bool) -> None:
    """Summed over a distribution: of k2 that of KL(policy || reference), of k3 that of KL(reference || policy)."""
    generator = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, 1, VOCABULARY, generator=generator, dtype=torch.float64)
    leaf = p.clone().requires_grad_()
    log_p, log_q = leaf.log_softmax(-1), q.log_softmax(-1)
    divergence = log_p.exp() * (log_p - log_q) if reverse else log_q.exp() * (log_q - log_p)
    (expected,) = torch.autograd.grad(divergence.sum(), leaf)
    policy = TokenPolicy(GRPOConfig(beta=1.0, kl=kl), RolloutsConfig())
    ones = torch.ones(VOCABULARY, dtype=torch.float64)
    values = {ADVANTAGE: 0 * ones, REFERENCE_TOKENS: q.log_softmax(-1)[0], WEIGHT: p.softmax(-1)[0]}
    chunk = Chunk(
        p.expand(VOCABULARY, -1).clone(), torch.arange(VOCABULARY),
        values={name: each.contiguous().view(torch.int64) for name, each in values.items()},
    )  # fmt: skip
    _, gradient = policy.token_loss.of_chunk(chunk)
    assert float((gradient.sum(0) - expected[0]).abs().max()) < EXACT


def test_metrics_are_shares_of_tokens() -> None:
    step, cfg = Step(), GRPOConfig(beta=0.1)
    policy = TokenPolicy(cfg, ROLLOUTS)
    is_real, log_probs = step.mask.flatten() > 0, step.of(step.logits).flatten()
    values = {
        ADVANTAGE: step.advantages[:, None].expand(-1, SEQ).flatten(), OLD: step.old.flatten(),
        REFERENCE_TOKENS: step.reference.flatten(), WEIGHT: torch.ones(ANSWERS * SEQ, dtype=torch.float64),
    }  # fmt: skip
    targets = step.tokens.flatten().masked_fill(~is_real, IGNORED)
    bits = {name: each.contiguous().view(torch.int64) for name, each in values.items()}
    policy.token_loss.of_chunk(Chunk(step.logits.flatten(0, 1).clone(), targets, values=bits))
    sums = dict(zip(policy.metrics, policy.token_loss.take_sums(len(policy.metrics)).tolist(), strict=True))
    ratios, advantages = (log_probs - values[OLD]).exp(), values[ADVANTAGE]
    difference = values[REFERENCE_TOKENS] - log_probs
    distribution = torch.distributions.Categorical(logits=step.logits.flatten(0, 1))
    assert sums == pytest.approx({
        "entropy": float(distribution.entropy()[is_real].sum()),
        "clip_low": float(((ratios < 0.8) & (advantages < 0) & is_real).sum()),
        "clip_high": float(((ratios > 1.2) & (advantages > 0) & is_real).sum()),
        "kl_old": float((ratios - 1 - ratios.log())[is_real].sum()),
        "kl": float((difference.exp() - difference - 1)[is_real].sum()),
    })  # fmt: skip
    assert sums["clip_low"] > 0 < sums["clip_high"]


REWARDS = np.array([[1.0, 0.0, 0.5, 0.25, math.nan, 2.0, 2.0, -1.0, 3.0, math.nan, math.nan, math.nan],
                    [0.0, 0.1, math.nan, 0.3, math.nan, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]])  # fmt: skip
"""(functions, answers) in groups of four; the fifth answer has no reward."""
FACTORS = [1.0, 0.5]


@needs_trl
@pytest.mark.parametrize("scale", AdvantageScale)
@pytest.mark.parametrize("normalize", Normalization)
def test_advantages_equal_trl(scale: AdvantageScale, normalize: Normalization) -> None:
    """As TRL computes them from the rewards of all processes; its deviations have a factor in float32.

    With the deviations of numpy in its place they are equal in float64.
    """
    from trl.trainer import utils

    for nanstd, bound in ((utils.nanstd, 1e-7), (_numpy_deviation, 1e-14)):
        _compare_advantages(scale, normalize, nanstd, bound)


def _numpy_deviation(values: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # of single values, whose deviation is NaN
        return torch.as_tensor(np.nanstd(values.numpy(), axis=dim, ddof=1, keepdims=keepdim))


def _compare_advantages(scale: AdvantageScale, normalize: Normalization, nanstd: Any, bound: float) -> None:
    weights, values = torch.tensor(FACTORS, dtype=torch.float64), torch.from_numpy(REWARDS.T)
    unknown = values.isnan().all(1)
    if normalize is Normalization.sum_then_normalize:
        rewards = (values * weights).nansum(1).masked_fill(unknown, math.nan)
        expected = rewards - rewards.view(-1, 4).nanmean(1).repeat_interleave(4)
        if scale is AdvantageScale.group:
            expected /= nanstd(rewards.view(-1, 4), dim=1).repeat_interleave(4) + 1e-4
        elif scale is AdvantageScale.batch:
            expected /= nanstd(rewards) + 1e-4
        cfg, scores = GRPOConfig(scale=scale), summed_rewards(REWARDS, FACTORS, normalize, 4)
    else:
        grouped = values.view(-1, 4, 2)
        each = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
        sums = (each.view(-1, 2) * weights).nansum(1).masked_fill(unknown, math.nan)
        expected = (sums - sums.nanmean()) / (nanstd(sums) + 1e-4)
        cfg = GRPOConfig(scale=AdvantageScale.none, baseline=Baseline.none)
        scores = summed_rewards(REWARDS, FACTORS, normalize, 4)
    found = np.concatenate(advantages_of(cfg, scores, 4, [1] * 12))
    assert np.abs(found - expected.nan_to_num(0).numpy()).max() < bound
    assert found[4] == 0
    assert np.abs(found).max() > 0.1


def test_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    rewards = np.array([1.0, 2.0, 6.0, math.nan, 5.0, math.nan, math.nan, math.nan])
    found = np.concatenate(advantages_of(RLOOConfig(), rewards, 4, [1] * 8))
    assert found.tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0, 0, 0])


def test_kl_in_the_reward_is_subtracted_before_the_baseline() -> None:
    kl = [np.array([0.1, 0.2]), np.array([1.0]), np.array([0.0, 0.0, 0.5]), np.array([0.0])]
    found = advantages_of(RLOOConfig(beta=2.0), np.array([1.0, 0.0, 1.0, 0.0]), 4, [2, 1, 3, 1], kl)
    rewards = [1 - 0.6, -2.0, 0.0, 0.0]
    expected = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    assert [len(each) for each in found] == [2, 1, 3, 1]
    assert np.concatenate(found).tolist() == pytest.approx(np.repeat(expected, [2, 1, 3, 1]).tolist())


def test_reinforce_pp_standardizes_the_returns_of_all_tokens() -> None:
    kl = [np.array([0.1, 0.2, 0.3]), np.array([0.5]), np.array([0.0, 0.4])]
    rewards = np.array([1.0, 0.0, math.nan])
    found = advantages_of(ReinforcePPConfig(beta=1.0), rewards, 1, [3, 1, 2], kl)
    returns = np.array([1 - 0.6, 1 - 0.5, 1 - 0.3, -0.5])  # reward at the last token - what follows of the divergence
    expected = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-4)
    assert np.concatenate(found).tolist() == pytest.approx([*expected, 0.0, 0.0])


def test_equal_rewards_have_no_advantage() -> None:
    """Also where the mean of equal numbers would round, as in float32."""
    for cfg in (GRPOConfig(), DrGRPOConfig(), RLOOConfig()):
        found = np.concatenate(advantages_of(cfg, np.full(12, 0.1), 12, [1] * 12))
        assert np.abs(found).max() < 1e-12
