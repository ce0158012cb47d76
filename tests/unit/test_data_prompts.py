"""Prompts whose answers are sampled: rows, their columns and rooms, and the steps of a number of epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components import data
from components.chat_template import encode_prompt
from components.config.schema.data import BadRows, Overlong
from components.config.schema.rollouts import PromptsDataConfig, RolloutsConfig
from components.data.batches import BatchPlan
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError


def build(folder: Path, rows: list[dict[str, Any]], *, split: Any = "train", **keys: Any) -> data.Prompts:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cfg = PromptsDataConfig(**{"path": str(folder / "rows.jsonl"), "eval_fraction": 0.0, "cache": None, **keys})
    rollouts = RolloutsConfig(group=8, max_new_tokens=16)
    return data.build_prompts(cfg, byte_tokenizer(), rollouts, seq_len=128, split=split)


def test_rewards_receive_the_other_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1", "solution": 2, "level": [1]}, {"prompt": "a" * 112, "solution": 1, "level": []}]
    prompts = build(tmp_path, rows, answer_column="solution")
    assert len(prompts) == prompts.facts.samples == 1
    assert prompts[0].columns == {"solution": 2, "level": [1], "answer": 2}
    assert prompts[0].prompt.tokens == encode_prompt(byte_tokenizer(), "1 + 1", None)
    assert prompts.show(0) == "1 + 1 [[2]]"
    with pytest.raises(ConfigError, match=r"data.overlong=refuse: 1 prompts .* have more than 112 tokens"):
        build(tmp_path, rows, overlong=Overlong.refuse)


def test_row_without_the_answer_column_is_a_bad_row(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "solution": "1"}, {"prompt": "2"}, {"prompt": "3", "solution": None}]
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: data.answer_column=solution: the key is missing"):
        build(tmp_path, rows, answer_column="solution")
    prompts = build(tmp_path, rows, answer_column="solution", bad_rows=BadRows.drop)
    assert [row.columns["answer"] for row in prompts] == ["1", None]


def test_split_without_prompts_states_why(tmp_path: Path) -> None:
    good, long, bad = {"prompt": "1"}, {"prompt": "1" * 200}, {"prompt": None}
    drop: dict[str, Any] = {"bad_rows": BadRows.drop}
    for rows, keys, problem in (
        ([good], {"eval_fraction": 0.1, "split": "eval"}, r"eval_fraction=0.1 requires at least two different ones"),
        ([good, good], {"split": "eval"}, r"^data.eval_fraction=0: there are no held-out prompts; set it"),
        ([long, bad], drop, r"^training.seq_len=128: no prompt of .* leaves room for rollouts.max_new_tokens=16"),
        ([bad, bad], drop, r"^data.bad_rows=drop: .*rows.jsonl .* has no rows left, all 2 are bad; correct these"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build(tmp_path, rows, **keys)


@pytest.mark.parametrize(("batches", "passes"), [(1, 1), (4, 1), (1, 2), (2, 3)])
def test_epochs_have_the_same_steps_after_a_resume_at_any_step(tmp_path: Path, batches: int, passes: int) -> None:
    prompts = build(tmp_path, [{"prompt": str(number)} for number in range(64)])
    rollouts = RolloutsConfig(group=8, batches=batches, passes=passes)
    plan = BatchPlan(global_batch_size=64, micro_batch_size=8)
    whole = data.PromptBatches(prompts, plan, rollouts, seed=0)
    steps = whole.steps_for(2)
    assert steps == 2 * 64 * 8 * passes // 64
    for step in range(steps):
        if step % rollouts.updates == 0:
            whole.drawn += 8 * batches
        whole.advance()
        resumed = data.PromptBatches(prompts, plan, rollouts, seed=0)
        resumed.load_state_dict(whole.state_dict())
        assert resumed.steps_for(2) == steps, step
