"""scripts/answer.py end to end: one file of answers on every mesh, after a stop and a kill too; what is rejected."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from components.protocol.errors import EXIT_INVALID
from tests.recipes.launching import RECIPES, TWO, WAIT_TIMEOUT, Bench
from tests.recipes.small_jobs import write_rows

SCRIPT = RECIPES.parent / "scripts" / "answer.py"
COMMON = (
    *("answers.prompts=prompts.jsonl", "answers.per_prompt=3", "generation.temperature=1", "generation.rows=4"),
    *("generation.max_new_tokens=40", "model.dtype=float64", "model.compute_dtype=float64", "cluster.device=cpu"),
)
PROMPTS = 7


@pytest.fixture
def answering(bench: Bench) -> Bench:
    """A folder with a copy of the script, and prompts: texts and conversations of different lengths."""
    bench.recipe.write_text(SCRIPT.read_text())
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who?"}]
    rows = [{"prompt": f"{'why ' * number}{number}?", "id": number} for number in range(PROMPTS - 1)]
    write_rows(bench.folder / "prompts.jsonl", [*rows, {"messages": messages}])
    return bench


def answers_in(bench: Bench, name: str) -> list[dict[str, object]]:
    file = bench.folder / name / "answers.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def await_lines(file: Path, lines: int) -> None:
    deadline = time.monotonic() + WAIT_TIMEOUT
    while not file.is_file() or file.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_answers_are_the_same_on_every_mesh_and_continue_where_the_file_ends(answering: Bench) -> None:
    done = answering.complete(*COMMON, "run.dir=whole", "parallelism=single")
    expected = answers_in(answering, "whole")
    assert [(each["prompt"], each["sample"]) for each in expected] == [(p, s) for p in range(PROMPTS) for s in range(3)]
    assert len({each["answer"] for each in expected}) > PROMPTS * 2
    assert {each["is_complete"] for each in expected} == {each["tokens"] < 40 for each in expected}
    assert f"{PROMPTS * 3} answers to {PROMPTS} prompts" in done.output

    again = (*COMMON, "run.dir=again", "parallelism=fsdp2", TWO)
    answering.complete(*again)
    assert answers_in(answering, "again") == expected
    file = answering.folder / "again" / "answers.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.find(b"\n") + 20])  # a line, and a part of the next
    assert f"1 of {PROMPTS * 3} are in" in answering.complete(*again).output
    assert file.read_bytes() == whole
    answering.complete(*COMMON, "run.dir=third", "parallelism=fsdp2_tp2", "parallelism.dp_shard=1", TWO)
    assert answers_in(answering, "third") == expected


def test_a_stop_ends_a_long_generation_soon_and_runs_continue_after_it_and_a_kill(answering: Bench) -> None:
    options = (*COMMON[:-3], "generation.max_new_tokens=1500", "cluster.device=cpu", "run.dir=run", TWO)
    started = answering.start(*options)
    await_lines(answering.folder / "run" / "answers.jsonl", 8)
    began = time.monotonic()
    started.signal(signal.SIGTERM)
    done = started.wait()
    assert time.monotonic() - began < 5, done.errors
    result = json.loads((answering.folder / "run" / "result.json").read_text())
    assert result["status"] == "preempted"
    before = answers_in(answering, "run")
    assert 8 <= len(before) < PROMPTS * 3
    started = answering.start(*options)
    await_lines(answering.folder / "run" / "answers.jsonl", len(before) + 1)
    started.process.kill()
    started.wait()
    answering.assert_no_process_left()
    answering.complete(*options)
    assert answers_in(answering, "run")[: len(before)] == before
    assert len(answers_in(answering, "run")) == PROMPTS * 3


def test_wrong_use_is_rejected(answering: Bench) -> None:
    write_rows(
        answering.folder / "bad.jsonl", [{"prompt": "fine"}, {"question": "what?"}, {"prompt": 3}, {"messages": []}]
    )
    cases = {
        ("answers.prompts=absent.jsonl",): "answers.prompts=absent.jsonl: cannot be read: No such file",
        ("answers.prompts=bad.jsonl",): '4 problems|line 2: must be an object with either "prompt" or "messages"',
        ("answers.per_prompt=0",): "answers.per_prompt=0: must be at least 1",
        ("generation.temperature=0",): "answers.per_prompt=3: greedy answers to a prompt are all equal; set",
        ("generation.rows=0",): "generation.rows=0: must be at least 1",
    }
    for arguments, message in cases.items():
        done = answering.start(*COMMON, "run.dir=wrong", *arguments).wait()
        assert done.status == EXIT_INVALID, done.errors
        assert message.rpartition("|")[2] in done.errors
        assert "Traceback" not in done.errors
    answering.complete(*COMMON, "run.dir=mine", "parallelism=single", "generation.max_new_tokens=2")
    done = answering.start(*COMMON, "run.dir=mine", "parallelism=fsdp2", TWO, "generation.max_new_tokens=3").wait()
    assert done.status == EXIT_INVALID
    assert "line 1 of answers.jsonl is no answer to these prompts with these weights and settings" in done.errors
