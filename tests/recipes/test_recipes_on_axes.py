"""The recipes under pipeline, context and expert parallelism: the curve of one process, and one checkpoint format.

Two real processes per run, tiny models, three steps, packed rows; the reference is the same recipe in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components import checkpoint, models
from components.config.compose import read_frozen
from components.config.schema import FinetuneConfig
from tests.harness import run_ranks
from tests.recipes.test_finetune import curve, result, run
from tests.suites import TORTURE
from tests.tiny_models import logits

STEPS, LONGER = 3, 5
JOB = ("training.global_batch_size=8", "training.micro_batch_size=2", "training.seq_len=384", "data.pack=true",
       f"training.eval_every={STEPS}", "data.max_samples=32", "data.max_eval_samples=4", "optimizer.schedule=constant",
       "optimizer.lr=1e-3", "generation.samples=1", "generation.max_new_tokens=2", "cluster.device=cpu")  # fmt: skip
TWO = "cluster=local_2proc"
CURVES = ("loss", "grad_norm", "tokens")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories of single-process runs by model; `tiny` trains for two more steps."""
    runs = {}
    for model, steps in (("tiny", LONGER), ("tiny_moe", STEPS)):
        runs[model] = tmp_path_factory.mktemp("alone") / model
        run("finetune.py", f"model={model}", *JOB, "parallelism=single", f"training.max_steps={steps}",
            f"run.dir={runs[model]}", "checkpoint.export=false", cwd=runs[model].parent)  # fmt: skip
    return runs


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a run on two pipeline stages."""
    folder = tmp_path_factory.mktemp("staged")
    run("finetune.py", "model=tiny", *JOB, "parallelism=pp2_1f1b", TWO, f"training.max_steps={STEPS}",
        f"run.dir={folder}/run", cwd=folder)  # fmt: skip
    return folder / "run"


def assert_same_curve(run_dir: Path, expected: Path, steps: slice) -> None:
    for key in CURVES:
        assert curve(run_dir, key) == pytest.approx(curve(expected, key)[steps], rel=1e-5), key


def assert_complete(run_dir: Path, steps: int) -> None:
    assert result(run_dir)["status"] == "ok"
    assert (run_dir / "checkpoints" / f"step_{steps}").is_dir()
    assert (run_dir / "export" / "model.safetensors.index.json").exists() or (
        run_dir / "export" / "model.safetensors"
    ).exists()


def test_pipeline_logs_the_curve_of_one_process(pipeline: Path, single: dict[str, Path]) -> None:
    assert_same_curve(pipeline, single["tiny"], slice(STEPS))
    # The single-process run evaluates at the start, at STEPS and at its end; the pipeline run ends at STEPS.
    assert curve(pipeline, "eval_loss") == pytest.approx(curve(single["tiny"], "eval_loss")[:2], rel=1e-5)
    assert_complete(pipeline, STEPS)


@pytest.mark.parametrize(("model", "mesh"), [("tiny_moe", "fsdp2_ep2"), *([("tiny", "fsdp2_cp2")] if TORTURE else [])])
def test_other_axes_log_the_curve_of_one_process(
    model: str, mesh: str, single: dict[str, Path], tmp_path: Path
) -> None:
    run("finetune.py", f"model={model}", *JOB, f"parallelism={mesh}", TWO, f"training.max_steps={STEPS}",
        f"run.dir={tmp_path}/run", cwd=tmp_path)  # fmt: skip
    assert_same_curve(tmp_path / "run", single[model], slice(STEPS))
    assert curve(tmp_path / "run", "eval_loss") == pytest.approx(curve(single[model], "eval_loss")[:2], rel=1e-5)
    assert_complete(tmp_path / "run", STEPS)


@pytest.mark.skipif(not TORTURE, reason="the resume test below covers more: make torture")
def test_pipeline_checkpoint_is_evaluated_under_cp(pipeline: Path, tmp_path: Path) -> None:
    run("evaluate.py", "model=tiny", "parallelism=fsdp2_cp2", TWO, f"run.dir={tmp_path}/run",
        f"evaluation.checkpoint={pipeline}/checkpoints/step_{STEPS}", "evaluation.seq_len=384", "cluster.device=cpu",
        "data.max_eval_samples=4", "generation.samples=1", "generation.max_new_tokens=2", cwd=tmp_path)  # fmt: skip
    assert result(tmp_path / "run")["eval_loss"] == pytest.approx(result(pipeline)["eval_loss"], rel=1e-5)


def test_pipeline_checkpoint_is_resumed_under_cp(pipeline: Path, single: dict[str, Path], tmp_path: Path) -> None:
    output = run("finetune.py", "model=tiny", *JOB, "parallelism=fsdp2_cp2", TWO, f"training.max_steps={LONGER}",
                 f"run.resume={pipeline}/checkpoints/step_{STEPS}", f"run.dir={tmp_path}/run",
                 "checkpoint.export=false", cwd=tmp_path)  # fmt: skip
    assert f"resumed from {pipeline}/checkpoints/step_{STEPS}" in output
    assert_same_curve(tmp_path / "run", single["tiny"], slice(STEPS, LONGER))


def test_pipeline_export_has_the_weights_of_the_checkpoint(pipeline: Path) -> None:
    """Compare the logits of the exported model in transformers with those of the checkpoint's weights."""

    def trained(rank: int) -> torch.Tensor:
        cfg = read_frozen(pipeline / "config.yaml", FinetuneConfig)
        model = models.build_on_meta(cfg.model)
        models.materialize(model, "cpu")
        checkpoint.load_model_weights(pipeline / "checkpoints" / f"step_{STEPS}", model)
        return logits(model.eval())

    exported = AutoModelForCausalLM.from_pretrained(pipeline / "export").eval()
    assert exported.get_output_embeddings().weight is exported.get_input_embeddings().weight
    torch.testing.assert_close(run_ranks(1, trained)[0], logits(exported))
