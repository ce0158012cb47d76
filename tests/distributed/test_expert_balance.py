"""Loads of experts and the biases that balance them, on every mesh, bit for bit those of one process in plain PyTorch.

The reference forwards each sample alone, counts tokens by hooks, and changes the biases by the formula of the paper.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from components import distributed, models, training
from components.config.schema import ParallelismConfig
from components.config.schema.model import ModelConfig, RouterAux
from components.config.schema.run import ExpertLoads
from components.models.anatomy import is_experts
from components.training import routers
from tests.distributed.parity import LATENT, SMALL, Case, build, micro_batches
from tests.distributed.test_router_loss import CP, DDP, EP, FSDP2, FULL, INTERLEAVED, ONE, PP, SINGLE, SP, TP, samples
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import PARITY

RATE, STEPS, RATIO = 0.02, 20 if PARITY else 5, 1e-12
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**SMALL, **LATENT, "model_type": "deepseek_v3", "q_lora_rank": 12, "n_routed_experts": 4,
                    "n_group": 1, "topk_group": 1, "num_hidden_layers": 4},
    "minimax_m2": {**SMALL, "model_type": "minimax_m2", "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                   "num_hidden_layers": 4},
    "ernie4_5_moe": {**SMALL, "model_type": "ernie4_5_moe", "head_dim": 12, "moe_num_experts": 4, "moe_k": 2,
                     "moe_intermediate_size": 16, "moe_layer_start_index": 1, "moe_layer_end_index": 3,
                     "num_hidden_layers": 4},
}  # fmt: skip
"""A bias in the router, in the block around it, and one that is a parameter."""
SHAPES: dict[int, list[tuple[dict[str, Any], int]]] = {
    1: [(SINGLE, 2), ({**SINGLE, **FULL}, 2)],
    2: [(FSDP2, 2), (EP, 1), (TP, 1), (CP, 2), ({**PP, **FULL}, 2)],
}
MORE: dict[int, list[tuple[dict[str, Any], int]]] = {
    2: [(DDP, 2), ({**ONE, **SP}, 2), ({**INTERLEAVED, **FULL}, 4)],
    4: [({**EP, **SP, **FULL}, 2), ({**CP, "ep": 2}, 2), ({**CP, "tp": 2}, 1), ({**PP, "ep": 2}, 2)],
}
WORLDS = {world: SHAPES.get(world, []) + (MORE.get(world, []) if PARITY else []) for world in (1, 2, 4)}


def made(name: str) -> nn.Module:
    """Build a model in float64, biases included."""
    return build(name, torch.float64, FAMILIES[name]).double()


def biases(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full biases by name."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = {name: each.detach() for name, each in tensors if name.endswith("e_score_correction_bias")}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each.clone() for name, each in found.items()}


def reference(model: nn.Module) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train a model in place, sample by sample; return the metrics of each step, and the biases."""
    experts = {name: each for name, each in model.named_modules() if is_experts(each)}
    counts, attended = {name: torch.zeros(4, dtype=torch.int64) for name in experts}, [0]

    def count(name: str, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        counts[name] += args[1][: attended[0]].flatten().bincount(minlength=4)

    for name, each in experts.items():
        each.register_forward_pre_hook(partial(count, name))
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
    metrics = []
    for step in range(STEPS):
        total = sum(int((labels[1:] != -100).sum()) for _, labels in samples(step))
        for tokens, labels in samples(step):
            targets = (labels != -100).nonzero()
            attended[0] = int(targets[-1]) + 1 if len(targets) else 0  # tokens up to the last target
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            (F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum") / total).backward()
        optimizer.step()
        optimizer.zero_grad()
        worst, dead, entropy = 0.0, 0, []
        tokens = sum(int(each.sum()) for each in counts.values())
        for name, bias in biases_of(model, experts).items():
            load = counts[name].double()
            bias += RATE * torch.sign(load.mean() - load).view(bias.shape)
            worst, dead = max(worst, float(load.max() / load.mean())), dead + int((load == 0).sum())
            share = (load / load.sum()).clamp(min=1e-300)
            entropy.append(float(-(share * share.log()).sum() / math.log(4)))
            counts[name].zero_()
        measured = {"expert_load": worst, "dead_experts": dead, "expert_entropy": sum(entropy) / len(entropy)}
        metrics.append({**measured, "tokens": tokens})
    return metrics, biases(model)


def biases_of(model: nn.Module, experts: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Return the bias of each layer by the name of its experts, to change in place."""
    tensors = [(name, each.data) for name, each in [*model.named_parameters(), *model.named_buffers()]]
    layers = {name: name.partition(".mlp.")[0] for name in experts}
    return {
        name: next(each for key, each in tensors if key.startswith(f"{layer}.") and key.endswith("correction_bias"))
        for name, layer in layers.items()
    }


def on_mesh(case: Case, built: nn.Module) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], list[float]]:
    """Train a copy of a model on this rank's mesh; return the metrics of each step, the biases, and the losses."""
    config = ParallelismConfig(**case.parallelism)
    mesh = distributed.build_mesh(config, "cpu")
    model = copy.deepcopy(built).train()
    models.use_causal_sdpa(model)
    anatomy = models.read_anatomy(model)
    layout = distributed.parallelize(model, mesh, config, torch.float64, anatomy)
    cfg = ModelConfig(path="made here", router_aux=RouterAux.none, router_bias_rate=RATE)
    attached = training.attach_routers(model, cfg, mesh, anatomy, ExpertLoads.summary)
    assert attached is not None
    end_step, tokens = attached.end_step, list[float]()  # tokens of all experts in each step

    def recorded(numbers: training.StepNumbers, loads: torch.Tensor) -> training.StepNumbers:
        tokens.append(float(loads.sum()))
        return end_step(numbers, loads)

    attached.end_step = recorded  # type: ignore[method-assign]
    models.checkpoint_activations(model, config.activation_checkpointing)
    called = distributed.wrap_replicas(model, mesh, config, layout)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05, foreach=False)
    settings = training.StepSettings(
        device=torch.device("cpu"),
        max_grad_norm=0.0,
        mesh=mesh,
        defer_grad_sync=config.defers_grad_sync,
        routers=attached,
    )
    metrics, losses = [], []
    for step in range(STEPS):
        numbers = training.train_step(
            training.Prepared(model, settings, called), micro_batches(case, mesh, step), optimizer
        )
        names = ("expert_load", "dead_experts", "expert_entropy")
        metrics.append({**{name: float(numbers[name]) for name in names}, "tokens": tokens[-1]})
        losses.append(float(numbers["loss"]))
    return metrics, biases(model), losses


def deviations(world: int, name: str) -> list[str]:
    """Return a line for each mesh whose biases or metrics are not those of one process."""
    expected, ends = reference(made(name))
    assert len({tuple(each.flatten().tolist()) for each in ends.values()}) == len(ends)

    def on_rank(rank: int) -> list[str]:
        problems = []
        for shape, accumulation in runnable(WORLDS[world]):
            case = Case(name, shape, accumulation, STEPS, samples=samples)
            metrics, held, _ = on_mesh(case, made(name))
            problems += [f"{case}: {key}" for key, value in held.items() if not torch.equal(value, ends[key])]
            problems += [f"{case}: no biases" for _ in range(1) if not held and "pp" not in shape]
            problems += [
                f"{case}: step {step}: {got} instead of {want}"
                for step, (got, want) in enumerate(zip(metrics, expected, strict=True))
                if got != pytest.approx(want, rel=RATIO)
            ]
        return problems

    return sorted({line for lines in run_ranks(world, on_rank, timeout=900) for line in lines})


@pytest.mark.parametrize("world", [world for world, shapes in WORLDS.items() if shapes])
@pytest.mark.parametrize("name", FAMILIES if PARITY else ["deepseek_v3", "ernie4_5_moe"])
def test_biases_and_metrics_equal_those_of_one_process(name: str, world: int) -> None:
    problems = deviations(world, name)
    assert not problems, "\n".join(problems[:6])


def test_wrong_counts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: tokens of one dp rank counted twice, those of all tp ranks, and padding."""
    with monkeypatch.context() as patch:
        patch.setattr(
            routers.Routers, "step_loads", lambda self: self.loads.counts.flatten() * (1 + self._mesh.rank("dp"))
        )
        assert deviations(2, "minimax_m2")
    with monkeypatch.context() as patch:
        patch.setattr(routers.Routers, "step_loads", lambda self: self.loads.counts.flatten())
        assert any("tokens" in line for line in deviations(2, "minimax_m2"))
    plain_count = routers._Loads.count
    monkeypatch.setattr(routers._Loads, "count", lambda self, args, of, sink: plain_count(self, args, of * 0, sink))
    assert deviations(1, "minimax_m2")
