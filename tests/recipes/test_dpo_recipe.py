"""recipes/dpo.py end to end: resumed runs log the same metrics, with adapters too; a lost reference is rejected."""

from __future__ import annotations

import csv
import json
import random
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.recipes.launching import EXIT_AFTER_SAVE, RECIPES, Bench
from tests.recipes.small_jobs import lines_of, write_rows
from tests.suites import TORTURE

EXPORT = RECIPES.parent / "scripts" / "export.py"
SHORT = (
    *("data.path=pairs.jsonl", "training.global_batch_size=4", "training.micro_batch_size=2"),
    *("training.seq_len=64", "training.eval_every=2", "generation.samples=0", "checkpoint.every=2"),
    *("checkpoint.export=false", "logging.plot=false", "cluster.device=cpu", "optimizer.lr=1e-3"),
)


@pytest.fixture
def dpo(bench: Bench) -> Bench:
    """A folder with a copy of the recipe and 40 pairs of unequal answers."""
    bench.copy("dpo.py")
    rng = random.Random(3)
    rows = []
    for number in range(40):
        answers = ["".join(rng.choices("abcdefgh ", k=rng.randint(3, 25))) for _ in range(2)]
        rows.append({"prompt": f"question {number}?", "chosen": answers[0], "rejected": answers[1], "source": "here"})
    write_rows(bench.folder / "pairs.jsonl", rows)
    return bench


@pytest.mark.parametrize("peft", ["none", "lora"] if TORTURE else ["lora"])
def test_resumed_run_logs_the_metrics_of_an_uninterrupted_run(dpo: Bench, peft: str) -> None:
    packed = "data.pack=true" if peft == "lora" else "data.pack=false"
    common = (*SHORT, f"peft={peft}", packed, "training.max_steps=4")
    uninterrupted = dpo.complete(*common, "run.dir=uninterrupted", "parallelism=single")
    expected = lines_of(dpo.folder / "uninterrupted")
    first = expected[0]
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)  # log 2: the policy still equals the reference
    assert {"margin", "accuracy", "reward_chosen", "log_prob_rejected"} <= first.keys()
    assert "column source" in uninterrupted.output  # reported as unused
    assert "attention: " in uninterrupted.output
    assert "logits, 256 tokens x" in uninterrupted.output  # 2 pairs of 2 rows of 64 tokens, or 2 packed rows
    exported = subprocess.run(
        [sys.executable, EXPORT, "uninterrupted"], cwd=dpo.folder, capture_output=True, text=True, check=False
    )
    assert exported.returncode == 0, exported.stderr

    dpo.copy("dpo.py", EXIT_AFTER_SAVE)
    assert dpo.run(*common, "run.dir=again", "parallelism=single").status == 9
    dpo.copy("dpo.py")
    again = dpo.complete(*common, "run.dir=again", "parallelism=single")
    assert "resumed from" in again.output
    assert lines_of(dpo.folder / "again") == expected


@pytest.mark.skipif(not TORTURE, reason="four runs, as test_preferences.py compares in float64: make torture")
def test_every_way_to_score_the_reference_logs_the_same_metrics(dpo: Bench) -> None:
    """By a pass before training, by a second copy of the weights, and by the model without its adapters."""
    for adapters, methods in (("none", ["precomputed", "frozen_copy"]), ("lora", ["precomputed", "adapters_off"])):
        logged = []
        for method in methods:
            run = f"{adapters}-{method}"
            arguments = (f"peft={adapters}", f"objective.reference={method}", "training.max_steps=3", f"run.dir={run}")
            dpo.complete(*SHORT, *arguments, "parallelism=single")
            logged.append(lines_of(dpo.folder / run, "step"))
            assert bool([*(dpo.folder / run).glob("reference-*")]) == (method == "precomputed")
        for one, other in zip(*logged, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6), adapters


def test_reference_log_probs_are_read_by_a_resume_only_and_computed_again_without_their_file(dpo: Bench) -> None:
    common = (*SHORT, "run.dir=mine", "parallelism=single")
    dpo.complete(*common, "training.max_steps=2")
    files = [*(dpo.folder / "mine").glob("reference-*.safetensors")]
    for file in files:  # as if another model had been at model.path
        save_file({name: each - 5 for name, each in load_file(file).items()}, file)
    shutil.rmtree(dpo.folder / "mine" / "checkpoints")
    dpo.complete(*common, "training.max_steps=2")
    begun = [line for line in lines_of(dpo.folder / "mine") if line["step"] == 1]
    assert [line["loss"] for line in begun] == pytest.approx([0.693147], abs=1e-5)
    assert begun[0]["reward_chosen"] == pytest.approx(0, abs=1e-5)
    before = {file: load_file(file) for file in files}
    for file in files:  # as in another run directory
        file.unlink()
    done = dpo.complete(*common, "training.max_steps=4")
    for file, tensors in before.items():
        assert f"{file.name}: missing; the log-probabilities under" in done.output + done.errors
        for name, each in load_file(file).items():
            assert torch.allclose(each, tensors[name])


def test_sweep_over_beta_is_compared_by_held_out_accuracy(dpo: Bench) -> None:
    common = (*SHORT, "training.max_steps=2", "checkpoint.every=0", "parallelism=single")
    done = dpo.complete(*common, "-m", "objective.beta=0.05,0.5", "run.dir=sweep")
    assert "best: by held-out accuracy, since the points train different curves" in done.output
    with (dpo.folder / "sweep" / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["objective.beta"] for row in rows) == ["0.05", "0.5"]
    accuracies = []
    for row in rows:
        run = json.loads((dpo.folder / "sweep" / row["run"] / "result.json").read_text())
        evaluated = lines_of(dpo.folder / "sweep" / row["run"], "eval_accuracy")
        assert float(row["eval_accuracy"]) == run["eval_accuracy"] == evaluated[-1]["eval_accuracy"]
        accuracies.append(run["eval_accuracy"])
    assert accuracies == sorted(accuracies, reverse=True)
    assert [row["best"] for row in rows] == ["True", "False"]
