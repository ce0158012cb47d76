"""Random streams of ranks, and dropout on activations that sequence parallelism shards."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from components import distributed, models, training
from components.config.schema import ParallelismConfig
from components.config.schema.parallelism import ActivationCheckpointing
from tests.distributed.packed import Step, differences, one_step
from tests.distributed.parity import SMALL, build, pad, samples_of_step
from tests.harness import run_ranks

ONE = {"strategy": "fsdp2", "dp_shard": 1}
TP = {**ONE, "tp": 2}
SP = {**TP, "sequence_parallel": True}
MESHES: list[dict[str, Any]] = [
    {**ONE, "pp": 2, "cp": 2},
    {**ONE, "dp_shard": 2, "cp": 2},
    {**ONE, "pp": 2, "tp": 2},
    {**ONE, "dp_replicate": 2, "dp_shard": 2},
    {**ONE, "dp_shard": 2, "tp": 2},
    {**ONE, "cp": 2, "tp": 2},
]
VARIANTS = {"gpt_neox": ((False, False), (True, True)), "starcoder2": ((True, False),), "llama": ((False, False),)}
"""Model -> (whether layers are recomputed, whether layers are compiled)."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt_neox": {**SMALL, "model_type": "gpt_neox", "hidden_dropout": 0.3},  # dropout modules of the layer
    "starcoder2": {**SMALL, "model_type": "starcoder2", "residual_dropout": 0.3},  # dropout function in the blocks
    "llama": {**SMALL, "model_type": "llama", "attention_dropout": 0.3},  # dropout of the local heads
}


def test_ranks_draw_equal_random_numbers_only_within_a_tp_group() -> None:
    def on_rank(rank: int) -> list[tuple[tuple[int, ...], list[float]]]:
        drawn = []
        for shape in MESHES:
            mesh = distributed.build_mesh(ParallelismConfig(**shape), "cpu")
            distributed.seed_ranks(11, mesh)
            numbers = [*torch.rand(3).tolist(), random.random(), *np.random.rand(3)]
            drawn.append((tuple(mesh.rank(axis) for axis in ("pp", "dp", "cp")), numbers))
        return drawn

    for shape, ranks in zip(MESHES, zip(*run_ranks(4, on_rank), strict=True), strict=True):
        for coordinates, numbers in ranks:
            for other, others in ranks:
                assert (numbers == others) == (coordinates == other), f"{shape}: {coordinates} and {other}"
                assert coordinates == other or not set(numbers) & set(others), f"{shape}: {coordinates} and {other}"


def step_of(plain: Any, shape: dict[str, Any], recompute: bool, compiled: bool) -> Step:
    """Return the loss and full gradients of a step with dropout."""
    config = ParallelismConfig(**shape)
    mesh = distributed.build_mesh(config, "cpu")
    distributed.seed_ranks(3, mesh)
    model = copy.deepcopy(plain).train()
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, config, torch.float64)
    if recompute:
        models.checkpoint_activations(model, ActivationCheckpointing.full)
    if compiled:
        models.compile_layers(model, backend="eager")
    called = distributed.wrap_replicas(model, mesh, config, layout)
    settings = training.StepSettings(torch.device("cpu"), max_grad_norm=0.0, mesh=mesh)
    torch.manual_seed(5)
    return one_step(model, called, [pad(samples_of_step(0), 4)], settings)


def test_dropout_under_sequence_parallelism_matches_replicated_dropout() -> None:
    """Each rank applies its shard of the mask that plain tp applies, also when layers are recomputed and compiled."""
    built = {name: build(name, torch.float64, values) for name, values in MODELS.items()}

    def on_rank(rank: int) -> list[tuple[Step, Step, list[str]]]:
        found = []
        for name, plain in built.items():
            expected = step_of(plain, TP, recompute=False, compiled=False)
            problems = []
            for recompute, compiled in VARIANTS[name]:
                lines = differences(expected, step_of(plain, SP, recompute, compiled))
                problems += [f"{name} recompute={recompute} compiled={compiled}: {line}" for line in lines]
            for module in plain.modules():
                for key in ("p", "residual_dropout", "attention_dropout"):
                    if hasattr(module, key):
                        setattr(module, key, 0.0)
            found.append((expected, step_of(plain, TP, recompute=False, compiled=False), problems))
        return found

    for (first, without, problems), (second, _, others) in zip(*run_ranks(2, on_rank, timeout=120), strict=True):
        assert not problems + others, "\n".join(problems + others)
        assert not differences(first, second)  # without sequence parallelism, tp ranks apply the same mask
        assert without[0] != pytest.approx(first[0], rel=1e-6)  # dropout was applied
