"""DPO has the same curve on every mesh as the formula of the paper in plain PyTorch in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from components import data, distributed, models, training
from components.config.schema import AdamWConfig
from components.config.schema.objective import PreferenceConfig
from components.data.dataset import Facts
from components.training.objectives.preference import REFERENCE
from components.training.objectives.reference_model import score_pairs
from tests.distributed.parity import MODELS, Case, build, recipe_config
from tests.distributed.test_parity import EVERYTHING
from tests.harness import run_ranks

PAIRS, STEPS, BETA, SMOOTHING, LR, CLIP = 4, 3, 0.3, 0.1, 5e-3, 1.0
CPU = torch.device("cpu")


class PadOnlyTokenizer:
    """The only attribute of a tokenizer that a dataset reads."""

    pad_token_id = 0


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
        data.Dataset(each, PadOnlyTokenizer(), facts=Facts("here"), seq_len=32)  # type: ignore[arg-type]
        for each in (chosen, rejected)
    ]
    return data.PairDataset(*sets, [(i, i) for i in range(len(chosen))])


@dataclass
class Curve:
    losses: list[float]
    norms: list[float]
    accuracies: list[float]
    gradients: dict[str, torch.Tensor]
    held_out: float


def log_prob(model: Any, example: data.Example) -> torch.Tensor:
    """Sum of the log-probabilities of an answer, computed for one row without padding."""
    logits = model(input_ids=torch.tensor([example.input_ids]), use_cache=False).logits[0, :-1]
    targets = torch.tensor(example.labels[1:])
    return -F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def loss_of(model: Any, pair: data.Pair, reference: torch.Tensor) -> tuple[torch.Tensor, float]:
    policy = torch.stack([log_prob(model, pair.chosen), log_prob(model, pair.rejected)])
    rewards = BETA * (policy - reference)
    margin = rewards[0] - rewards[1]
    loss = -(1 - SMOOTHING) * F.logsigmoid(margin) - SMOOTHING * F.logsigmoid(-margin)
    return loss, float(margin > 0)


def expected(plain: Any) -> Curve:
    model, everything = copy.deepcopy(plain).train(), pairs()
    with torch.no_grad():
        reference = [torch.stack([log_prob(model, p.chosen), log_prob(model, p.rejected)]) for p in everything]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=LR, betas=(0.9, 0.95)
    )
    curve = Curve([], [], [], {}, 0.0)
    order = data.SampleOrder(len(everything), 5)
    for step in range(STEPS):
        indices = order.indices(step * PAIRS, PAIRS)
        pair_losses = [loss_of(model, everything[i], reference[i]) for i in indices]
        loss = torch.stack([each for each, _ in pair_losses]).mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            curve.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        optimizer.step()
        curve.losses.append(loss.item())
        curve.norms.append(float(norm))
        curve.accuracies.append(sum(right for _, right in pair_losses) / PAIRS)
    with torch.no_grad():
        losses = [loss_of(model, pair, reference[i])[0] for i, pair in enumerate(everything)]
    curve.held_out = float(torch.stack(losses).mean())
    return curve


def train(rank_model: Any, axes: dict[str, Any], loss: str) -> Curve:
    cfg = recipe_config(Case("llama", axes, loss=loss))
    mesh = distributed.build_mesh(cfg.parallelism, "cpu")
    model = copy.deepcopy(rank_model).train()
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, torch.float64)
    head = training.attach_loss_head(model, cfg.model.loss, cfg.training, cfg.parallelism, mesh, layout.stages, CPU)
    called = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
    settings = training.StepSettings(device=CPU, max_grad_norm=CLIP, mesh=mesh, loss_head=head)
    prepared = training.Prepared(model, settings, called)
    plan = data.BatchPlan(
        global_batch_size=PAIRS,
        micro_batch_size=1,
        dp_rank=mesh.rank("dp"),
        dp_size=mesh.size("dp"),
        padding=data.Padding(multiple=mesh.sequence_multiple),
    )
    scored = pairs()
    scored = scored.with_values(REFERENCE, score_pairs(prepared, scored, plan))
    objective = training.Preference(PreferenceConfig(beta=BETA, label_smoothing=SMOOTHING))
    optimizer = training.build_optimizer(model, AdamWConfig(lr=LR, weight_decay=0.1, betas=[0.9, 0.95]))
    curve = Curve([], [], [], {}, 0.0)

    def keep(*_: Any) -> None:
        if not curve.gradients:
            for name, parameter in model.named_parameters():
                if (grad := parameter.grad) is not None:
                    curve.gradients[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()

    optimizer.register_step_pre_hook(keep)
    batches = data.TrainBatches(scored, plan, seed=5)
    for step in range(STEPS):
        numbers = training.train_step(prepared, batches.at(step), optimizer, objective)
        curve.losses.append(numbers["loss"].item())
        curve.norms.append(numbers["grad_norm"].item())
        curve.accuracies.append(numbers["accuracy"].item())
    held_out = training.evaluate(prepared, data.EvalBatches(scored, plan), objective)
    assert (held_out.count, held_out.unit) == (len(scored), "pair")
    curve.held_out = held_out.loss
    scale = min(1.0, CLIP / (curve.norms[0] + 1e-6))
    curve.gradients = {name: gradient / scale for name, gradient in curve.gradients.items()}
    return curve


FSDP2 = {"strategy": "fsdp2", "dp_shard": -1}
TP = {"strategy": "fsdp2", "dp_shard": 1, "tp": 2}
CP = {"strategy": "fsdp2", "dp_shard": 1, "cp": 2}
PP = {"strategy": "fsdp2", "dp_shard": 1, "pp": 2}
CASES: dict[int, list[dict[str, Any]]] = {
    1: [{"strategy": "single", "dp_shard": 1}],
    2: [
        {"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2},
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
        {**FSDP2, "tp": 2, "sequence_parallel": True},
        {**PP, "cp": 2},
        {**PP, "dp_shard": 2},
        *([{**FSDP2, "cp": 2}, {**TP, "cp": 2}, {**PP, "tp": 2}] if EVERYTHING else []),
    ],
}


def loss_methods(axes: dict[str, Any]) -> list[str]:
    """Loss methods to test on a mesh."""
    return ["logits", "chunked"] if EVERYTHING or axes.get("strategy") == "single" or axes == PP else ["chunked"]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_mesh_has_the_curve_of_the_paper_formula(world: int) -> None:
    plain = build("llama", torch.float64, {**MODELS["llama"], "num_hidden_layers": 4})
    reference_curve = expected(plain)

    def body(rank: int) -> list[str]:
        problems = []
        for axes in CASES[world]:
            for loss in loss_methods(axes):
                got, where = train(plain, axes, loss), f"{axes} {loss}"
                got.accuracies[0] = reference_curve.accuracies[0] = 0.0  # the first margins are zero up to rounding
                for name in ("losses", "norms", "accuracies", "held_out"):
                    if getattr(got, name) != pytest.approx(getattr(reference_curve, name), rel=1e-10):
                        problems.append(f"{where}: {name} {getattr(got, name)}, not {getattr(reference_curve, name)}")
                for name, gradient in got.gradients.items():
                    error = (gradient - reference_curve.gradients[name]).norm() / reference_curve.norms[0]
                    if not error < 1e-10:
                        problems.append(f"{where}: gradient of {name} is off by {error:.1e}")
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=240) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))
