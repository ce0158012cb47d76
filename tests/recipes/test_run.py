"""Training loops over Run.steps() that break early, raise an exception, or do not end a step."""

from __future__ import annotations

import json
import re

import pytest

from components.presentation import has_matplotlib
from tests.recipes.launching import RECIPES, SAVE, Bench

FINISH = "        run.finish()\n"
STEP = "            step.done(training.train_step(model, step.batches, optimizer, objective, step.requests))\n"
SHORT = (
    *("training.max_steps=6", "training.global_batch_size=4", "training.micro_batch_size=2", "training.seq_len=64"),
    *("data.max_samples=32", "data.max_eval_samples=2", "generation.samples=0", "cluster.device=cpu"),
    *("checkpoint.every=0", "checkpoint.export=false", "logging.plot=false", "run.dir=mine", "parallelism=single"),
)


def test_loop_that_breaks_early_saves_and_writes_a_result(bench: Bench) -> None:
    threads = "        run.print(f'threads: {[each.name for each in __import__(\"threading\").enumerate()]}')\n"
    breaks = f"{STEP}            if step.number == 3:\n                break\n"
    bench.copy("finetune.py", (STEP, breaks), (FINISH, threads + FINISH))
    done = bench.complete(*SHORT)
    result = json.loads((bench.folder / "mine" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("ok", 3)
    assert "threads: ['MainThread'" in done.output
    assert "read_ahead" not in done.output  # of the 6 steps' batches, no more are read
    assert [path.name for path in (bench.folder / "mine" / "checkpoints").iterdir()] == ["step_3"]
    assert [line["step"] for line in bench.lines(key="loss")] == [1, 2, 3]
    assert [line["step"] for line in bench.lines(key="eval_loss")] == [0, 3]


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
    done = bench.complete(*SHORT)
    assert "stopped at a zero" in done.output
    result = json.loads((bench.folder / "mine" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("ok", 2)
    (saved,) = (bench.folder / "mine" / "checkpoints").iterdir()
    assert saved.name == "step_2"
    # A resume trains on the batch of the third step, which was read but not trained on.
    assert json.loads((saved / "state.json").read_text())["extra"]["data"]["step"] == 2


def test_checkpoint_saved_before_the_evaluation_has_no_held_out_loss(bench: Bench) -> None:
    """checkpoint.keep_best would keep it for the loss of an earlier step."""
    evaluation, save = "            if step.due_eval:\n", f"            if step.due_save:\n{SAVE}"
    bench.copy("finetune.py", (save, ""), (evaluation, save + evaluation))
    bench.complete(*SHORT, "training.eval_every=2", "checkpoint.every=2", "checkpoint.keep=9")
    manifests = (bench.folder / "mine" / "checkpoints").glob("step_*/manifest.json")
    marked = {file.parent.name: json.loads(file.read_text())["body"]["eval_loss"] is not None for file in manifests}
    assert marked == {"step_2": False, "step_4": False, "step_6": True}


def test_run_with_rewards_is_judged_and_reported_by_them(bench: Bench) -> None:
    """The reward rises until step 4 and then falls; the loss of these steps is no judge."""
    own = "            run.report_eval(training.Evaluation(2.0, 8, 'answer', {'cut': 0.5}, reward))\n"
    evaluate = "        def evaluate() -> None:\n            reward = (4 - abs(4 - run.state.step)) / 8\n" + own
    log = f"            run.log(step, reward=step.number / 8, reward_std=0.1, answer_tokens=3.0)\n{STEP}"
    given = (
        "        def evaluate() -> None:\n            run.report_eval(training.evaluate(model, held_out, run=run))\n"
    )
    bench.copy("finetune.py", (given, evaluate), (STEP, log))
    keep = ("training.eval_every=2", "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_best=true")
    settings = (*SHORT, *keep, "training.early_stop_patience=2", "logging.plot=true", "checkpoint.export=true")
    done = bench.complete(*settings, "training.max_steps=20")
    result = json.loads((bench.folder / "mine" / "result.json").read_text())
    names = ("steps", "stopped_early", "first_reward", "last_reward", "first_eval_reward", "eval_reward", "eval_loss")
    assert [result[name] for name in names] == [8, True, 1 / 8, 1.0, 0.0, 0.0, None]
    manifests = (bench.folder / "mine" / "checkpoints").glob("step_*/manifest.json")
    marked = {file.parent.name: json.loads(file.read_text())["body"]["eval_reward"] for file in manifests}
    assert marked == {"step_4": 0.5, "step_8": 0.0}
    lines = done.output.splitlines()
    (first,) = [line for line in lines if line.startswith("step      0  ")]
    assert first.startswith("step      0  eval_reward 0.0000  eval_cut 0.5  ")
    assert first.endswith("  over 8 held-out answers")
    assert any(line.startswith("step      4  reward 0.5000  ") for line in lines)
    number = next(number for number, line in enumerate(lines) if line.startswith("ok: 8 steps on 1 process in "))
    assert lines[number + 1 : number + 3] == ["  reward 0.125 to 1.000", "  held-out reward 0.000 to 0.000"]
    assert lines[number + 3].endswith(" answer tokens/s with sampling")
    pictures = {file.name for file in (bench.folder / "mine").glob("*.png")}
    assert pictures == ({"reward.png"} if has_matplotlib() else set())
    card = (bench.folder / "mine" / "export" / "README.md").read_text()
    assert "| reward | 0.1250 in the first step, 1.0000 in the last |" in card
    assert "| held-out reward | 0.0000 after 0 steps, 0.0000 after 8 steps |" in card


def test_groups_keep_their_learning_rates_and_logged_names_are_checked(bench: Bench) -> None:
    log = f"            run.log(step, head_lr=optimizer.param_groups[0]['lr'])\n{STEP}"
    own = """
        import torch
        head, *others = reversed([*model.module.parameters()])
        rate = cfg.optimizer.lr
        optimizer = torch.optim.AdamW([{"params": [head], "lr": 10 * rate}, {"params": others}], lr=rate)
"""
    built = "        optimizer = training.build_optimizer(model, cfg.optimizer)\n"
    bench.copy("finetune.py", (STEP, log), (built, own))
    done = bench.complete(*SHORT)
    lines = bench.lines(key="loss")
    assert [line["head_lr"] for line in lines] == pytest.approx([10 * line["lr"] for line in lines])
    bench.recipe.write_text(bench.recipe.read_text().replace("head_lr=", "lr="))
    done = bench.start(*SHORT, "run.dir=other").wait()
    assert done.status == 1
    assert "run.log(step, lr=...): every line of metrics.jsonl has lr already" in done.errors


def test_unhandled_exception_ends_the_run_as_failed(bench: Bench) -> None:
    bench.copy("finetune.py", (STEP, f"{STEP}            if step.number == 3:\n                1 / 0\n"))
    done = bench.start(*SHORT).wait()
    assert done.status == 1
    assert "ZeroDivisionError" in done.errors
    result = json.loads((bench.folder / "mine" / "result.json").read_text())
    assert result["status"] == "failed"


def test_step_that_is_not_ended_is_rejected(bench: Bench) -> None:
    bench.copy("finetune.py", (STEP, ""))
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
    sleeping = STEP, f"            time.sleep(0.4)\n{STEP}"
    bench.copy("finetune.py", ("    with training.Run(cfg) as run:\n", slow), sleeping)
    settings = ("training.max_steps=4", "checkpoint.every=3", "checkpoint.last=false", "cluster.signal_lead_seconds=3")
    done = bench.complete(*SHORT, *settings)
    (line,) = [line for line in done.output.splitlines() if "signal_lead_seconds" in line]
    needed, step, save, advised = map(float, re.findall(r"(?<![=\d.])\d+(?:\.\d+)?(?= s\b| or more)", line))
    assert (step >= 0.4, save >= 2.5, advised > needed) == (True, True, True)
    assert needed == pytest.approx(2 * step + save, abs=0.2)
    assert done.output.index(line) > done.output.index("saved ")
