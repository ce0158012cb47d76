"""Benchmark tasks in recipes: during training on two ranks, and of the run's checkpoint in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.models.tokenizer import byte_tokenizer
from tests.harness import run_ranks
from tests.lm_eval_tasks import write_tasks
from tests.recipes.launching import TWO, Bench
from tests.recipes.small_jobs import lines_of, write_rows, write_teacher

pytest.importorskip("lm_eval.evaluator", reason="the extra `evaluation` is not installed; make install-dev installs it")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
SHORT = (
    *("data=jsonl", "data.path=train.jsonl", "data.eval_path=train.jsonl", "generation.samples=0"),
    *("logging.plot=false", "cluster.device=cpu", "run.dir=run"),
)
TASKS = ("evaluation.tasks=[pick,last_word]", "evaluation.task_path=tasks", "evaluation.limit=5")


@pytest.fixture
def bench(bench: Bench) -> Bench:
    rows = [{"prompt": f"what is {number}?", "response": " one" * (1 + number % 3)} for number in range(8)]
    write_rows(bench.folder / "train.jsonl", rows)
    write_tasks(bench.folder / "tasks")
    bench.copy("finetune.py")
    return bench


def test_tasks_are_logged_during_training_and_equal_those_of_the_checkpoint(bench: Bench) -> None:
    training = ("training.max_steps=3", "training.global_batch_size=4", "training.seq_len=64", "optimizer.lr=1e-2")
    every = ("evaluation.every=2", "training.eval_every=0", "optimizer.warmup_steps=0")
    ended = bench.complete(*SHORT, *TASKS, *training, *every, "parallelism=fsdp2", TWO, environment=OFFLINE)
    run = bench.folder / "run"
    scores = lines_of(run, "pick/acc")
    assert [line.pop("step") for line in scores] == [2, 3]
    assert set(scores[0]) == {"pick/acc", "pick/acc_norm", "last_word/acc"}
    result = json.loads((run / "result.json").read_text())
    assert result["tasks"] == scores[-1]
    assert "pick  acc 0." in ended.output
    assert "over 5 documents" in ended.output
    assert not {"it/s]", "examples/s]"} & set(ended.errors.split())

    bench.copy("evaluate.py")
    bench.complete("run=run", *TASKS, *SHORT[3:5], "run.dir=evaluated", model="tiny", environment=OFFLINE)
    assert json.loads((bench.folder / "evaluated" / "result.json").read_text())["tasks"] == scores[-1]


OTHERS = {
    "dpo": ("data.path=pairs.jsonl", "parallelism=tp2", TWO),
    "distill": ("data=jsonl", "data.path=train.jsonl", "teacher.path=teacher", "parallelism=single"),
}
"""Recipe -> its options."""


def scores_of_hflm(export: Path, tasks: Path) -> dict[str, float]:
    """Return the scores of lm-eval's own backend. In a process of its own: the test's process forks runs."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(export), tokenizer=byte_tokenizer(), device="cpu", dtype="float32")
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=["pick", "texts"], task_manager=manager, bootstrap_iters=0)
    return {
        f"{task}/{key.removesuffix(',none')}": value
        for task, values in found["results"].items()
        for key, value in values.items()
        if isinstance(value, float) and key.endswith(",none")
    }


@pytest.mark.parametrize("name", OTHERS)
def test_scores_of_other_recipes_equal_those_of_hflm_on_the_export(bench: Bench, name: str) -> None:
    """Of the trained model, and of the student: not of a reference or a teacher."""
    rows = [{"prompt": f"{number}?", "chosen": " yes" * (1 + number % 3), "rejected": " no"} for number in range(1, 9)]
    write_rows(bench.folder / "pairs.jsonl", rows)
    write_teacher(bench.folder / "teacher")
    bench.copy(f"{name}.py")
    training = ("training.max_steps=2", "training.global_batch_size=4", "training.seq_len=64", "optimizer.lr=1e-2")
    every = ("evaluation.every=1", "training.eval_every=0", "optimizer.warmup_steps=0", "data.max_eval_samples=2")
    tasks = ("evaluation.tasks=[pick,texts]", "evaluation.task_path=tasks")
    given = (*SHORT[3:], *OTHERS[name], *tasks, *training, *every)
    bench.complete(*given, environment=OFFLINE)
    run = bench.folder / "run"
    first, last = bench.lines("run", "pick/acc")
    assert (first["step"], last["step"]) == (1, 2)
    scores = json.loads((run / "result.json").read_text())["tasks"]
    assert first["texts/byte_perplexity"] != scores["texts/byte_perplexity"] == last["texts/byte_perplexity"]

    (expected,) = run_ranks(1, lambda rank: scores_of_hflm(run / "export", bench.folder / "tasks"))
    assert scores == pytest.approx(expected, rel=1e-5)
