"""Runs of a checkpoint with an MTP layer: exports on two ranks and of scripts, and a run that lost its base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from components.models.tokenizer import byte_tokenizer
from scripts.export import main as export
from tests.recipes.launching import TWO, Bench
from tests.unit.test_untrained_parts import MTP_NAMES, contents, mixed, stored, text_folder

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "pretrain.py"
SHORT = (
    *("model.revision=null", "data=text", "data.path=texts.jsonl", "training.max_steps=2"),
    *("training.global_batch_size=4", "training.micro_batch_size=1", "training.seq_len=64", "generation.samples=0"),
    *("checkpoint.every=1", "checkpoint.keep=2", "logging.plot=false", "cluster.device=cpu", "optimizer.lr=1e-2"),
    *("parallelism=fsdp2", TWO),
)


def test_mtp_layers_are_in_exports_and_a_lost_base_costs_no_trained_weights(bench: Bench) -> None:
    bench.recipe.write_text(RECIPE.read_text())
    rows = [{"text": f"text {number} " + "abcdefg " * (number % 7)} for number in range(40)]
    (bench.folder / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    further = mixed(MTP_NAMES["glm4_moe 2"])
    base = text_folder(bench.folder / "base", "glm4_moe", further)
    byte_tokenizer().save_pretrained(base)
    short = (*SHORT, f"model.path={base}")
    done = bench.complete(*short, "run.dir=run", model="smollm2_135m_hub")
    assert f"copied to exports from {base}: model.layers.2.* ({len(further)} tensors)" in done.output
    assert export([str(bench.folder / "run"), "--out", str(bench.folder / "out"), "--shard-size", "60KB"]) == 0
    before, whole = contents(base), contents(bench.folder / "run" / "export")
    for after in (whole, contents(bench.folder / "out")):
        assert {name: (dtype, shape) for name, (dtype, shape, _) in after.items()} == {
            name: (dtype, shape) for name, (dtype, shape, _) in before.items()
        }
        assert {name: after[name] for name in further} == {name: before[name] for name in further}
        assert after["lm_head.weight"] != before["lm_head.weight"]

    for file in base.glob("*.safetensors"):
        file.unlink()
    resume = f"run.resume={bench.folder}/run/checkpoints/step_1"
    done = bench.complete(*short, resume, "run.dir=resumed", model="smollm2_135m_hub")
    assert "not trained are unknown: model.path=" in done.output
    assert "make them readable, and export a checkpoint of the run with scripts/export.py" in done.output + done.errors
    alone = bench.folder / "resumed" / "export"
    assert "## Not copied" in (alone / "README.md").read_text()
    assert contents(alone).keys() == before.keys() - further.keys()
    for name, value in stored(alone).items():
        torch.testing.assert_close(value, stored(bench.folder / "run" / "export")[name], rtol=1e-5, atol=1e-6)
    assert not AutoModelForCausalLM.from_pretrained(alone, output_loading_info=True)[1]["missing_keys"]
    shutil.rmtree(bench.folder / "out")
    assert export([str(bench.folder / "resumed"), "--out", str(bench.folder / "out")]) == 2
    assert not (bench.folder / "out").exists()
