"""recipes/distill.py end to end: its losses; a stored teacher, resumed on another mesh with the same curve; other
tokenizers, data and settings are rejected."""

from __future__ import annotations

import re

import pytest

from components.models.tokenizer import byte_tokenizer
from tests.recipes.launching import EXIT_AFTER_SAVE, RECIPES, TWO, Bench, Done
from tests.recipes.small_jobs import lines_of, write_rows, write_teacher
from tests.suites import in_torture

SCRIPT = RECIPES.parent / "scripts" / "teacher.py"
COMMON = (
    *("data=text", "data.path=texts.jsonl", "training.global_batch_size=4"),
    *("training.micro_batch_size=1", "training.seq_len=64", "training.eval_every=2", "generation.samples=0"),
    *("checkpoint.every=2", "checkpoint.export=false", "logging.plot=false", "cluster.device=cpu"),
    *("optimizer.lr=1e-2", "objective.temperature=2", "objective.cross_entropy_weight=0.2"),
)
SHORT = ("teacher.path=teacher", *COMMON)


@pytest.fixture
def distill(bench: Bench) -> Bench:
    """A folder with a copy of the recipe, texts, and a teacher of another hidden size with the byte tokenizer."""
    bench.copy("distill.py")
    rows = [{"text": f"text {number} " + "abcdefg " * (number % 7)} for number in range(60)]
    write_rows(bench.folder / "texts.jsonl", rows)
    write_teacher(bench.folder / "teacher")
    return bench


def test_logged_loss_is_the_mix_of_its_terms_and_falls(distill: Bench) -> None:
    done = distill.complete(*SHORT, "training.max_steps=4", "run.dir=run", "parallelism=single")
    lines = lines_of(distill.folder / "run")
    assert lines[-1]["divergence"] < lines[0]["divergence"]
    mixed = 0.8 * 4 * lines[0]["divergence"] + 0.2 * lines[0]["cross_entropy"]
    assert lines[0]["loss"] == pytest.approx(mixed, rel=1e-5)
    assert "teacher_cross_entropy" in lines[0]
    assert re.search(r"^teacher +teacher: [\d,]+ parameters, ", done.output, re.MULTILINE)
    logged = lines_of(distill.folder / "run", "eval_loss")
    assert logged[-1]["eval_divergence"] < logged[0]["eval_divergence"] < 1 < logged[-1]["eval_loss"]


def test_teacher_with_another_tokenizer_is_rejected(distill: Bench) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(distill.folder / "teacher")
    done = distill.start(*SHORT, "training.max_steps=4", "parallelism=single").wait()
    assert done.status == 2
    assert "teacher.path=teacher: its tokenizer" in done.errors
    assert "260 have the same id in both" in done.errors
    assert "Traceback" not in done.errors


def run_script(bench: Bench, *arguments: str) -> Done:
    bench.recipe.write_text(SCRIPT.read_text())
    done = bench.start(*SHORT, *arguments).wait()
    bench.copy("distill.py")
    return done


@in_torture
def test_stored_teacher_has_the_curve_of_the_teacher_on_the_mesh_and_resumes_on_another(distill: Bench) -> None:
    """With as many tokens as the vocabulary has. The rows are packed."""
    done = run_script(distill, "data.pack=true", "teacher.top_k=264", "run.dir=stored", "parallelism=tp2", TWO)
    assert done.status == 0, done.errors
    assert "the 264 most likely tokens hold 100.00% of the probability" in done.output
    assert "next: recipes/distill.py with teacher.stored=" in done.output
    limit = ("data.pack=true", "training.max_steps=4")
    distill.complete(*SHORT, *limit, "run.dir=whole", "parallelism=single")
    expected = lines_of(distill.folder / "whole")

    distill.copy("distill.py", EXIT_AFTER_SAVE)
    again = (*COMMON, *limit, "teacher.stored=stored", "run.dir=again")
    assert distill.run(*again, "parallelism=single").status == 9
    distill.copy("distill.py")
    resumed = distill.complete(*again, "parallelism=fsdp2", TWO)
    assert "resumed from" in resumed.output
    for line, other in zip(lines_of(distill.folder / "again"), expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_stored_teacher_of_other_data_tokens_or_settings_is_rejected(distill: Bench) -> None:
    single = ("parallelism=single", "run.dir=stored")
    done = run_script(distill, *single, "teacher.top_k=5")
    assert done.status == 0, done.errors
    kept = {file.name: file.read_bytes() for file in (distill.folder / "stored").glob("top_k_*")}
    assert sorted(kept) == ["top_k_eval.safetensors", "top_k_train.safetensors"]

    repeated = run_script(distill, *single, "teacher.top_k=5")
    assert repeated.status == 0, repeated.errors
    assert repeated.output.count("already stored") == 2
    other = run_script(distill, *single, "teacher.top_k=6")
    assert other.status == 2
    assert "top_k_train.safetensors was stored from other data, another teacher or other settings" in other.errors
    assert {file.name: file.read_bytes() for file in (distill.folder / "stored").glob("top_k_*")} == kept

    use = (*COMMON, "teacher.stored=stored", "training.max_steps=2", "parallelism=single")
    rejected = distill.start(*use, "training.seq_len=32").wait()
    assert rejected.status == 2
    assert "top_k_train.safetensors was written for other rows than the" in rejected.errors
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"cls_token": "<|other|>"})
    tokenizer.save_pretrained(distill.folder / "other")
    rejected = distill.start(*use, "model.tokenizer=other", "model.config.vocab_size=264").wait()
    assert rejected.status == 2
    assert "teacher.stored=stored: was written for another tokenizer" in rejected.errors
    assert "Traceback" not in rejected.errors + other.errors
