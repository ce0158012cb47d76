"""Objectives on rewards have the same curve on every mesh as their formulas in plain PyTorch in one process.

All train on the same stored answers, of unequal lengths in groups that straddle ranks and micro-batches, in rows of one
answer or in packed rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from components import distributed, models, training
from components.batch import Batch
from components.config.schema.objective import (
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
from components.config.schema.rollouts import RolloutsConfig
from components.training.answers import Answers, micro_batches
from components.training.objectives.policy import (
    ADVANTAGE,
    OLD,
    REFERENCE_TOKENS,
    WEIGHT,
    Policy,
    SequencePolicy,
    TokenPolicy,
    advantages_of,
)
from tests.distributed import curves
from tests.distributed.curves import CP, DDP2, FSDP2, HSDP, PP, TP, Curve
from tests.distributed.parity import MODELS, Case, build, recipe_config
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import PARITY

PROMPTS, GROUP, STEPS, LR, TEMPERATURE = 4, 4, 3, 5e-3, 0.8
ROLLOUTS = RolloutsConfig(max_new_tokens=9, group=GROUP, batches=2, temperature=TEMPERATURE)
PACKED_LENGTH = 40
CPU = torch.device("cpu")


def answers() -> Answers:
    """Random answers with rewards, and log-probabilities near those of a fresh model, whose tokens are about equal."""
    draw, prompts, tokens = np.random.default_rng(3), [], []
    for index in range(PROMPTS):
        prompts.append(draw.integers(3, 97, 3 + index % 3).tolist())
        tokens += [draw.integers(3, 97, 2 + (3 * index + 5 * member) % 8).tolist() for member in range(GROUP)]
    names = (OLD, REFERENCE_TOKENS)
    near = {name: [np.log(1 / 97) + 0.3 * draw.standard_normal(len(each)) for each in tokens] for name in names}
    ended = [len(each) < 9 for each in tokens]
    rewards = draw.random((1, len(tokens)))
    return Answers(
        group=GROUP,
        samples=[*range(PROMPTS)],
        prompts=prompts,
        tokens=tokens,
        ended=ended,
        rewards=rewards,
        log_probs=near,
    )


@dataclass
class Sampled:
    """Tokens of an answer with what its loss is a function of, each (tokens,) float64."""

    new: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    advantage: torch.Tensor

    @property
    def ratio(self) -> torch.Tensor:
        return (self.new - self.old).exp()


Formula = Callable[[Sequence[Sampled]], torch.Tensor]


def clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def grpo(sampled: Sequence[Sampled]) -> torch.Tensor:
    """Shao et al. 2024, equation 3, with the estimator of equation 4."""
    losses = []
    for each in sampled:
        difference = each.reference - each.new
        kl = difference.exp() - difference - 1
        losses.append((clipped(each.ratio, each.advantage, 0.2, 0.2) + 0.3 * kl).mean())
    return torch.stack(losses).mean()


def on_policy(sampled: Sequence[Sampled]) -> torch.Tensor:
    """GRPO on answers of the present weights: the ratio is 1, its gradient is that of the log-probability."""
    return torch.stack([(-(each.new - each.new.detach()).exp() * each.advantage).mean() for each in sampled]).mean()


def dr_grpo(sampled: Sequence[Sampled]) -> torch.Tensor:
    """Liu et al. 2025: sums over tokens, divided by a constant."""
    return torch.stack([clipped(each.ratio, each.advantage, 0.2, 0.2).sum() / 9 for each in sampled]).mean()


def dapo(sampled: Sequence[Sampled]) -> torch.Tensor:
    """Yu et al. 2025, equation 8; cut answers are masked."""
    kept = [each for each in sampled if len(each.new) < 9]
    return torch.cat([clipped(each.ratio, each.advantage, 0.2, 0.28) for each in kept]).mean()


def cispo(sampled: Sequence[Sampled]) -> torch.Tensor:
    """MiniMax 2025, equation 4, with half the squared log-ratio to the reference."""
    losses = []
    for each in sampled:
        policy = -each.ratio.detach().clamp(max=1.1) * each.advantage * each.new
        losses.append(policy + 0.2 * (each.reference - each.new).square() / 2)
    return torch.cat(losses).mean()


def gspo(sampled: Sequence[Sampled]) -> torch.Tensor:
    """Zheng et al. 2025, equations 5 and 7."""
    losses = []
    for each in sampled:
        ratio = ((each.new - each.old).sum() / len(each.new)).exp()
        losses.append(clipped(ratio, each.advantage[0], 0.05, 0.06))
    return torch.stack(losses).mean()


def rloo(sampled: Sequence[Sampled]) -> torch.Tensor:
    """Ahmadian et al. 2024, with PPO's clipped ratio of whole answers."""
    ratios = [(each.new - each.old).sum().exp() for each in sampled]
    return torch.stack(
        [clipped(r, each.advantage[0], 0.5, 0.6) for r, each in zip(ratios, sampled, strict=True)]
    ).mean()


def reinforce_pp(sampled: Sequence[Sampled]) -> torch.Tensor:
    """Hu 2025: the clipped loss over all tokens, with an advantage of each."""
    return torch.cat([clipped(each.ratio, each.advantage, 0.2, 0.2) for each in sampled]).mean()


OBJECTIVES: dict[str, tuple[PolicyConfig, Formula]] = {
    "grpo": (GRPOConfig(beta=0.3), grpo),
    "on_policy": (GRPOConfig(), on_policy),
    "dr_grpo": (DrGRPOConfig(), dr_grpo),
    "dapo": (DAPOConfig(), dapo),
    "cispo": (CISPOConfig(clip_high=0.1, beta=0.2, kl=KLEstimator.k2), cispo),
    "gspo": (GSPOConfig(clip_low=0.05, clip_high=0.06), gspo),
    "rloo": (RLOOConfig(clip_low=0.5, clip_high=0.6), rloo),
    "reinforce_pp": (ReinforcePPConfig(beta=0.1), reinforce_pp),
}


OF_ANSWERS = ("gspo", "rloo")
"""Objectives with one ratio for an answer; the metric of the others is the entropy, a mean over tokens."""


def advantages(name: str, stored: Answers) -> list[np.ndarray]:
    kl = [old - ref for old, ref in zip(stored.log_probs[OLD], stored.log_probs[REFERENCE_TOKENS], strict=True)]
    cfg = OBJECTIVES[name][0]
    return advantages_of(cfg, stored.rewards[0], GROUP, stored.lengths, kl if cfg.kl is KLEstimator.k1 else None)


def expected(plain: Any, name: str) -> Curve:
    """Curve of one process, row by row without padding."""
    model, stored = copy.deepcopy(plain).train(), answers()
    of_tokens = advantages(name, stored)

    def loss_of(step: int) -> tuple[torch.Tensor, float | None]:
        sampled, entropies = [], []
        for place, tokens in enumerate(stored.tokens):
            prompt = stored.prompts[place // GROUP]
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            distribution = torch.distributions.Categorical(logits=logits / TEMPERATURE)
            new = distribution.log_prob(torch.tensor(tokens))
            entropies += [distribution.entropy().detach()] if name != "dapo" or stored.ended[place] else []
            others = (stored.log_probs[OLD][place], stored.log_probs[REFERENCE_TOKENS][place], of_tokens[place])
            sampled.append(Sampled(new, *map(torch.from_numpy, others)))
        return OBJECTIVES[name][1](sampled), None if name in OF_ANSWERS else float(torch.cat(entropies).mean())

    curve = curves.plain_curve(model, loss_of, STEPS, LR)
    with torch.no_grad():
        loss, entropy = loss_of(STEPS)
    curve.held_out = (float(loss), *([] if entropy is None else [entropy]))
    return curve


@dataclass
class SameAnswers:
    """The same answers in every step."""

    batches: list[Batch]

    def at(self, step: int) -> list[Batch]:
        return self.batches


def train(plain: Any, axes: dict[str, Any], name: str, packed: bool) -> Curve:
    """Curve on a mesh. A collective."""
    cfg = recipe_config(Case("llama", axes, loss="chunked"))
    mesh = distributed.build_mesh(cfg.parallelism, "cpu")
    model = copy.deepcopy(plain).train()
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, torch.float64)
    head = training.attach_loss_head(model, cfg.model, cfg.training, cfg.parallelism, mesh, layout.stages, CPU)
    called = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
    settings = training.StepSettings(device=CPU, max_grad_norm=curves.CLIP, mesh=mesh, loss_head=head)
    prepared = training.Prepared(model, settings, called)
    stored, objective = answers(), OBJECTIVES[name][0]
    policy: Policy = TokenPolicy(objective, ROLLOUTS)
    if name in OF_ANSWERS:
        policy = SequencePolicy(objective, ROLLOUTS)
    values = {
        ADVANTAGE: advantages(name, stored),
        WEIGHT: [np.full(length, policy.token_weight(length)) for length in stored.lengths],
        **{each: of_tokens for each, of_tokens in stored.log_probs.items() if name != "on_policy"},
    }
    plan = replace(
        curves.plan_of(mesh, len(stored), 2 if len(stored) // mesh.size("dp") > 4 else 1),
        pp=mesh.size("pp"),
        deals=len(axes) % 2 == 0,
    )
    masked = [not ended for ended in stored.ended] if name == "dapo" else []
    batches = micro_batches(stored, plan, values, masked=masked, packed=PACKED_LENGTH if packed else None)
    metric = "" if name in OF_ANSWERS else "entropy"
    curve = curves.curve_on_mesh(prepared, policy, SameAnswers(batches), STEPS, LR, metric)  # type: ignore[arg-type]
    measured = training.evaluate(prepared, batches, policy)
    curve.held_out = (measured.loss, *([measured.metrics[metric]] if metric else []))
    return curve


SP, ZBV = {"sequence_parallel": True}, {"pp_schedule": "ZBVZeroBubble"}
MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{"strategy": "single", "dp_shard": 1}],
    2: [DDP2, FSDP2, TP, {**TP, **SP}, CP, {**CP, "cp_attention": "all_gather"}, PP, {**PP, **ZBV}],
    4: [
        *(HSDP, {**FSDP2, "tp": 2}, {**FSDP2, "tp": 2, **SP}, {**FSDP2, "cp": 2}, {**TP, "cp": 2}),
        *({**PP, "dp_shard": 2}, {**PP, "tp": 2}, {**PP, "cp": 2}, {**PP, "dp_shard": 2, **ZBV}),
    ],
}


def cases(world: int) -> list[tuple[dict[str, Any], str, bool]]:
    """Every objective on every mesh, packed and not; at a commit each mesh with one objective in turn."""
    meshes = runnable(MESHES[world])
    if PARITY or world == 1:
        return [(axes, name, packed) for axes in meshes for name in OBJECTIVES for packed in (False, True)]
    if world == 4:
        meshes = [HSDP, {**PP, "dp_shard": 2}, {**FSDP2, "tp": 2, **SP}]
    names = [*OBJECTIVES]
    return [(axes, names[(number + world) % len(names)], number % 2 == 1) for number, axes in enumerate(meshes)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_mesh_has_the_curve_of_the_formulas(world: int) -> None:
    plain = build("llama", torch.float64, {**MODELS["llama"], "num_hidden_layers": 4})
    work = cases(world)
    expected_curves = {name: expected(plain, name) for name in {name for _, name, _ in work}}

    def body(rank: int) -> list[str]:
        problems = []
        for axes, name, packed in work:
            got, where = train(plain, axes, name, packed), f"{name} {axes} {'packed' * packed}"
            problems += [f"{where}: {problem}" for problem in curves.differences(got, expected_curves[name])]
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=1500 if PARITY else 400) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


def test_comparison_sees_an_advantage_that_belongs_to_another_answer() -> None:
    plain = build("llama", torch.float64, {**MODELS["llama"], "num_hidden_layers": 2})
    reference = expected(plain, "grpo")

    def body(rank: int) -> list[str]:
        original = advantages

        def moved(name: str, stored: Answers) -> list[np.ndarray]:
            values = original(name, stored)
            of_next = [values[place - 1][0] for place in range(len(values))]
            return [np.full(length, value) for length, value in zip(stored.lengths, of_next, strict=True)]

        globals()["advantages"] = moved
        return curves.differences(train(plain, MESHES[1][0], "grpo", False), reference)

    assert any("gradient" in line for line in run_ranks(1, body, timeout=100)[0])
