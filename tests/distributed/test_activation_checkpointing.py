"""Activation checkpointing on meshes: gradients do not change, and `auto` selects the same policy on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from components import distributed, models, training
from components.config.schema import ParallelismConfig
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.training import TrainingConfig
from components.training.setup.recompute_policy import PREFERRED, estimate
from tests.distributed import parity
from tests.distributed.parity import Case, build, run_case
from tests.distributed.test_parity import FSDP2, SP, TP
from tests.harness import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("world", "axes"), [(2, FSDP2), (2, {**TP, **SP})])
def test_selective_gives_the_gradients_of_no_recompute(world: int, axes: dict[str, object]) -> None:
    expected = parity.reference(Case("llama", axes, 2, steps=1))
    model = build("llama", torch.float64)

    def on_rank(rank: int) -> parity.Curve:
        recomputed = {**axes, "activation_checkpointing": "selective"}
        models.checkpoint_activations(model, ActivationCheckpointing.selective)
        return run_case(Case("llama", recomputed, 2, steps=1), model)[0]

    for curve in run_ranks(world, on_rank):
        assert curve.gradients.keys() == expected.gradients.keys()
        for name, gradient in curve.gradients.items():
            assert parity.relative(gradient, expected.gradients[name]) < 1e-10, name


def test_auto_selects_the_least_recompute_that_fits_on_all_ranks() -> None:
    def on_rank(rank: int) -> list[str]:
        model = build("llama", torch.float32, {**parity.MODELS["llama"], "num_hidden_layers": 8})
        models.use_causal_sdpa(model)
        config = ParallelismConfig(dp_shard=2, activation_checkpointing=ActivationCheckpointing.auto)
        load = training.StepLoad(TrainingConfig(micro_batch_size=4, global_batch_size=8, seq_len=64), config)
        mesh = distributed.build_mesh(config, "cpu")
        distributed.parallelize(model, mesh, config, torch.float32)
        estimates = estimate(model, load, mesh, CPU, torch.float32)
        assert estimates[PREFERRED[0]] > estimates[PREFERRED[1]] > estimates[PREFERRED[2]]
        reports = []
        for policy in PREFERRED:
            memory = int(estimates[policy] / 0.9) + 1 - rank  # rank 1 has less memory and decides
            reports.append(
                str(training.choose_recompute_policy(model, load, mesh, CPU, torch.float32, memory + 1).policy)
            )
        short = training.choose_recompute_policy(model, load, mesh, CPU, torch.float32, 2**40 if rank == 0 else 1)
        reports.append(str(short.policy))
        load = replace(load, compiles=True)
        reports.append(
            str(training.choose_recompute_policy(model, load, mesh, CPU, torch.float32, estimates[PREFERRED[1]]))
        )
        return reports

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert first[:4] == ["none", "selective", "full", "full"]
    assert first[4].startswith("activation checkpointing: full, estimated share of 0.0 GiB per rank: none ")
    assert "selective" not in first[4]


def test_explicit_policy_reports_nothing() -> None:
    load, model = training.StepLoad(TrainingConfig(), ParallelismConfig()), build("llama", torch.float32)
    assert not training.choose_recompute_policy(model, load, None, CPU, torch.float32)  # type: ignore[arg-type]
