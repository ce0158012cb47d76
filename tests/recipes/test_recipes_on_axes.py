"""The recipes on pipeline, context and expert parallelism, as a person starts them: one curve, one checkpoint format.

Two real processes per run, tiny models, three steps, packed rows; the reference is the same recipe in one process.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components import checkpoint, models
from components.config.compose import read_frozen
from components.config.schema import FinetuneConfig
from tests.harness import run_ranks
from tests.recipes.test_finetune import curve, result, run
from tests.tiny_models import logits

TORTURE = os.environ.get("MESHBOOK_TORTURE") == "1"

STEPS, LONGER = 3, 5
JOB = ("training.global_batch_size=8", "training.micro_batch_size=2", "training.seq_len=384", "data.pack=true",
       f"training.eval_every={STEPS}", "data.max_samples=32", "data.max_eval_samples=4", "optimizer.schedule=constant",
       "optimizer.lr=1e-3", "generation.samples=1", "generation.max_new_tokens=2", "cluster.device=cpu")  # fmt: skip
TWO = "cluster=local_2proc"
CURVES = ("loss", "grad_norm", "tokens")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs in one process by model; `tiny` goes on for two steps more."""
    runs = {}
    for model, steps in (("tiny", LONGER), ("tiny_moe", STEPS)):
        runs[model] = tmp_path_factory.mktemp("alone") / model
        run("finetune.py", f"model={model}", *JOB, "parallelism=single", f"training.max_steps={steps}",
            f"run.dir={runs[model]}", "checkpoint.export=false", cwd=runs[model].parent)  # fmt: skip
    return runs


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two pipeline stages."""
    folder = tmp_path_factory.mktemp("staged")
    run("finetune.py", "model=tiny", *JOB, "parallelism=pp2_1f1b", TWO, f"training.max_steps={STEPS}",
        f"run.dir={folder}/run", cwd=folder)  # fmt: skip
    return folder / "run"


def same_curve(run_dir: Path, expected: Path, steps: slice) -> None:
    for key in CURVES:
        assert curve(run_dir, key) == pytest.approx(curve(expected, key)[steps], rel=1e-5), key


def complete(run_dir: Path, steps: int) -> None:
    assert result(run_dir)["status"] == "ok"
    assert (run_dir / "checkpoints" / f"step_{steps}").is_dir()
    assert (run_dir / "export" / "model.safetensors.index.json").exists() or (
        run_dir / "export" / "model.safetensors"
    ).exists()


def test_a_pipeline_has_the_curve_of_one_process(staged: Path, alone: dict[str, Path]) -> None:
    same_curve(staged, alone["tiny"], slice(STEPS))
    # One process evaluates at the start, after STEPS steps and at the end; the pipeline's end is STEPS.
    assert curve(staged, "eval_loss") == pytest.approx(curve(alone["tiny"], "eval_loss")[:2], rel=1e-5)
    complete(staged, STEPS)


@pytest.mark.parametrize(("model", "mesh"), [("tiny_moe", "fsdp2_ep2"), *([("tiny", "fsdp2_cp2")] if TORTURE else [])])
def test_other_axes_have_it_too(model: str, mesh: str, alone: dict[str, Path], tmp_path: Path) -> None:
    run("finetune.py", f"model={model}", *JOB, f"parallelism={mesh}", TWO, f"training.max_steps={STEPS}",
        f"run.dir={tmp_path}/run", cwd=tmp_path)  # fmt: skip
    same_curve(tmp_path / "run", alone[model], slice(STEPS))
    assert curve(tmp_path / "run", "eval_loss") == pytest.approx(curve(alone[model], "eval_loss")[:2], rel=1e-5)
    complete(tmp_path / "run", STEPS)


@pytest.mark.skipif(not TORTURE, reason="continued is more than evaluated: make torture")
def test_what_stages_saved_is_evaluated_under_cp(staged: Path, tmp_path: Path) -> None:
    run("evaluate.py", "model=tiny", "parallelism=fsdp2_cp2", TWO, f"run.dir={tmp_path}/run",
        f"evaluation.checkpoint={staged}/checkpoints/step_{STEPS}", "evaluation.seq_len=384", "cluster.device=cpu",
        "data.max_eval_samples=4", "generation.samples=1", "generation.max_new_tokens=2", cwd=tmp_path)  # fmt: skip
    assert result(tmp_path / "run")["eval_loss"] == pytest.approx(result(staged)["eval_loss"], rel=1e-5)


def test_what_stages_saved_is_continued_under_cp(staged: Path, alone: dict[str, Path], tmp_path: Path) -> None:
    output = run("finetune.py", "model=tiny", *JOB, "parallelism=fsdp2_cp2", TWO, f"training.max_steps={LONGER}",
                 f"run.resume={staged}/checkpoints/step_{STEPS}", f"run.dir={tmp_path}/run", "checkpoint.export=false",
                 cwd=tmp_path)  # fmt: skip
    assert f"resumed from {staged}/checkpoints/step_{STEPS}" in output
    same_curve(tmp_path / "run", alone["tiny"], slice(STEPS, LONGER))


def test_the_export_of_stages_is_the_trained_model(staged: Path) -> None:
    """Transformers' own model from the export, against the weights of the checkpoint."""

    def trained(rank: int) -> torch.Tensor:
        cfg = read_frozen(staged / "config.yaml", FinetuneConfig)
        model = models.build_on_meta(cfg.model)
        models.materialize(model, "cpu")
        checkpoint.load_model_weights(staged / "checkpoints" / f"step_{STEPS}", model)
        return logits(model.eval())

    exported = AutoModelForCausalLM.from_pretrained(staged / "export").eval()
    assert exported.get_output_embeddings().weight is exported.get_input_embeddings().weight
    torch.testing.assert_close(run_ranks(1, trained)[0], logits(exported))
