"""Memory estimates: of layers of several kinds, against dry runs, and of what a run keeps beside the trained model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components import distributed, training
from components.config.schema.data import DocsDataConfig, PreferencesDataConfig
from components.config.schema.model import DType, ModelConfig, WeightInit
from components.config.schema.objective import DPOConfig, Reference, TeacherConfig
from components.config.schema.parallelism import ActivationCheckpointing, ParallelismConfig
from components.config.schema.recipes import DistillConfig, DpoConfig, TrainConfig, frozen_model
from components.config.schema.training import TrainingConfig
from components.planning.fake_rank import local_bytes
from components.planning.formulas import layer_memory
from components.planning.formulas.memory import rank_memory
from components.planning.formulas.workload import build_workload
from tests.distributed.simulation_cases import HYBRID, finetune, simulate_each
from tests.distributed.test_memory import LLAMA
from tests.harness import run_ranks
from tests.suites import PARITY

CPU = torch.device("cpu")
AUTO = ActivationCheckpointing.auto
VOCABULARY = 264
MESHES: list[dict[str, Any]] = [
    {"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2},
    {"dp_shard": 2},
    {"dp_shard": 1, "tp": 2},
    {"dp_shard": 1, "pp": 2},
]
BFLOAT16 = {"model_values": {"compute_dtype": DType.bfloat16}}
LONG = {"seq_len": 256, "rows": 1}
STEPS: list[dict[str, Any]] = [
    {"world": 1, "strategy": "single", **LONG},
    {"world": 1, "strategy": "single", **LONG, **BFLOAT16},
    {"world": 1, "strategy": "single", **LONG, "activation_checkpointing": "full"},
    {"world": 2, "dp_shard": 2, **LONG},
    {"world": 2, "tp": 2, **LONG},
    {"world": 2, "pp": 2, "seq_len": 128, "rows": 2},
    {"world": 2, "cp": 2, **LONG},
]


def student(**values: Any) -> ModelConfig:
    config = {**LLAMA, "vocab_size": VOCABULARY, "tie_word_embeddings": False, **values}
    return ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=config)


def common(axes: dict[str, Any]) -> dict[str, Any]:
    sizes = TrainingConfig(micro_batch_size=1, global_batch_size=4, seq_len=64, ema_decay=0.9)
    return {"parallelism": ParallelismConfig(**axes, activation_checkpointing=AUTO), "training": sizes}


def with_reference(axes: dict[str, Any]) -> DpoConfig:
    """A reference in bfloat16, and averages in float32."""
    objective = DPOConfig(reference=Reference.frozen_copy)
    model = replace(student(), dtype=DType.bfloat16)
    return DpoConfig(model=model, data=PreferencesDataConfig(path="x"), objective=objective, **common(axes))


def with_teacher(axes: dict[str, Any], folder: Path) -> DistillConfig:
    """A larger teacher in bfloat16."""
    teacher = TeacherConfig(path=str(folder), tokenizer="bytes", dtype="bfloat16")
    return DistillConfig(model=student(), data=DocsDataConfig(), teacher=teacher, **common(axes))


def test_estimate_counts_frozen_models_and_averages_as_they_are_sharded(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 192, "num_hidden_layers": 6, "tie_word_embeddings": False}
    config = AutoConfig.for_model(**{**LLAMA, **sizes})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    configs = [cfg for axes in MESHES for cfg in (with_reference(axes), with_teacher(axes, tmp_path))]
    ranks = run_ranks(2, lambda rank: [held(each) for each in configs], timeout=240)
    for index, cfg in enumerate(configs):
        mesh = cfg.parallelism.resolve(2)
        for rank, figures in enumerate(ranks):
            estimate = rank_memory(build_workload(cfg, mesh, on_gpu=False), rank if mesh.pp > 1 else 0, "cpu")
            terms = {each.name: each.value for each in estimate.terms}
            average, frozen = figures[index]
            assert (terms["average"], terms["frozen model"]) == (average, frozen), cfg.parallelism
            assert min(average, frozen) > 100_000


def peaks(model: str, step: dict[str, Any]) -> tuple[int, int]:
    """Return the peak bytes of rank 0 by formulas, and by a simulation of the step."""
    cfg = finetune(model, **step)
    world = step["world"]
    estimate = rank_memory(build_workload(cfg, cfg.parallelism.resolve(world), on_gpu=False), 0, "cpu")
    return estimate.peak, simulate_each(cfg, world, [0])[0].peak


@pytest.mark.parametrize("model", HYBRID)
def test_formulas_agree_with_dry_runs_of_layers_of_several_kinds(model: str) -> None:
    steps = STEPS if PARITY else [STEPS[list(HYBRID).index(model) % len(STEPS)]]
    for step in steps:
        estimated, simulated = peaks(model, step)
        assert estimated == pytest.approx(simulated, rel=0.08), step


def test_a_missing_recurrence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_memory, "recurrence_bytes", lambda *_: (0.0, 0.0))
    estimated, simulated = peaks("Qwen3.5", STEPS[0])
    assert estimated < 0.8 * simulated


def held(cfg: TrainConfig) -> tuple[int, int]:
    """Return the bytes on this rank of the average and of the second model."""
    run = training.RunContext(distributed.build_mesh(cfg.parallelism, "cpu"), CPU)
    average = training.prepare(cfg, run, VOCABULARY).average
    frozen = training.prepare_frozen(cfg, run, VOCABULARY, frozen_model(cfg))
    return average.local_bytes, local_bytes(frozen.module.parameters())
