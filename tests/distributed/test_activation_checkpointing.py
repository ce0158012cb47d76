"""Activation checkpointing and deferred gradients on meshes: `auto` selects the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from components import distributed, training
from components.config.schema import ParallelismConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.parallelism import ActivationCheckpointing, MeshShape, Strategy
from components.config.schema.recipes import FinetuneConfig
from components.config.schema.training import TrainingConfig
from components.distributed.mesh import Mesh
from components.planning.formulas.policies import RESERVED_BYTES, grad_sync_peaks, policy_peaks
from components.planning.formulas.workload import build_workload
from components.training import preparation as prepare_file
from components.training.preparation import RecomputePolicy
from tests.distributed import parity
from tests.distributed.parity import build
from tests.harness import run_ranks

CPU = torch.device("cpu")


def test_auto_selects_the_least_recompute_that_fits_on_all_ranks() -> None:
    def on_rank(rank: int) -> list[str]:
        cfg = config()
        mesh = distributed.build_mesh(cfg.parallelism, "cpu")
        model = build("llama", torch.float32, dict(cfg.model.config))
        peaks = policy_peaks(cfg, build_workload(cfg, mesh.shape, on_gpu=False), "cpu")
        none, selective, full = peaks.values()
        assert none > selective > full
        reports = []
        for peak in (none, selective, full):
            memory = int(RESERVED_BYTES + peak * 1.081) - rank  # rank 1 has less memory and decides
            reports.append(str(choose(cfg, model, mesh, memory).policy))
        reports.append(str(choose(cfg, model, mesh, 2**40 if rank == 0 else 1).policy))
        compiled = replace(cfg, model=replace(cfg.model, compile="true"))
        return [*reports, str(choose(compiled, model, mesh, int(RESERVED_BYTES + selective * 1.081)))]

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert first[:4] == ["none", "selective", "full", "full"]
    assert "full, of 0.02 GiB usable per rank the policies need an estimated none 0.02, full 0.00" in first[4]


def test_auto_recomputes_in_full_if_the_formulas_do_not_cover_the_model() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xglm", num_layers=1, d_model=16, ffn_dim=16))
    chosen = choose(config(), model, Mesh(None, MeshShape(dp_shard=2)), 2**40)  # type: ignore[arg-type]
    assert chosen.policy is ActivationCheckpointing.full
    assert "cannot be estimated: model.family=xglm: the formulas do not cover this model type" in chosen.why


def test_explicit_policy_reports_nothing() -> None:
    cfg = replace(config(), parallelism=ParallelismConfig())
    assert not choose(cfg, build("llama", torch.float32), None)  # type: ignore[arg-type]


def test_gradients_are_deferred_on_a_gpu_only_where_that_fits() -> None:
    cfg, cuda = config(), torch.device("cuda")
    cfg = replace(cfg, training=TrainingConfig(micro_batch_size=1, global_batch_size=8, seq_len=32))
    explicit = replace(cfg, parallelism=ParallelismConfig(dp_shard=2))
    model, mesh = build("llama", torch.float32, dict(cfg.model.config)), Mesh(None, MeshShape(dp_shard=2))  # type: ignore[arg-type]
    workload = build_workload(explicit, mesh.shape, on_gpu=True)
    ((deferred, reduced),) = grad_sync_peaks(explicit, workload, "cuda")
    assert reduced < 0.9 * deferred
    enough = [int(RESERVED_BYTES + peak * 1.081) for peak in (deferred, reduced)]
    first, second = (training.choose_grad_sync(explicit, model, mesh, cuda, memory) for memory in enough)
    assert (first.deferred, second.deferred) == (True, False)
    assert str(second).startswith("gradients: reduced per micro-batch, of 0.00 GiB usable per rank they need")
    # Rather a reduction per micro-batch than more recomputation, with which deferred gradients would fit.
    none, *others = grad_sync_peaks(cfg, build_workload(cfg, mesh.shape, on_gpu=True), "cuda")
    assert none[1] < none[0]
    assert not training.choose_grad_sync(cfg, model, mesh, cuda, int(RESERVED_BYTES + none[1] * 1.081)).deferred
    assert others

    one = replace(explicit, training=replace(cfg.training, micro_batch_size=4))
    set_to = replace(explicit, parallelism=ParallelismConfig(dp_shard=2, defer_grad_sync="true"))
    for other, device in ((explicit, CPU), (one, cuda), (set_to, cuda)):
        chosen = training.choose_grad_sync(other, model, mesh, device, 1)
        assert (chosen.deferred, bool(chosen)) == (True, False)
    xglm = AutoModelForCausalLM.from_config(AutoConfig.for_model("xglm", num_layers=1, d_model=16, ffn_dim=16))
    unknown = training.choose_grad_sync(explicit, xglm, mesh, cuda, 1)
    assert unknown.deferred
    assert "cannot be estimated" in unknown.why


@pytest.mark.parametrize("deferred", [True, False])
def test_a_run_reduces_gradients_as_auto_chose(monkeypatch: pytest.MonkeyPatch, deferred: bool) -> None:
    monkeypatch.setattr(prepare_file, "choose_grad_sync", lambda *_: training.GradSync(deferred, "for a test"))
    cfg = replace(config(), parallelism=ParallelismConfig(strategy=Strategy.single, dp_shard=1))

    def on_rank(rank: int) -> tuple[bool, list[str]]:
        run = training.RunContext(distributed.build_mesh(cfg.parallelism, "cpu"), CPU)
        prepared = training.prepare(cfg, run, 97)
        return prepared.settings.defer_grad_sync, [str(note) for note in prepared.notes]

    ((deferred_now, notes),) = run_ranks(1, on_rank)
    assert deferred_now is deferred
    assert any(note.endswith("for a test") for note in notes)


def config() -> FinetuneConfig:
    sizes = {**parity.MODELS["llama"], "num_hidden_layers": 8}
    return FinetuneConfig(
        model=ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=sizes),
        data=DocsDataConfig(),
        parallelism=ParallelismConfig(dp_shard=2, activation_checkpointing=ActivationCheckpointing.auto),
        training=TrainingConfig(micro_batch_size=4, global_batch_size=8, seq_len=256),
    )


def choose(cfg: FinetuneConfig, model: nn.Module, mesh: Mesh, memory: int | None = None) -> RecomputePolicy:
    return training.choose_recompute_policy(cfg, model, mesh, CPU, memory)
