"""Preference objectives have the same curve on every mesh as the papers' formulas in plain PyTorch in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from components import data, distributed, models, training
from components.config.schema.objective import DPOConfig, KTOConfig, ORPOConfig, PairLoss, PreferenceConfig, SimPOConfig
from components.data.dataset import Facts
from components.data.pairs import DESIRABLE
from components.training.objectives.preference import REFERENCE
from components.training.objectives.reference_model import _score_pairs
from tests.distributed import curves
from tests.distributed.curves import CP, DDP2, FSDP2, PP, TP, Curve
from tests.distributed.parity import MODELS, Case, build, recipe_config
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import PARITY

PAIRS, ROWS, STEPS, LR = 4, 4, 3, 5e-3
CPU = torch.device("cpu")


def pairs() -> data.PairDataset:
    """Pairs of one prompt and two answers of unequal lengths."""
    generator = torch.Generator().manual_seed(3)
    chosen, rejected = [], []
    for index in range(PAIRS * STEPS + 1):
        prompt = torch.randint(3, 97, (4 + index % 3,), generator=generator).tolist()
        for answers, length in ((chosen, 5 + index % 4), (rejected, 9 - index % 5)):
            answer = torch.randint(3, 97, (length,), generator=generator).tolist()
            answers.append(data.Example(prompt + answer, [-100] * len(prompt) + answer))
    sets = [
        data.Dataset(each, curves.PadOnlyTokenizer(), facts=Facts("here"), seq_len=32)  # type: ignore[arg-type]
        for each in (chosen, rejected)
    ]
    numbers = range(len(chosen))
    labels = torch.tensor([[index % 3 > 0] * 2 for index in numbers], dtype=torch.float64)
    return data.PairDataset(*sets, [(i, i) for i in numbers]).with_values(DESIRABLE, labels)


@dataclass
class Answers:
    """Log-probabilities of the two answers of each pair under the policy and the reference, and their lengths."""

    policy: torch.Tensor  # (pairs, 2)
    reference: torch.Tensor  # (pairs, 2)
    lengths: torch.Tensor  # (pairs, 2)
    desirable: torch.Tensor  # (pairs,) bool

    def log_ratios(self, per_token: bool = False) -> torch.Tensor:
        return (self.policy - self.reference) / (self.lengths if per_token else 1)


def margin(rewards: torch.Tensor) -> torch.Tensor:
    return rewards[:, 0] - rewards[:, 1]


def cdpo(answers: Answers) -> torch.Tensor:
    """Mitchell 2023, equation 3: the labels are flipped with probability 0.1."""
    margins = 0.3 * margin(answers.log_ratios())
    return -0.9 * F.logsigmoid(margins) - 0.1 * F.logsigmoid(-margins)


def hinge(answers: Answers) -> torch.Tensor:
    """Liu et al. 2023, equation 10, plus half the mean negative log-probability per chosen token."""
    supervised = -answers.policy[:, 0] / answers.lengths[:, 0]
    return (1 - 2.0 * margin(answers.log_ratios())).clamp(min=0) + 0.5 * supervised


def ipo(answers: Answers) -> torch.Tensor:
    """Azar et al. 2023, equation 17, on means per token."""
    return (margin(answers.log_ratios(per_token=True)) - 1 / (2 * 0.4)) ** 2


def simpo(answers: Answers) -> torch.Tensor:
    """Meng et al. 2024, equation 6."""
    return -torch.log(torch.sigmoid(2.5 * margin(answers.policy / answers.lengths) - 0.8))


def orpo(answers: Answers) -> torch.Tensor:
    """Hong et al. 2024, equations 4, 6 and 7."""
    probability = torch.exp(answers.policy / answers.lengths)
    odds = probability / (1 - probability)
    supervised = -answers.policy[:, 0] / answers.lengths[:, 0]
    return supervised - 0.25 * torch.log(torch.sigmoid(torch.log(odds[:, 0] / odds[:, 1])))


def kto(answers: Answers) -> torch.Tensor:
    """Ethayarajh et al. 2024, equation 8; the second answer of a pair is the mismatched one."""
    ratios = answers.log_ratios()
    point = ratios[:, 1].mean().clamp(min=0).detach()
    desirable = 1.2 * (1 - torch.sigmoid(0.5 * (ratios[:, 0] - point)))
    return torch.where(answers.desirable, desirable, 0.9 * (1 - torch.sigmoid(0.5 * (point - ratios[:, 0]))))


OBJECTIVES: dict[str, tuple[PreferenceConfig, Callable[[Answers], torch.Tensor]]] = {
    "dpo": (DPOConfig(beta=0.3, label_smoothing=0.1), cdpo),
    "hinge": (DPOConfig(beta=2.0, loss=PairLoss.hinge, sft_weight=0.5), hinge),
    "ipo": (DPOConfig(beta=0.4, loss=PairLoss.ipo), ipo),
    "simpo": (SimPOConfig(beta=2.5, gamma=0.8), simpo),
    "orpo": (ORPOConfig(beta=0.25), orpo),
    "kto": (KTOConfig(beta=0.5, desirable_weight=1.2, undesirable_weight=0.9), kto),
}


def build_objective(cfg: PreferenceConfig, reference: Any = None) -> training.Preference:
    match cfg:
        case SimPOConfig():
            return training.SimPO(cfg)
        case ORPOConfig():
            return training.ORPO(cfg)
        case KTOConfig():
            return training.KTO(cfg, reference)
        case DPOConfig():
            return training.DPO(cfg, reference)
    raise TypeError(cfg)


def log_prob(model: Any, example: data.Example) -> torch.Tensor:
    """Sum of the log-probabilities of an answer, computed for one row without padding."""
    logits = model(input_ids=torch.tensor([example.input_ids]), use_cache=False).logits[0, :-1]
    targets = torch.tensor(example.labels[1:])
    return -F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def score(model: Any, sampled: Sequence[data.RowPair], reference: torch.Tensor) -> Answers:
    """Score pairs in one process; `reference` is (pairs, 2)."""
    policy = torch.stack([torch.stack([log_prob(model, row) for row in pair[:2]]) for pair in sampled])
    lengths = torch.tensor([[sum(label >= 0 for label in row.labels) for row in pair[:2]] for pair in sampled])
    return Answers(policy, reference, lengths, torch.tensor([pair.values[DESIRABLE][0] > 0 for pair in sampled]))


def packed_pairs(everything: data.PairedRows) -> data.PackedPairs:
    """Pairs in rows of 48 tokens."""
    return data.PackedPairs(everything, 24)


def pair_order(everything: data.PairDataset, packed: bool, steps: int = STEPS) -> list[list[int]]:
    """Return the pairs of each step: PAIRS pairs, or those of ROWS packed rows."""
    if not packed:
        order = data.SampleOrder(len(everything), 5)
        return [order.indices(step * PAIRS, PAIRS) for step in range(steps)]
    rows = packed_pairs(everything)
    order = data.SampleOrder(len(rows), 5)
    return [[pair for row in order.indices(step * ROWS, ROWS) for pair in rows._pairs_of(row)] for step in range(steps)]


def expected(
    plain: Any,
    formula: Callable[[Answers], torch.Tensor],
    packed: bool = False,
    router_aux: float = 0.0,
    steps: int = STEPS,
    lr: float = LR,
    base: Any = None,
) -> Curve:
    """Curve of one process. base: Reference model; None: the model before training."""
    model, everything = copy.deepcopy(plain).train(), pairs()
    with torch.no_grad():
        reference = score(base or model, everything, torch.zeros(len(everything), 2)).policy
    order = pair_order(everything, packed, steps)

    def loss_of(step: int) -> tuple[torch.Tensor, None]:
        indices = order[step]
        loss = formula(score(model, [everything[i] for i in indices], reference[indices])).mean()
        if router_aux:
            answers = 1 if formula is kto else 2
            trained_on = [row for index in indices for row in everything[index][:answers]]
            loss = loss + router_aux * curves.mean_balance(model, trained_on)
        return loss, None

    curve = curves.plain_curve(model, loss_of, steps, lr)
    with torch.no_grad():
        curve.held_out = (float(formula(score(model, everything, reference)).mean()),)
    return curve


def train(
    rank_model: Any,
    axes: dict[str, Any],
    loss: str,
    objective_cfg: PreferenceConfig,
    packed: bool = False,
    router_aux: float = 0.0,
    steps: int = STEPS,
    lr: float = LR,
) -> Curve:
    """Curve on a mesh, in the dtype of the model's first parameter; adapters are off in the reference."""
    dtype = next(rank_model.parameters()).dtype
    cfg = recipe_config(Case("llama", axes, loss=loss, router_aux=router_aux))
    mesh = distributed.build_mesh(cfg.parallelism, "cpu")
    model = copy.deepcopy(rank_model).train()
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, dtype)
    router_loss = training.attach_routers(model, cfg.model, mesh)
    head = training.attach_loss_head(model, cfg.model, cfg.training, cfg.parallelism, mesh, layout.stages, CPU)
    called = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
    settings = training.StepSettings(
        device=CPU, max_grad_norm=curves.CLIP, mesh=mesh, loss_head=head, routers=router_loss
    )
    prepared = training.Prepared(model, settings, called)
    plan = curves.plan_of(mesh, ROWS if packed else PAIRS, 1)
    scored = pairs()
    with models.adapters_off(model):
        scored = scored.with_values(REFERENCE, _score_pairs(prepared, scored, plan))
    dataset = packed_pairs(scored) if packed else scored
    objective = build_objective(objective_cfg)
    curve = curves.curve_on_mesh(prepared, objective, data.TrainBatches(dataset, plan, seed=5), steps, lr)
    held_out = training.evaluate(prepared, data.EvalBatches(dataset, plan), objective)
    assert (held_out.count, held_out.unit) == (len(scored), objective.unit)
    curve.held_out = (held_out.loss,)
    return curve


CASES: dict[int, list[dict[str, Any]]] = {
    1: [{"strategy": "single", "dp_shard": 1}],
    2: [
        DDP2,
        FSDP2,
        TP,
        {**TP, "sequence_parallel": True},
        CP,
        {**CP, "cp_attention": "all_gather"},
        PP,
        {**PP, "pp_schedule": "Interleaved1F1B"},
        {**PP, "pp_schedule": "ZBVZeroBubble"},
    ],
    4: [
        {**PP, "cp": 2},  # test_distillation.py has the other axes at each commit
        *([{**FSDP2, "tp": 2, "sequence_parallel": True}] if PARITY else []),
        *([{**PP, "dp_shard": 2}, {**FSDP2, "cp": 2}, {**TP, "cp": 2}, {**PP, "tp": 2}] if PARITY else []),
    ],
}


def loss_methods(axes: dict[str, Any]) -> list[str]:
    """Loss methods to test on a mesh."""
    return ["logits", "chunked"] if PARITY or axes.get("strategy") == "single" or axes == PP else ["chunked"]


def objectives_on(axes: dict[str, Any], number: int) -> list[str]:
    """Objectives to test on a mesh: one of them, in turn; all in one process."""
    if PARITY or axes["strategy"] == "single":
        return [*OBJECTIVES]
    return [[*OBJECTIVES][number % len(OBJECTIVES)]]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [1, 2, 4] if PARITY else [4])
def test_every_mesh_has_the_curve_of_the_papers_formulas(world: int) -> None:
    plain = build("llama", torch.float64, {**MODELS["llama"], "num_hidden_layers": 4})
    meshes = enumerate(runnable(CASES[world]), start=world)
    work = [(axes, name) for number, axes in meshes for name in objectives_on(axes, number)]
    expected_curves = {name: expected(plain, OBJECTIVES[name][1]) for _, name in work}

    def body(rank: int) -> list[str]:
        problems = []
        for axes, name in work:
            for loss in loss_methods(axes):
                got, where = train(plain, axes, loss, OBJECTIVES[name][0]), f"{name} {axes} {loss}"
                problems += [f"{where}: {problem}" for problem in curves.differences(got, expected_curves[name])]
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=1500 if PARITY else 400) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


SP = {"sequence_parallel": True}
PACKED: dict[int, list[tuple[dict[str, Any], str]]] = {
    1: [({"strategy": "single", "dp_shard": 1}, name) for name in (OBJECTIVES if PARITY else ("orpo", "kto"))],
    2: [(FSDP2, "dpo"), (PP, "kto"), *([({**TP, **SP}, "kto"), (CP, "ipo")] if PARITY else [])],
}


@pytest.mark.parametrize("world", [1, 2])
def test_packed_pairs_have_the_curve_of_single_rows(world: int) -> None:
    plain = build("llama", torch.float64, {**MODELS["llama"], "num_hidden_layers": 2})
    used = {name for _, name in PACKED[world]}
    expected_curves = {name: expected(plain, OBJECTIVES[name][1], packed=True) for name in used}
    assert max(map(len, pair_order(pairs(), packed=True))) > ROWS

    def body(rank: int) -> list[str]:
        problems = []
        for axes, name in PACKED[world]:
            for loss in loss_methods(axes) if PARITY else ["chunked"]:
                got = train(plain, axes, loss, OBJECTIVES[name][0], packed=True)
                problems += [
                    f"packed {name} {axes} {loss}: {each}" for each in curves.differences(got, expected_curves[name])
                ]
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=200) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))
