"""Objectives of recipes/grpo.py: losses of sampled answers, weighted by advantages that follow from their rewards.

A `TokenPolicy` is a function of the log-probability of each token, with one pass (GRPO, Dr. GRPO, DAPO, CISPO and
REINFORCE++); a `SequencePolicy` is one of whole answers, with two (GSPO and RLOO, if answers serve several updates).
Log-probabilities are those at the temperature of sampling, under the weights in training (new), under those that
sampled the answers (old), and under the reference.

Rewards and advantages are computed on the host in float64, from the same list on every rank. So groups may straddle
ranks and micro-batches, and an advantage depends on no mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from components import models
from components.batch import Batch
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
    Reference,
    ReinforcePPConfig,
    RLOOConfig,
)
from components.config.schema.recipes import GrpoConfig, policy_reference
from components.config.schema.rollouts import Normalization, RolloutsConfig
from components.distributed.fsdp import reshard
from components.training.context import RunContext
from components.training.loss import count_targets
from components.training.objectives.base import (
    Chunk,
    RowObjective,
    RowScores,
    RowWeights,
    TokenLoss,
    TokenObjective,
    check_dropout,
)
from components.training.objectives.cross_entropy import log_softmax, sum_over_shards
from components.training.preparation import prepare_frozen
from components.training.prepared import Prepared
from components.training.step import score_tokens

ADVANTAGE, OLD, REFERENCE_TOKENS, WEIGHT = "advantage", "old_log_prob", "reference_log_prob", "weight"
"""Names in `Batch.token_values` of a token's advantage, its log-probability under the weights that sampled it and under
the reference, and its factor in the loss; the first two also in `Batch.rows`, of whole answers."""
COUNTS = "counts"
"""Name in `Batch.rows`: 1 for an answer, 0 for a row that only fills a micro-batch."""
ReferenceTokens = Callable[[Any, Batch, TokenLoss], torch.Tensor | None]
"""Function that returns the losses of a micro-batch's tokens (batch, seq) under the reference, given the trained model;
None on pipeline ranks without the last stage. A collective."""
_EPSILON = 1e-4
"""Added to the deviations that advantages are divided by, as in TRL."""


class SampledLoss(TokenLoss):
    """Loss that is a function of the log-probability of each target at a temperature; by default its negative.

    For another loss override `losses`; its gradient is derived.

    Args:
        temperature: Temperature at which the targets were sampled.
    """

    measures_entropy = False
    """Whether the first metric is the entropy of the distribution at each target, a pass more over the logits."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def losses(self, log_probs: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the losses of tokens, (tokens,), differentiable by `log_probs`, (tokens,).

        Args:
            values: `Batch.token_values` of the tokens by name, each (tokens,).
        """
        return -log_probs

    def metrics(self, log_probs: torch.Tensor, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of the objective's metrics besides the entropy, each (tokens,)."""
        return []

    def of_chunk(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss sum of a chunk of tokens and its gradient: see `TokenLoss`."""
        group, (index, is_local) = chunk.vocabulary.group, chunk.position()
        scores = chunk.scores if self.temperature == 1 else chunk.scores / self.temperature
        log_probs, _ = log_softmax(scores, group, with_log_sum=False)  # (tokens, this rank's vocabulary)
        chosen = sum_over_shards(log_probs.gather(1, index)[:, 0].where(is_local, 0), group)  # (tokens,)
        is_real = chunk.targets != IGNORED
        values = {name: each.view(torch.float64).to(scores.dtype) for name, each in chunk.values.items()}
        with torch.enable_grad():
            leaf = chosen.detach().requires_grad_()
            losses = self.losses(leaf, values).where(is_real, 0)
            if chunk.weights is not None:
                losses = losses * chunk.weights
            (slope,) = torch.autograd.grad(losses.sum(), leaf)  # (tokens,)
        losses, probabilities, entropies = losses.detach(), log_probs.exp(), list[torch.Tensor]()
        if self.measures_entropy:
            entropies = [sum_over_shards(-torch.linalg.vecdot(probabilities, log_probs), group)]
        if measured := [*entropies, *self.metrics(chosen, values)]:
            self.add_sums(*(each.where(is_real, 0).sum() for each in measured))
        gradient = None
        if chunk.with_gradient:
            slope = slope / self.temperature  # by the logits: slope x (one-hot of the target - probabilities)
            gradient = probabilities.mul_(-slope[:, None]).scatter_add_(1, index, (slope * is_local)[:, None])
        return losses if chunk.per_token else losses.sum(), gradient


class PolicyLoss(SampledLoss):
    """Loss of a token of a sampled answer: its policy term, plus beta x its KL term, times its factor.

    The policy term is -min(r x advantage, clip(r) x advantage), where r is the ratio of the new to the old probability;
    of CISPO it is -min(r, bound) x advantage x log-probability, whose first factor has no gradient. Without old
    log-probabilities the new ones count as such: r is 1, and its gradient is that of REINFORCE.
    """

    measures_entropy = True

    def __init__(self, cfg: PolicyConfig, rollouts: RolloutsConfig) -> None:
        super().__init__(rollouts.temperature)
        self._cfg, self._off_policy = cfg, rollouts.updates > 1
        self._adds_kl = cfg.beta > 0 and cfg.kl is not KLEstimator.k1

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics, means over tokens: entropy; the shares of clipped ratios and the KL divergence from the
        weights that sampled; the KL divergence from the reference."""
        drift = ("clip_low", "clip_high", "kl_old") if self._off_policy else ()
        return ("entropy", *drift, *(("kl",) if self._cfg.beta > 0 else ()))

    def losses(self, log_probs: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the losses of tokens, (tokens,): see `SampledLoss`."""
        cfg, advantages = self._cfg, values[ADVANTAGE]
        ratios = (log_probs - values.get(OLD, log_probs.detach())).exp()  # (tokens,)
        if isinstance(cfg, CISPOConfig):
            losses = -ratios.detach().clamp(max=1 + cfg.clip_high) * advantages * log_probs
        else:
            clipped = ratios.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
            losses = -torch.minimum(ratios * advantages, clipped * advantages)
        if self._adds_kl:
            difference = values[REFERENCE_TOKENS] - log_probs
            is_k2 = cfg.kl is KLEstimator.k2
            losses = losses + cfg.beta * (difference.square() / 2 if is_k2 else _k3(difference))
        return losses * values[WEIGHT]

    def metrics(self, log_probs: torch.Tensor, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the metrics after the entropy, each (tokens,): see `metric_names`."""
        measured = []
        if self._off_policy:
            difference = log_probs - values.get(OLD, log_probs)
            ratios, advantages = difference.exp(), values[ADVANTAGE]
            is_low = (ratios < 1 - self._cfg.clip_low) & (advantages < 0)
            is_high = (ratios > 1 + self._cfg.clip_high) & (isinstance(self._cfg, CISPOConfig) | (advantages > 0))
            measured = [is_low.double(), is_high.double(), _k3(difference)]
        if self._cfg.beta > 0:
            measured.append(_k3(values[REFERENCE_TOKENS] - log_probs))
        return measured


def _k3(difference: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 of d = log(q / p) at samples of p, an estimate of KL(p || q) that is never negative."""
    return difference.exp() - difference - 1


class TokenPolicy(TokenObjective):
    """Sum of token losses over answers, or over all their tokens, divided by the number of these in the step.

    Args:
        cfg: GSPO and RLOO are functions of answers, and equal to one of tokens where r is 1: on answers that serve one
            update.
        rollouts: How the answers are sampled.
    """

    metrics_per_target = True
    reference: ReferenceTokens | None = None
    """Scores tokens under the reference; None: there is none."""

    def __init__(self, cfg: PolicyConfig, rollouts: RolloutsConfig) -> None:
        self.cfg, self._max_new_tokens = cfg, rollouts.max_new_tokens
        self.unit = "target token" if isinstance(cfg, DAPOConfig | CISPOConfig | ReinforcePPConfig) else "answer"
        loss = PolicyLoss(cfg, rollouts)
        self.token_loss, self.metrics = loss, loss.metric_names

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of answers, or of their tokens, of a micro-batch, a float64 scalar on its device.

        Answers without targets count as answers (rollouts.overlong=mask).
        """
        return batch.rows[COUNTS].sum() if self.unit == "answer" else count_targets(batch.targets)

    def token_weight(self, length: int) -> float:
        """Return the factor of the loss of each token of an answer of `length` tokens."""
        if isinstance(self.cfg, GRPOConfig | GSPOConfig):
            return 1 / max(length, 1)
        return 1 / self._max_new_tokens if isinstance(self.cfg, DrGRPOConfig) else 1.0


class SequencePolicy(RowObjective):
    """Mean over answers of -min(r x advantage, clip(r) x advantage) with one ratio r for a whole answer.

    r is the ratio of the probabilities of the answer (RLOO), or its root of the number of tokens (GSPO).
    """

    unit = "answer"
    metrics = ("clip_low", "clip_high", "kl_old")
    reference: ReferenceTokens | None = None
    """Scores tokens under the reference; None: there is none."""

    def __init__(self, cfg: PolicyConfig, rollouts: RolloutsConfig) -> None:
        self.cfg, self.token_loss = cfg, SampledLoss(rollouts.temperature)

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of answers of a micro-batch, a float64 scalar on its device."""
        return batch.rows[COUNTS].sum()

    def token_weight(self, length: int) -> float:
        """Return 1: tokens have the factor of their answer."""
        return 1.0

    def weights(self, scores: RowScores, step_sums: torch.Tensor | None = None) -> RowWeights:
        """Return the loss of a step's answers on one rank, and the factor of each answer's token losses."""
        cfg, advantages = self.cfg, scores.values[ADVANTAGE]
        powers = torch.ones_like(scores.lengths)
        if isinstance(cfg, GSPOConfig):
            powers = 1 / scores.lengths.clamp(min=1)
        difference = (scores.log_probs - scores.values[OLD]) * powers
        ratios = difference.exp()  # (answers,)
        is_low = (ratios < 1 - cfg.clip_low) & (advantages < 0)
        is_high = (ratios > 1 + cfg.clip_high) & (advantages > 0)
        losses = -torch.minimum(ratios * advantages, ratios.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages)
        is_real = scores.lengths > 0
        factors = (advantages * ratios * powers).where(is_real & ~is_low & ~is_high, 0)
        metrics = {"clip_low": is_low.double(), "clip_high": is_high.double(), "kl_old": _k3(difference)}
        sums = {name: each.where(is_real, 0).sum() for name, each in metrics.items()}
        return RowWeights(losses.where(is_real, 0).sum(), factors, sums)


Policy = TokenPolicy | SequencePolicy
"""Objective of recipes/grpo.py."""


def build_policy(cfg: GrpoConfig, run: RunContext, model: Prepared, vocabulary: int) -> Policy:
    """Return the objective of a config. A collective if its reference is a second model, which it loads.

    For a loss of your own, set `token_loss` of the result to a subclass of PolicyLoss.

    Args:
        model: The model to be trained.
        vocabulary: Vocabulary size of the tokenizer, as for `prepare`.

    Raises ConfigError for a model with dropout.
    """
    objective, rollouts = cfg.objective, cfg.rollouts
    check_dropout(model.module, objective.kind)
    policy: Policy = TokenPolicy(objective, rollouts)
    if rollouts.updates > 1 and isinstance(objective, GSPOConfig | RLOOConfig):
        policy = SequencePolicy(objective, rollouts)
    method = policy_reference(cfg)
    if method is Reference.adapters_off:
        policy.reference = _tokens_without_adapters
    elif method is Reference.frozen_copy:
        copy = prepare_frozen(cfg, run, vocabulary)
        policy.reference = lambda trained, batch, loss: _tokens_of_copy(copy, batch, loss)
    if method is not None:
        model.notes.insert(0, ("reference", f"{cfg.model.origin}: log-probabilities of each batch ({method})"))
    return policy


def _tokens_without_adapters(trained: Prepared, batch: Batch, loss: TokenLoss) -> torch.Tensor | None:
    with models.adapters_off(trained.module):
        return score_tokens(trained, batch, loss)


def _tokens_of_copy(copy: Prepared, batch: Batch, loss: TokenLoss) -> torch.Tensor | None:
    losses = score_tokens(copy, batch, loss)
    for part in copy.called_modules:
        reshard(part)
    return losses


def advantages_of(
    cfg: PolicyConfig, rewards: np.ndarray, group: int, lengths: Sequence[int], kl: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Return the advantage of each token of each answer, (tokens,) float64 each, from the rewards of a whole batch.

    An answer without a reward, and one that alone has a reward in its group, have the advantage 0.

    Args:
        rewards: (answers,) float64, groups of neighbors; NaN: no reward, which is left out of all statistics.
        lengths: Tokens of each answer.
        kl: Estimates of the divergence of each token from the reference, (tokens,) of each answer; beta times of them
            is subtracted from the rewards. None: nothing is.
    """
    penalties = [np.zeros(length) for length in lengths] if kl is None else [cfg.beta * each for each in kl]
    if not isinstance(cfg, ReinforcePPConfig):
        scores = rewards - np.array([math.fsum(each) for each in penalties])
        centered = _centered(cfg, scores, group)
        return [np.full(length, value) for length, value in zip(lengths, centered, strict=True)]
    # What follows a token in its answer: the reward at the last token, and the penalties.
    scores = np.nan_to_num(_centered(cfg, rewards, group))
    returns = [score - each[::-1].cumsum()[::-1] for score, each in zip(scores, penalties, strict=True)]
    if cfg.scale is AdvantageScale.batch:
        known = [each for each, reward in zip(returns, rewards, strict=True) if not math.isnan(reward)]
        mean, deviation = _mean_and_deviation(np.concatenate([*known, np.zeros(0)]))
        returns = [(each - mean) / (deviation + _EPSILON) for each in returns]
    return [each * (not math.isnan(reward)) for each, reward in zip(returns, rewards, strict=True)]


def summed_rewards(rewards: np.ndarray, weights: Sequence[float], normalize: Normalization, group: int) -> np.ndarray:
    """Return the weighted sum of the rewards of several functions, (functions, answers) -> (answers,) float64.

    NaN, no reward, counts as nothing in the sum, which is NaN where no function has a reward.

    Args:
        weights: Factor of each function's rewards; 1 for those beyond its end.
        normalize: normalize_then_sum: standardize each function's rewards in its groups first, and the sums over the
            batch at last (GDPO).
    """
    factors = np.array([*weights, *[1.0] * (len(rewards) - len(weights))])
    normalizes = normalize is Normalization.normalize_then_sum
    is_known = ~np.isnan(rewards)
    if normalizes:
        rewards = np.array([_centered(GRPOConfig(), each, group) for each in rewards])
    sums = [math.fsum((each * factors)[known]) for each, known in zip(rewards.T, is_known.T, strict=True)]
    totals = np.where(is_known.any(0), sums, math.nan)
    if normalizes:
        mean, deviation = _mean_and_deviation(totals)
        totals = (totals - mean) / (deviation + _EPSILON)
    return totals


def _centered(cfg: PolicyConfig, rewards: np.ndarray, group: int) -> np.ndarray:
    """Return the rewards (answers,) without the baseline of their group, divided by the deviation; 0 without one."""
    result = np.zeros(len(rewards))
    _, of_batch = _mean_and_deviation(rewards)
    for start in range(0, len(rewards), group):
        part = rewards[start : start + group]
        mean, deviation = _mean_and_deviation(part)
        count = int((~np.isnan(part)).sum())
        if cfg.baseline is Baseline.none:
            centered = part
        elif count < 2:
            continue
        else:
            centered = (part - mean) * (count / (count - 1) if cfg.baseline is Baseline.leave_one_out else 1)
        if cfg.scale is AdvantageScale.group:
            centered = centered / (deviation + _EPSILON)
        elif cfg.scale is AdvantageScale.batch and not isinstance(cfg, ReinforcePPConfig):
            centered = centered / (of_batch + _EPSILON)
        result[start : start + group] = np.nan_to_num(centered)
    return result


def _mean_and_deviation(values: np.ndarray) -> tuple[float, float]:
    """Return the mean of values without NaN, and their standard deviation (n - 1); 0 of fewer than one or two."""
    known = values[~np.isnan(values)].tolist()
    mean = math.fsum(known) / max(len(known), 1)
    variance = math.fsum((each - mean) ** 2 for each in known) / max(len(known) - 1, 1)
    return mean, math.sqrt(variance)
