"""The memory estimate of activation_checkpointing=auto counts what a run loads and keeps besides the trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components import distributed, training
from components.config.schema.data import DocsDataConfig, LabelsDataConfig, PreferencesDataConfig
from components.config.schema.model import DType, ModelConfig, TeacherConfig, WeightInit
from components.config.schema.objective import DPOConfig, Reference
from components.config.schema.parallelism import ActivationCheckpointing, ParallelismConfig
from components.config.schema.recipes import ClassifyConfig, DistillConfig, DpoConfig, TrainConfig, frozen_model
from components.config.schema.training import TrainingConfig
from components.planning.dry_run.storages import local_bytes
from components.training.setup import prepare as prepare_file
from components.training.setup.recompute_policy import StepLoad, estimate
from scripts._memory.ranks import allocations, highest
from tests.distributed.test_memory import LLAMA
from tests.harness import run_ranks

CPU = torch.device("cpu")
AUTO, NONE = ActivationCheckpointing.auto, ActivationCheckpointing.none
VOCABULARY = 264
MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2},
    "fsdp2": {"dp_shard": 2},
    "tp": {"dp_shard": 1, "tp": 2},
    "pp": {"dp_shard": 1, "pp": 2},
}


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


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_estimate_counts_frozen_models_and_averages_as_they_are_sharded(tmp_path: Path, axes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(**{**LLAMA, "vocab_size": VOCABULARY, "hidden_size": 192, "num_hidden_layers": 6})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def on_rank(rank: int) -> list[dict[str, int]]:
        return [measured(each) for each in (with_reference(axes), with_teacher(axes, tmp_path))]

    for figures in zip(*run_ranks(2, on_rank, timeout=240), strict=True):
        for each in figures:
            assert each["estimated frozen"] == each["frozen"] > 100_000
            assert each["estimated average"] == each["average"] > 100_000


@contextmanager
def when_estimated(record: Callable[..., None]) -> Iterator[None]:
    """Call `record` with the arguments of the estimate when a model is prepared within the context."""
    choose = prepare_file.choose_recompute_policy

    def recorded(*args: Any, **keywords: Any) -> Any:
        record(*args, **keywords)
        return choose(*args, **keywords)

    prepare_file.choose_recompute_policy = recorded  # each rank is a process of its own
    try:
        yield
    finally:
        prepare_file.choose_recompute_policy = choose


def measured(cfg: TrainConfig) -> dict[str, int]:
    """Return what the estimate adds for the second model and for the average, and the bytes that they take."""
    figures: dict[str, int] = {}

    def record(model: Any, load: StepLoad, *args: Any, **keywords: Any) -> None:
        def need(changed: StepLoad) -> int:
            return estimate(model, changed, *args, **keywords)[NONE]

        without_average = replace(load, training=replace(load.training, ema_decay=None))
        figures["estimated average"] = need(load) - need(without_average)
        figures["estimated frozen"] = need(load) - need(replace(load, frozen_bytes=0))

    run = prepare_file._NewRun(distributed.build_mesh(cfg.parallelism, "cpu"), CPU)
    with when_estimated(record):
        average = training.prepare(cfg, run, VOCABULARY).average
    frozen = training.prepare_frozen(cfg, run, VOCABULARY, frozen_model(cfg))
    return {**figures, "average": average.local_bytes, "frozen": local_bytes(frozen.module.parameters())}


def test_estimate_of_a_score_head_is_close_to_the_measured_peak() -> None:
    """A vocabulary of 32k tokens in the embedding only: its logits would take more memory than everything else."""

    def on_rank(rank: int) -> tuple[int, int]:
        cfg = ClassifyConfig(
            model=student(vocab_size=32768),
            data=LabelsDataConfig(path="x", num_labels=3),
            parallelism=ParallelismConfig(strategy="single", dp_shard=1, activation_checkpointing=AUTO),
            training=TrainingConfig(micro_batch_size=4, global_batch_size=4, seq_len=256),
        )
        run = prepare_file._NewRun(distributed.build_mesh(cfg.parallelism, "cpu"), CPU)
        estimates: list[int] = []
        with when_estimated(lambda *args, **keywords: estimates.append(estimate(*args, **keywords)[NONE])):
            model = training.prepare(cfg, run, 32768).module
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            ids = torch.randint(32768, (4, 256))
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        held = local_bytes([*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())])
        with allocations() as changes:
            step()
        return estimates[0], held + highest(changes)

    ((estimated, peak),) = run_ranks(1, on_rank, timeout=120)
    assert estimated == pytest.approx(peak, rel=0.15)
