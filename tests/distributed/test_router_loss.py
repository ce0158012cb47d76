"""The router auxiliary loss and its gradients on every mesh match one process in plain PyTorch.

The reference forwards each sample alone and without padding, and uses the router logits that transformers returns.
float64: the logged loss within 1e-12 and the gradient of every parameter within 1e-10, both relative.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from components import distributed, models, training
from components.config.schema import ModelConfig, ParallelismConfig
from components.config.schema.parallelism import ActivationCheckpointing
from tests.distributed.parity import MOE_MODELS, Case, build, micro_batches, relative, samples_of_step
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import in_parity

COEFFICIENT = 0.5  # large, so that the token loss does not hide an error
CFG = ModelConfig(path="made here", router_aux_coef=COEFFICIENT)
FULL = "full activation checkpointing"

SINGLE = {"strategy": "single", "dp_shard": 1}
FSDP2 = {"strategy": "fsdp2", "dp_shard": -1}
DDP = {"strategy": "ddp", "dp_shard": 1, "dp_replicate": -1}
ONE = {"strategy": "fsdp2", "dp_shard": 1}
EP, TP, CP, PP = ({**ONE, axis: 2} for axis in ("ep", "tp", "cp", "pp"))
SP = {"tp": 2, "sequence_parallel": True}
INTERLEAVED = {**PP, "pp_schedule": "Interleaved1F1B"}
ZBV = {**PP, "pp_schedule": "ZBVZeroBubble"}
SHAPES: dict[int, list[tuple[dict[str, Any], int, str]]] = {
    1: [(SINGLE, 1, ""), (SINGLE, 2, ""), (SINGLE, 2, FULL)],
    2: [
        *[(FSDP2, 2, ""), (DDP, 2, ""), (EP, 1, ""), (TP, 1, ""), ({**ONE, **SP}, 2, "")],
        *[(CP, 2, ""), (CP, 1, FULL), (PP, 2, ""), (INTERLEAVED, 4, FULL), (ZBV, 4, "")],
    ],
    4: [({**EP, **SP}, 2, FULL), ({**CP, "ep": 2}, 2, ""), ({**CP, "tp": 2}, 1, ""), ({**CP, "pp": 2}, 2, FULL),
        ({**PP, "ep": 2}, 2, "")],
}  # fmt: skip
"""World size -> (parallelism, gradient accumulation, activation checkpointing)."""

Step = tuple[float, dict[str, torch.Tensor]]
"""Loss and gradients."""


def samples(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return samples of unequal lengths and unequal numbers of targets; one has no targets."""
    made = samples_of_step(step)
    made[3][1][:] = -100
    return made


def reference(model: torch.nn.Module, coefficient: float = COEFFICIENT) -> Step:
    model, total, aux_loss, count = copy.deepcopy(model), torch.zeros(()).double(), torch.zeros(()).double(), 0
    top_k = model.config.num_experts_per_tok
    for tokens, labels in samples(0):
        output = model(input_ids=tokens[None], use_cache=False, output_router_logits=True)
        targets = int((labels[1:] != -100).sum())
        total = total + F.cross_entropy(output.logits[0, :-1], labels[1:], ignore_index=-100, reduction="sum")
        count += targets
        for logits in output.router_logits:  # (tokens, experts) of a layer
            probabilities = logits.softmax(dim=-1)
            chosen = F.one_hot(probabilities.topk(top_k).indices, logits.shape[-1]).sum(1).double()
            layer_loss = logits.shape[-1] * (chosen.mean(0) * probabilities.mean(0)).sum()
            aux_loss = aux_loss + targets * layer_loss / len(output.router_logits)
    loss = (total + coefficient * aux_loss) / count
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def on_mesh(plain: torch.nn.Module, case: Case, recompute: str) -> Step:
    """Return the logged loss and the full gradients of this rank's parameters."""
    config = ParallelismConfig(**case.parallelism)
    mesh = distributed.build_mesh(config, "cpu")
    model: Any = copy.deepcopy(plain).train()
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, config, torch.float64)
    loss = training.attach_router_loss(model, CFG, mesh)
    if recompute:
        models.checkpoint_activations(model, ActivationCheckpointing.full)
    called = distributed.wrap_replicas(model, mesh, config, layout)
    settings = training.StepSettings(torch.device("cpu"), max_grad_norm=0.0, mesh=mesh, router_loss=loss)
    batches = micro_batches(case, mesh, 0)
    named = dict(model.named_parameters())  # while the root is unsharded, FSDP2 exposes other parameters
    recorder = GradientRecorder(named.values(), lr=0.0)
    first, second = (
        training.train_step(training.Prepared(model, settings, called), batches, recorder)["loss"].item()
        for _ in range(2)
    )
    assert first == second  # no state is carried over to the next step
    tokens_only = training.evaluate(training.Prepared(model, settings, called), batches).loss
    assert tokens_only == pytest.approx(reference_of[case.model, 0.0][0], rel=1e-12)
    return first, {name: recorder.full_gradients[parameter] for name, parameter in named.items()}


class GradientRecorder(torch.optim.SGD):
    """Optimizer that stores full gradients and leaves the weights unchanged."""

    def step(self, closure: Any = None) -> None:
        self.full_gradients = {
            parameter: (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
            for parameter in self.param_groups[0]["params"]
            if (grad := parameter.grad) is not None
        }


reference_of: dict[tuple[str, float], Step] = {}


@in_parity
@pytest.mark.parametrize("world_size", SHAPES)
def test_router_loss_and_gradients_match_one_process(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    built = {}
    for name in ("mixtral", "qwen3_moe"):
        monkeypatch.setitem(MOE_MODELS, name, {**MOE_MODELS[name], "num_hidden_layers": 4})  # for four stages
        built[name] = build(name, torch.float64)
        for coefficient in (0.0, COEFFICIENT):
            monkeypatch.setitem(reference_of, (name, coefficient), reference(built[name], coefficient))

    def on_rank(rank: int) -> list[tuple[str, set[str], list[str]]]:
        found = []
        for shape, accumulation, recompute in runnable(SHAPES[world_size]):
            for name in built:
                case = Case(name, shape, accumulation, samples=samples)
                step = on_mesh(built[name], case, recompute)
                found.append((f"{case} {recompute}", set(step[1]), differences(reference_of[name, COEFFICIENT], step)))
        return found

    ranks = run_ranks(world_size, on_rank, timeout=240)
    for cases in zip(*ranks, strict=True):
        name = cases[0][0]
        assert not [line for _, _, problems in cases for line in problems], name
        seen = set.union(*(names for _, names, _ in cases))
        assert seen == set(dict(built[name.split()[0]].named_parameters())), name


def differences(expected: Step, got: Step) -> list[str]:
    problems = [] if got[0] == pytest.approx(expected[0], rel=1e-12) else [f"loss {got[0]!r}, not {expected[0]!r}"]
    for name, gradient in got[1].items():
        error = relative(gradient, expected[1][name])
        if not error < 1e-10:
            problems.append(f"gradient of {name} is off by {error:.1e}")
    return problems
