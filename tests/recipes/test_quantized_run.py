"""Runs of quantized checkpoints: the curve of the decoded one, and an export in bfloat16 that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from components.models.tokenizer import byte_tokenizer
from tests.quantized import quantized_folders
from tests.recipes.launching import TWO, Bench

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "pretrain.py"
SHORT = (
    *("model.revision=null", "data=text", "data.path=texts.jsonl", "training.max_steps=2"),
    *("training.global_batch_size=4", "training.micro_batch_size=1", "training.seq_len=64", "generation.samples=0"),
    *(
        "checkpoint.every=1",
        "training.log_every=1",
        "logging.plot=false",
        "cluster.device=cpu",
        "optimizer.lr=1e-2",
        "parallelism=fsdp2",
        TWO,
    ),
)


def test_runs_equal_those_of_decoded_files_and_exports_are_not_quantized(bench: Bench) -> None:
    bench.recipe.write_text(RECIPE.read_text())
    rows = [{"text": f"text {number} " + "abcdefg " * (number % 7)} for number in range(40)]
    (bench.folder / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    folder, plain = quantized_folders(bench.folder, "fp8 blocks")
    curves = {}
    for name, path in (("quantized", folder), ("plain", plain)):
        byte_tokenizer().save_pretrained(path)
        done = bench.complete(*SHORT, f"model.path={path}", f"run.dir={name}-run", model="smollm2_135m_hub")
        assert ("decoded from fp8 to bfloat16; exports are not quantized" in done.output) == (name == "quantized"), (
            done.output
        )
        metrics = (bench.folder / f"{name}-run" / "metrics.jsonl").read_text().splitlines()
        curves[name] = [row["loss"] for row in map(json.loads, metrics) if "loss" in row]
    assert curves["quantized"] == curves["plain"]
    assert len(curves["plain"]) == 2
    export = bench.folder / "quantized-run" / "export"
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
    assert "the weights were decoded from fp8 to bfloat16" in (export / "README.md").read_text()
    model, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    other = AutoModelForCausalLM.from_pretrained(bench.folder / "plain-run" / "export").state_dict()
    assert all(torch.equal(value, other[key]) for key, value in model.state_dict().items())
