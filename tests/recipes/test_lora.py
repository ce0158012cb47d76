"""The recipes with LoRA adapters, called in forked processes: train, resume, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.config.compose.frozen import frozen_text
from components.config.schema import EvaluateConfig, FinetuneConfig, RecipeConfig
from recipes import evaluate, finetune
from tests.config.composed import config_of
from tests.harness import run_ranks
from tests.recipes.test_finetune import curve, result

JOB = ("model=tiny", "peft=lora", "cluster.device=cpu", "data.max_eval_samples=4", "generation.samples=1",
       "generation.max_new_tokens=2", "parallelism=single", "logging.plot=false")  # fmt: skip
TRAINING = ("training.global_batch_size=4", "training.micro_batch_size=1", "training.seq_len=128",
            "data.max_samples=16", "training.max_steps=4", "optimizer.lr=1e-2", "optimizer.schedule=constant",
)  # fmt: skip


def run(recipe: Any, schema: type[RecipeConfig], run_dir: Path, *overrides: str) -> None:
    """Write the frozen config and call main, as the launcher does after validation."""
    name = recipe.__name__.rpartition(".")[2]
    cfg = config_of(name, *JOB, *overrides, f"run.dir={run_dir}", schema=schema)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(frozen_text(cfg))
    run_ranks(1, lambda rank: recipe.main.__wrapped__(cfg), init=False, timeout=120)


def test_lora_run_is_resumed_and_evaluated(tmp_path: Path) -> None:
    full_run, resumed, evaluated = tmp_path / "full_run", tmp_path / "resumed", tmp_path / "evaluated"
    run(finetune, FinetuneConfig, full_run, *TRAINING, "checkpoint.every=2", "checkpoint.keep=2", "peft.export=merged")
    step_prefix = f"{full_run}/checkpoints/step_"
    run(finetune, FinetuneConfig, resumed, *TRAINING, f"run.resume={step_prefix}2", "checkpoint.export=false")
    assert curve(resumed) == curve(full_run)[2:]
    assert result(resumed)["eval_loss"] == result(full_run)["eval_loss"] < result(full_run)["first_eval_loss"]
    assert result(resumed)["first_eval_loss"] == result(full_run)["first_eval_loss"]  # restored
    assert (full_run / "export" / "model.safetensors").exists()
    run(evaluate, EvaluateConfig, evaluated, f"evaluation.checkpoint={step_prefix}4", "evaluation.seq_len=128")
    assert result(evaluated)["eval_loss"] == pytest.approx(result(full_run)["eval_loss"], rel=1e-6)
