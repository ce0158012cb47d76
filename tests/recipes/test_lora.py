"""The recipes with LoRA adapters: train, resume, evaluate, and start from an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.config.compose.frozen import frozen_text
from components.config.schema import EvaluateConfig, FinetuneConfig, RecipeConfig
from recipes import evaluate, finetune
from tests.config.composed import config_of
from tests.harness import run_ranks
from tests.recipes.launching import EXIT_AFTER_SAVE, TWO, Bench
from tests.recipes.small_jobs import COMMON, write_data
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


def test_one_adapter_goes_through_stages_on_different_meshes(bench: Bench) -> None:
    """Fine-tuned with new tokens, then DPO, resumed on another mesh; losses are those of one process."""
    write_data(bench.folder)
    base = bench.folder / "teacher"
    common = (
        *(*COMMON[1:], "model.tokenizer=bytes", "model.dtype=float64", "model.compute_dtype=float64", "peft=lora"),
        *("peft.rank=4", "peft.modules_to_save=[embed_tokens,lm_head]", "optimizer.lr=1e-3", "generation.samples=0"),
        *("model.new_tokens=['<think>','</think>','<|call|>','<|end|>','<a>','<b>']", "checkpoint.export=true"),
    )  # the 260 bytes and 6 tokens need 266 rows; the base has 264
    pairs = ("data.path=pairs.jsonl", "training.max_steps=4", "checkpoint.every=2", "training.eval_every=0")
    single = "parallelism=single"

    def complete(*arguments: str) -> str:
        done = bench.complete(*common, *arguments, model=str(base))
        return " ".join(done.output.split())

    bench.copy("finetune.py")
    tuning = ("data=text", "data.path=texts.jsonl", "training.max_steps=3", "training.eval_every=0")
    complete(*tuning, single, "run.dir=tuned")
    complete(*tuning, "parallelism=fsdp2", TWO, "run.dir=sharded")
    losses = [[line["loss"] for line in bench.lines(name, "grad_norm")] for name in ("tuned", "sharded")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert "adapter from tuned, trained over these" in complete(*tuning[:2], single, "run.dir=more", "peft.path=tuned")
    assert bench.lines("more")[0]["eval_loss"] == pytest.approx(bench.lines("tuned")[-1]["eval_loss"], rel=1e-9)

    bench.copy("dpo.py")
    complete(*pairs, single, "run.dir=whole", "peft.path=tuned/adapter")
    assert bench.lines("whole", "grad_norm")[0]["loss"] == pytest.approx(0.6931471805599453, rel=1e-12)  # log 2
    bench.copy("dpo.py", EXIT_AFTER_SAVE)
    assert bench.run(*common, *pairs, single, "run.dir=again", "peft.path=tuned/adapter", model=str(base)).status == 9
    bench.copy("dpo.py")
    for file in (bench.folder / "again").glob("reference-*.safetensors"):
        file.unlink()  # it is computed again, with the adapter that training began with
    complete(*pairs, "parallelism=tp2", TWO, "run.dir=again", "peft.path=tuned/adapter")
    for key in ("loss", "grad_norm", "margin"):
        whole, again = ([line[key] for line in bench.lines(name, "grad_norm")] for name in ("whole", "again"))
        assert again == pytest.approx(whole, rel=1e-8), key

    adapter = bench.folder / "again" / "adapter"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    ids = torch.tensor([tokenizer("x<think>y</think><|end|>")["input_ids"]])
    assert ids[0, 1] == 260
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    theirs.resize_token_embeddings(len(tokenizer))
    theirs = PeftModel.from_pretrained(theirs, adapter).eval()
    merged = AutoModelForCausalLM.from_pretrained(adapter.parent / "export").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, merged(ids).logits, rtol=1e-9, atol=1e-9)

    shutil.rmtree(bench.folder / "tuned")
    lost = bench.run(*common, *pairs, single, "run.dir=again", "peft.path=tuned/adapter", model=str(base))
    assert lost.status == 2
    assert "peft.path=tuned/adapter: " in lost.errors, lost.errors  # the reference needs it
    bench.copy("finetune.py")
    last = bench.lines("more")[-1]["step"]
    complete(*tuning[:2], single, "run.dir=more", "peft.path=tuned", f"training.max_steps={last + 1}")
    assert bench.lines("more")[-1]["step"] == last + 1  # the checkpoint holds the adapters
    bench.copy("dpo.py")
    shutil.copytree(adapter, bench.folder / "tuned" / "adapter")

    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    wrong = bench.run(*common, *pairs, single, "run.dir=other", "peft.path=tuned", model=str(base))
    assert wrong.status == 2
    assert "peft.path=tuned: the adapter was trained over other base weights (fingerprint" in wrong.errors
    rank = bench.run(*common, *pairs, single, "run.dir=other", "peft.path=tuned", "peft.rank=8", model=str(base))
    assert rank.errors.strip().endswith("set peft.rank=4"), rank.errors
    assert (
        not (bench.folder / "other").exists()
        or not json.loads((bench.folder / "other/result.json").read_text())["steps"]
    )
