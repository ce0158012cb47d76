"""AdamW on local shards has the bits of torch.optim.AdamW on DTensors; spikes are skipped on every mesh."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from components import distributed, models, training
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.training import TrainingConfig
from components.training.optimizers.gradients import SpikeWindow, local_tensor, step_if_finite
from components.training.optimizers.optim import AdamW
from tests.distributed.parity import Case, build, micro_batches, recipe_config
from tests.harness import run_ranks
from tests.unit.test_optim import OPTIMIZERS, compare, matrices

SHAPES_AND_PLACEMENTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((8, 6), [Shard(0), Shard(1)]),
    ((3, 5), [Shard(0), Shard(1)]),  # uneven
    ((1, 7), [Shard(0), Replicate()]),  # one of two ranks holds no values
    ((9,), [Shard(0), Replicate()]),
    ((4,), [Replicate(), Replicate()]),
]
PLAIN_ONLY = ("homemade", "sgd_fused")
"""Optimizers that do not support DTensors."""


class FusedArguments(TorchDispatchMode):
    """Records the types of the tensors that fused AdamW gets."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[type] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._fused_adamw_.default:
            self.types |= {type(each) for tensors in args[:4] for each in tensors}
        return func(*args, **(kwargs or {}))


def parameters(mesh: DeviceMesh) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [(torch.randn(shape, generator=generator), placements) for shape, placements in SHAPES_AND_PLACEMENTS]
    plain = nn.Parameter(torch.randn(3, 2, generator=generator))
    return [nn.Parameter(distribute_tensor(value, mesh, placements)) for value, placements in values] + [plain]


def train(kind: type[torch.optim.AdamW], mesh: DeviceMesh) -> tuple[list[torch.Tensor], set[type]]:
    """Return parameters and moments after four steps, of which the third is skipped, and what the kernel got."""
    weights = parameters(mesh)
    decayed = {"params": weights[:2], "weight_decay": 0.1}
    optimizer = kind([decayed, {"params": weights[2:-1]}, {"params": weights[-1:]}], lr=0.1, fused=True)
    arguments = FusedArguments()
    for step in range(4):
        generator = torch.Generator().manual_seed(step + 1)
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator)
            is_sharded = isinstance(weight, DTensor)
            weight.grad = distribute_tensor(gradient, mesh, weight.placements) if is_sharded else gradient
        with arguments:
            step_if_finite(optimizer, torch.tensor(float("inf") if step == 2 else 1.0))
    for weight in weights:
        moments = [optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
        assert all(type(each) is type(weight.data) for each in moments)
        assert optimizer.state[weight]["step"] == 3
    tensors = [each for weight in weights for each in (weight, *optimizer.state[weight].values())]
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors], arguments.types


def test_steps_on_shards_have_the_bits_of_torch() -> None:
    def on_rank(rank: int) -> set[type]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        values, types = train(AdamW, mesh)
        expected, _ = train(torch.optim.AdamW, mesh)
        assert len(values) == len(expected)
        assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))
        return types

    for types in run_ranks(4, on_rank):
        assert types
        assert not any(issubclass(each, DTensor) for each in types)


def test_gradient_with_other_placements_is_redistributed() -> None:
    def on_rank(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (2,))
        results = []
        for placements in ([Shard(0)], [Replicate()]):
            weight = nn.Parameter(distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]))
            weight.grad = distribute_tensor(torch.arange(6.0) - 2, mesh, placements)
            AdamW([weight], lr=0.1, fused=True).step()
            results.append(weight.full_tensor())
        return torch.equal(*results) and not torch.equal(results[0], torch.arange(6.0))

    assert all(run_ranks(2, on_rank))


def test_plain_gradient_of_a_dtensor_is_an_error() -> None:
    def on_rank(rank: int) -> None:
        weight = nn.Parameter(distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)]))
        optimizer = AdamW([weight], lr=0.1, fused=True)
        optimizer.step()
        weight.grad = distribute_tensor(torch.ones(4), weight.device_mesh, [Shard(0)])
        optimizer.step()
        optimizer.state[weight]["exp_avg"] = torch.zeros(2)
        with pytest.raises(TypeError, match="a gradient or moment of a DTensor is a Tensor"):
            optimizer.step()

    run_ranks(2, on_rank)


def sharded() -> nn.Module:
    """Build two matrices with uneven shards."""
    model = matrices()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def fill_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        full = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(full, parameter.device_mesh, [Shard(0)], src_data_rank=None)


def test_skipped_steps_leave_shards_unchanged() -> None:
    """Only rank 0 has a non-finite gradient."""
    names = [name for name in OPTIMIZERS if name not in PLAIN_ONLY]

    def on_rank(rank: int) -> list[str]:
        return [line for name in names for line in compare(name, sharded, fill_gradients, poisoned=rank == 0)]

    problems = [line for lines in run_ranks(2, on_rank) for line in lines]
    assert not problems, "\n".join(problems)


SPIKE, STEPS = 5, 8
ONE: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"strategy": "single", "dp_shard": 1}),
    "fsdp2": (2, {"strategy": "fsdp2", "dp_shard": -1}),
    "ddp": (2, {"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2}),
    **{f"{axis} 2": (2, {**ONE, axis: 2}) for axis in ("tp", "cp", "pp")},
}


def spiky_run(plain: nn.Module, axes: dict[str, Any], window: int | None) -> tuple[list[float], list[float], list[str]]:
    """Return losses, `skipped` of the steps, and what the update of a step with losses times 1,000 changed here."""
    case = Case("llama", axes, accumulation=2)
    cfg, model = recipe_config(case), copy.deepcopy(plain).train()
    mesh = distributed.build_mesh(cfg.parallelism, "cpu")
    anatomy = models.read_anatomy(model)
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, case.dtype, anatomy)
    spikes = None if window is None else SpikeWindow(6.0, window, torch.device("cpu"))
    settings = training.StepSettings(torch.device("cpu"), mesh=mesh, spikes=spikes)
    replica = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
    prepared = training.Prepared(model, settings, replica).with_average(TrainingConfig(ema_decay=0.9))
    assert prepared.average is not None
    optimizer = training.build_optimizer(model, AdamWConfig(lr=1e-3))
    losses, skipped, changed = [], [], []
    for step in range(STEPS):
        batches = micro_batches(case, mesh, step)
        if step == SPIKE:
            batches = [replace(each, token_weights=torch.full(each.shape, 1000.0).double()) for each in batches]

        def tensors() -> dict[str, torch.Tensor]:
            stored = {f"{key} {number}": each for number, state in enumerate(optimizer.state.values())
                      for key, each in state.items()}  # fmt: skip
            values = dict(model.named_parameters()) | stored | prepared.average.tensors
            return {name: local_tensor(each.detach()).clone() for name, each in values.items()}

        before = tensors()
        numbers = training.train_step(prepared, batches, optimizer)
        losses.append(float(numbers["loss"]))
        skipped.append(float(numbers["skipped"]))
        if step == SPIKE:
            changed = [name for name, each in tensors().items() if not torch.equal(each, before[name])]
    return losses, skipped, changed


def test_a_spike_changes_nothing_on_any_mesh() -> None:
    """Neither weights nor moments nor the average; without the window it changes all. One loss curve on all meshes."""
    plain = build("llama", torch.float64)
    curves = {}
    for name, (world, axes) in MESHES.items():
        for losses, skipped, changed in run_ranks(world, lambda rank, axes: spiky_run(plain, axes, 8), axes):
            assert changed == [], name
            assert skipped == [2.0 if step == SPIKE else 0.0 for step in range(STEPS)], name
            curves[name] = losses
    assert curves["single"][SPIKE] > 100 * curves["single"][0]
    for name, losses in curves.items():
        assert losses == pytest.approx(curves["single"], rel=1e-10), name
    for window in (None, 2 * SPIKE + 2):  # half of the second is not full
        (outcome,) = run_ranks(1, lambda rank, window: spiky_run(plain, MESHES["single"][1], window), window)
        losses, skipped, changed = outcome
        assert skipped == [0.0] * STEPS
        assert len(changed) > 50
        assert losses[-1] != pytest.approx(curves["single"][-1], rel=1e-4)
