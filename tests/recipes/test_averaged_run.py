"""A run with a moving average of the weights: its held-out loss, its export and scripts/export.py --averaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scripts import export
from tests.recipes.launching import Bench

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "finetune.py"
SHORT = (
    *("data=text", "data.path=texts.jsonl", "training.global_batch_size=4", "training.micro_batch_size=2"),
    *("training.seq_len=64", "training.eval_every=2", "training.max_steps=4", "generation.samples=0"),
    *("logging.plot=false", "logging.examples=0", "cluster.device=cpu", "parallelism=single", "run.dir=run"),
    *("optimizer.lr=1e-2", "training.ema_decay=0.5", "training.eval_weights=both"),
)


def test_average_is_evaluated_and_exported(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.recipe.write_text(RECIPE.read_text())
    rows = [{"text": f"text {number} " + "abcdefg " * (number % 7)} for number in range(60)]
    (bench.folder / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = bench.start(*SHORT).wait()
    assert done.status == 0, done.errors
    assert "weight average  exponential, decay 0.5" in done.output
    run = bench.folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["eval_loss"], line["eval_loss_trained"]) for line in lines if "eval_loss" in line]
    assert len(losses) == 3
    assert losses[0][0] == losses[0][1]
    assert losses[-1][0] != losses[-1][1]
    assert json.loads((run / "result.json").read_text())["eval_loss"] == losses[-1][0]

    assert export.main([str(run), "--averaged"]) == 0
    assert export.main([str(run)]) == 0
    exported = load_file(run / "export" / "model.safetensors")
    averaged = load_file(run / "export-averaged-step_4" / "model.safetensors")
    trained = load_file(run / "export-step_4" / "model.safetensors")
    assert exported.keys() == averaged.keys() == trained.keys()
    assert all(torch.equal(exported[name], each) for name, each in averaged.items())
    assert not any(torch.equal(trained[name], each) for name, each in averaged.items())
    loaded = AutoModelForCausalLM.from_pretrained(run / "export-averaged-step_4").state_dict()
    assert all(torch.equal(loaded[name], each) for name, each in averaged.items())
    assert "exponential moving average, decay 0.5" in (run / "export-averaged-step_4" / "README.md").read_text()

    done = bench.start(
        *SHORT, "training.ema_decay=null", "training.eval_weights=average", "training.max_steps=5"
    ).wait()
    assert done.status == 0, done.errors
    assert "the average of the weights in the checkpoint is not continued" in done.output
    capsys.readouterr()
    assert export.main([str(run / "checkpoints" / "step_5"), "--averaged"]) == 2
    assert "holds no moving average of the weights" in capsys.readouterr().err
