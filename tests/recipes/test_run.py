"""Training loops over Run.steps() that break early, raise an exception, or do not end a step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.recipes.launching import Bench

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STEP = "            step.done(training.train_step(model, step.batches, optimizer, objective, step.requests))\n"
SHORT = (
    *("training.max_steps=6", "training.global_batch_size=4", "training.micro_batch_size=2", "training.seq_len=64"),
    *("data.max_samples=32", "data.max_eval_samples=2", "generation.samples=0", "cluster.device=cpu"),
    *("checkpoint.every=0", "checkpoint.export=false", "logging.plot=false", "run.dir=mine", "parallelism=single"),
)


def change_recipe(bench: Bench, before: str, after: str) -> None:
    text = (RECIPES / "finetune.py").read_text()
    assert text.count(before) == 1
    bench.recipe.write_text(text.replace(before, after))


def test_loop_that_breaks_early_saves_and_writes_a_result(bench: Bench) -> None:
    change_recipe(bench, STEP, f"{STEP}            if step.number == 3:\n                break\n")
    text = bench.recipe.read_text()
    assert text.count("        run.finish()\n") == 1
    threads = "        run.print(f'threads: {[each.name for each in __import__(\"threading\").enumerate()]}')\n"
    bench.recipe.write_text(text.replace("        run.finish()\n", f"{threads}        run.finish()\n"))
    done = bench.start(*SHORT).wait()
    assert done.status == 0, done.errors
    result = json.loads((bench.folder / "mine" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("ok", 3)
    assert "threads: ['MainThread'" in done.output
    assert "read_ahead" not in done.output  # of the 6 steps' batches, no more are read
    assert [path.name for path in (bench.folder / "mine" / "checkpoints").iterdir()] == ["step_3"]
    lines = [json.loads(line) for line in (bench.folder / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 3]


def test_exception_handled_by_the_recipe_still_leaves_a_result(bench: Bench) -> None:
    """The exception is raised in the middle of a step, whose context managers it leaves."""
    text = (RECIPES / "finetune.py").read_text()
    loop = text[
        text.index("        for step in run.steps()") : text.index("        if run.due_eval:\n            evaluate()")
    ]
    inner = "".join(f"    {line}\n" for line in loop.splitlines())
    planted = inner.replace(
        "                step.done(",
        "                if step.number == 3:\n                    1 / 0\n                step.done(",
    )
    handled = f"        try:\n{planted}        except ZeroDivisionError:\n            run.print('stopped at a zero')\n"
    bench.recipe.write_text(text.replace(loop, handled))
    done = bench.start(*SHORT).wait()
    assert done.status == 0, done.errors
    assert "stopped at a zero" in done.output
    result = json.loads((bench.folder / "mine" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("ok", 2)
    (saved,) = (bench.folder / "mine" / "checkpoints").iterdir()
    assert saved.name == "step_2"
    # A resume trains on the batch of the third step, which was read but not trained on.
    assert json.loads((saved / "state.json").read_text())["extra"]["data"]["step"] == 2


def test_checkpoint_saved_before_the_evaluation_has_no_held_out_loss(bench: Bench) -> None:
    """checkpoint.keep_best would keep it for the loss of an earlier step."""
    text = (RECIPES / "finetune.py").read_text()
    evaluation, save = (
        "            if step.due_eval:\n",
        "            if step.due_save:\n                run.save(step)\n",
    )
    assert text.count(evaluation) == text.count(save) == 1
    bench.recipe.write_text(text.replace(save, "").replace(evaluation, save + evaluation))
    done = bench.start(*SHORT, "training.eval_every=2", "checkpoint.every=2", "checkpoint.keep=9").wait()
    assert done.status == 0, done.errors
    manifests = (bench.folder / "mine" / "checkpoints").glob("step_*/manifest.json")
    marked = {file.parent.name: json.loads(file.read_text())["body"]["eval_loss"] is not None for file in manifests}
    assert marked == {"step_2": False, "step_4": False, "step_6": True}


def test_groups_keep_their_learning_rates_and_logged_names_are_checked(bench: Bench) -> None:
    change_recipe(bench, STEP, f"            run.log(step, head_lr=optimizer.param_groups[0]['lr'])\n{STEP}")
    text, built = bench.recipe.read_text(), "        optimizer = training.build_optimizer(model, cfg.optimizer)\n"
    assert text.count(built) == 1
    own = """
        import torch
        head, *others = reversed([*model.module.parameters()])
        rate = cfg.optimizer.lr
        optimizer = torch.optim.AdamW([{"params": [head], "lr": 10 * rate}, {"params": others}], lr=rate)
"""
    bench.recipe.write_text(text.replace(built, own))
    done = bench.start(*SHORT).wait()
    assert done.status == 0, done.errors
    lines = [json.loads(line) for line in (bench.folder / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [line["head_lr"] for line in lines if "loss" in line] == pytest.approx(
        [10 * line["lr"] for line in lines if "loss" in line]
    )
    bench.recipe.write_text(bench.recipe.read_text().replace("head_lr=", "lr="))
    done = bench.start(*SHORT, "run.dir=other").wait()
    assert done.status == 1
    assert "run.log(step, lr=...): every line of metrics.jsonl has lr already" in done.errors


def test_unhandled_exception_ends_the_run_as_failed(bench: Bench) -> None:
    change_recipe(bench, STEP, f"{STEP}            if step.number == 3:\n                1 / 0\n")
    done = bench.start(*SHORT).wait()
    assert done.status == 1
    assert "ZeroDivisionError" in done.errors
    result = json.loads((bench.folder / "mine" / "result.json").read_text())
    assert result["status"] == "failed"


def test_step_that_is_not_ended_is_rejected(bench: Bench) -> None:
    change_recipe(bench, STEP, "")
    done = bench.start(*SHORT).wait()
    assert done.status == 1
    assert "step 1 of run.steps() was not ended: call step.done(train_step(...)) in it" in done.errors


def test_lead_that_is_shorter_than_two_steps_and_a_save_is_reported_once(bench: Bench) -> None:
    """The steps sleep 0.4 s, a save 2.5 s."""
    slow = """    from components.checkpoint import saver
    from components.config.schema.cluster import ClusterKind
    import time
    cfg.cluster.kind = ClusterKind.slurm
    write = saver.write_snapshot
    saver.write_snapshot = lambda *args: (time.sleep(2.5), write(*args))[1]
    with training.Run(cfg) as run:
"""
    change_recipe(bench, "    with training.Run(cfg) as run:\n", slow)
    bench.recipe.write_text(bench.recipe.read_text().replace(STEP, f"            time.sleep(0.4)\n{STEP}"))
    settings = ("training.max_steps=4", "checkpoint.every=3", "checkpoint.last=false", "cluster.signal_lead_seconds=3")
    done = bench.start(*SHORT, *settings).wait()
    assert done.status == 0, done.errors
    (line,) = [line for line in done.output.splitlines() if "signal_lead_seconds" in line]
    needed, step, save, advised = map(float, re.findall(r"(?<![=\d.])\d+(?:\.\d+)?(?= s\b| or more)", line))
    assert (step >= 0.4, save >= 2.5, advised > needed) == (True, True, True)
    assert needed == pytest.approx(2 * step + save, abs=0.2)
    assert done.output.index(line) > done.output.index("saved ")
