"""Prompts whose answers are sampled: rows, their columns and rooms, and the steps of a number of epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl

from components import data
from components.chat_template import encode_prompt
from components.config.schema.data import BadRows, Overlong, UnusedKeys
from components.config.schema.rollouts import PromptsDataConfig, RolloutsConfig
from components.conversation import read_prompts
from components.data.batches import BatchPlan
from components.data.preflight import check_files
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError
from components.training import encoded_prompts


def build(folder: Path, rows: list[dict[str, Any]], *, split: Any = "train", **keys: Any) -> data.Prompts:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokenizer, seq_len = keys.pop("tokenizer", byte_tokenizer()), keys.pop("seq_len", 128)
    cfg = PromptsDataConfig(**{"path": str(folder / "rows.jsonl"), "eval_fraction": 0.0, "cache": None, **keys})
    rollouts = RolloutsConfig(group=8, max_new_tokens=16)
    return data.build_prompts(cfg, tokenizer, rollouts, seq_len=seq_len, split=split)


def test_rewards_receive_the_other_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1", "solution": 2, "level": [1]}, {"prompt": "a" * 112, "solution": 1, "level": []}]
    prompts = build(tmp_path, rows, answer_column="solution")
    assert len(prompts) == prompts.facts.samples == 1
    assert prompts[0].columns == {"solution": 2, "level": [1], "answer": 2}
    assert prompts[0].prompt.tokens == encode_prompt(byte_tokenizer(), "1 + 1", None)
    assert prompts.show(0) == "1 + 1 [[2]]"
    with pytest.raises(ConfigError, match=r"data.overlong=refuse: 1 prompts .* have more than 112 tokens"):
        build(tmp_path, rows, overlong=Overlong.refuse)


USER = {"role": "user", "content": "who?"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
INPUTS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"tools": TOOLS}, None),
    ({"tools": json.dumps(TOOLS)}, "be brief"),
    ({"functions": [TOOLS[0]["function"]]}, None),
    ({"system": "be kind"}, "be brief"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, None),
    ({"tools": TOOLS, "system": "be kind", "chat_template_kwargs": {"enable_thinking": False}}, None),
    ({"tools": [], "system": " ", "chat_template_kwargs": None}, None),
]
"""Columns of a row beside the prompt, and data.system_prompt."""


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(("inputs", "system"), INPUTS)
def test_prompts_are_rendered_as_plain_transformers_renders_them(
    inputs: dict[str, Any], system: str | None, as_text: bool, tmp_path: Path
) -> None:
    """With the tools, the system message and the variables of their row, in recipes/grpo.py and scripts/answer.py."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    row = {"prompt": "who?" if as_text else [USER], **inputs}
    (made,) = build(tmp_path, [row], tokenizer=tokenizer, seq_len=2000, system_prompt=system)
    first = inputs.get("system", "").strip() or system
    expected = tokenizer.apply_chat_template(
        [*([{"role": "system", "content": first}] if first else []), USER],
        tools=TOOLS if inputs.get("tools") or "functions" in inputs else None,
        add_generation_prompt=True,
        **(inputs.get("chat_template_kwargs") or {}),
    )
    assert made.prompt.tokens == expected["input_ids"]
    assert made.prompt.text == "who?"
    assert made.columns == inputs  # rewards receive them, too

    asked = {"prompt": "who?"} if as_text else {"messages": [USER]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({**asked, **inputs, "id": 7}))
    read, unused = read_prompts(tmp_path / "prompts.jsonl")
    (answered,) = encoded_prompts(tokenizer, read, PromptsDataConfig(path="x", system_prompt=system))
    assert (answered.tokens, unused) == (expected["input_ids"], ["id"])


def test_a_column_of_another_meaning_is_left_to_the_rewards(tmp_path: Path) -> None:
    """Some data have names of tools, or an own observation of the environment."""
    rows = [{"prompt": [USER, {"role": "observation", "content": "x"}], "tools": "calculator", "functions": ["abs"]}]
    with pytest.raises(ConfigError, match="data.tools_column=tools: holds text that is not JSON"):
        build(tmp_path, rows)
    (made,) = build(tmp_path, rows, tools_column=None)
    assert made.columns == {"tools": "calculator", "functions": ["abs"]}


def test_message_keys_that_the_template_does_not_render_are_named(tmp_path: Path) -> None:
    """Columns are never refused: reward functions may take them."""
    rows = [{"prompt": [{**USER, "mood": "bad"}], "answer": "7"}]
    assert "not used: mood (role user)" in str(build(tmp_path, rows).facts)
    with pytest.raises(ConfigError, match=r"data.unused_keys=refuse: .* mood \(role user\); remove them"):
        build(tmp_path, rows, unused_keys=UnusedKeys.refuse)
    plain = [{"prompt": [USER], "answer": "7"}]
    assert build(tmp_path, plain, unused_keys=UnusedKeys.refuse).facts.unused == []
    cfg = PromptsDataConfig(path=str(tmp_path / "rows.jsonl"), unused_keys=UnusedKeys.refuse)
    assert check_files(cfg) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"messages": [{"role": "human", "content": "a"}]}, "has the role 'human', which is not one of .*; correct it"),
        ({"messages": [{"role": 7, "content": "a"}]}, "has the role 7, which is not one of"),
        ({"messages": [{"role": "user", "value": "a"}]}, '"content" holds null'),
        ({"messages": [{"role": "user", "content": 5}]}, "holds int 5, not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text is supported"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": 5}, USER]}, "tool_calls that are int 5"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": ["f"]}, USER]}, "not a list of objects"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]},
                       USER]}, "arguments that are not JSON text"),
        ({"messages": [USER], "tools": 7}, '"tools" holds int 7, not a list'),
        ({"messages": [USER], "chat_template_kwargs": {"tools": []}}, "tools is an argument of apply_chat_template"),
        ({"messages": [{"role": "system", "content": "a"}, USER], "system": "b"}, "are different system messages"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "must end with a message to answer"),
        ({"messages": []}, "must end with a message to answer, but it is empty"),
        ({"messages": "who?"}, '"messages" is .who.*; it must be a list'),
        ({"prompt": ""}, "is empty"),
        ({"prompt": "a", "functions": ["abs"]}, r"holds list \['abs'\]; must be a list of objects"),
        ({"prompt": "a", "tools": "none"}, '"tools" holds text that is not JSON'),
    ],
)  # fmt: skip
def test_line_of_a_file_of_prompts_that_is_no_prompt_is_rejected(line: Any, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(line))
    with pytest.raises(ConfigError, match=rf"answers\.prompts=.*: line 2: .*{problem}"):
        read_prompts(file)


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
