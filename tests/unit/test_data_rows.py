"""Conversion of rows to conversations: columns, roles, and the errors for bad rows."""

from __future__ import annotations

import pytest

from components.config.schema.data import BadRows, ChatDataConfig, RowsDataConfig, SftDataConfig, TextDataConfig
from components.data.loading import build_dataset
from components.data.sources.files import read_rows
from components.data.sources.rows import BadRowReport, each_conversation
from tests.unit.test_data_examples import byte_tokenizer
from tests.unit.test_data_files import ROWS, problems, same_problems, sample_texts, sft_config, write

HALF = "cut \ud83d"
USER = {"role": "user", "content": "a"}


def bad_row_lines(cfg: RowsDataConfig) -> list[str]:
    """Return the lines of the single error that lists all bad rows."""
    (problem,) = problems(cfg)
    return problem.splitlines()


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_bad_rows_are_listed_or_dropped(tmp_path, name):
    rows = [*ROWS, {"prompt": "a", "response": None}, {"prompt": "a", "response": "  \n"}, {"prompt": None}]
    file = write(tmp_path / name, rows)
    where = (lambda number: f"{file}:{number}") if name == "x.jsonl" else (lambda number: f"{file} row {number}")
    missing = " (the key is missing)" if name == "x.jsonl" else ""
    assert bad_row_lines(sft_config(file)) == [
        "data.bad_rows=refuse: 3 rows cannot become a sample; correct these, or set data.bad_rows=drop to leave "
        "such rows out:",
        f"  {where(4)}: data.response_column=response: holds null, not text",
        f"  {where(5)}: data.response_column=response: is empty",
        f"  {where(6)}: data.prompt_column=prompt: holds null, not text",
    ]
    write(file, [*rows, {"prompt": "x"}, {"prompt": "y"}, {"prompt": "z"}])
    assert (
        bad_row_lines(sft_config(file))[4]
        == f"  {where(7)}: data.response_column=response: holds null, not text{missing}"
    )
    assert bad_row_lines(sft_config(file))[6:] == ["  ... and 1 more"]
    cfg = sft_config(file, bad_rows=BadRows.drop, eval_fraction=0)
    dataset = build_dataset(cfg, byte_tokenizer(eos="</s>"), seq_len=1000, split="train")
    assert len(dataset) == 3
    assert dataset.facts.dropped_bad_rows == 6
    assert "; 6 bad rows dropped" in str(dataset.facts)


def test_number_in_a_text_column_is_a_bad_row(tmp_path):
    file = write(tmp_path / "x.jsonl", [{"prompt": "a", "response": 72}])
    heading, row = bad_row_lines(sft_config(file))
    assert heading.startswith("data.bad_rows=refuse: 1 row cannot become a sample;")
    assert row == f"  {file}:1: data.response_column=response: holds int 72, not text"


@pytest.mark.parametrize(
    ("cfg", "values", "where"),
    [
        (SftDataConfig, {"prompt": "a", "response": HALF}, "data.response_column=response: holds"),
        (TextDataConfig, {"text": HALF}, "data.text_column=text: holds"),
        (
            ChatDataConfig,
            {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": HALF}]}]},
            "message 2 of 'messages' (role assistant): data.content_key=content: holds",
        ),
        (
            ChatDataConfig,
            {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": HALF}]},
            "message 2 of 'messages' (role assistant): holds",
        ),
        (
            ChatDataConfig,
            {"messages": [USER, {"role": "assistant", "content": "a"}], "tools": [{"name": HALF}]},
            "data.tools_column=tools: holds",
        ),
    ],
    ids=["sft", "text", "parts", "reasoning", "tools"],
)
def test_half_of_a_surrogate_pair_is_a_bad_row(tmp_path, cfg, values, where):
    """JSON can hold it as an escape, and cutting text at a fixed length leaves it."""
    file = write(tmp_path / "x.jsonl", [values])
    problem = f"{where} \\ud83d, one half of a surrogate pair, which is no character; correct the text"
    assert bad_row_lines(cfg(path=str(file), cache=None))[1] == f"  {file}:1: {problem}"


def test_bad_row_in_a_later_file_is_reported_with_its_file(tmp_path):
    write(tmp_path / "train-0.jsonl", ROWS)
    write(tmp_path / "train-1.jsonl", [{"question": "a"}])
    assert bad_row_lines(sft_config(tmp_path))[1] == (
        f"  {tmp_path}/train-1.jsonl:1: data.prompt_column=prompt: holds null, not text (the key is missing)"
    )


# The input column of Alpaca, system prompts, and conversations


def test_input_column_and_system_prompt_are_part_of_the_prompt(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
        {"instruction": "Say ho.", "input": " \n", "output": "ho"},
        {"instruction": "Say hu.", "output": "hu"},
    ]
    file = write(tmp_path / "x.jsonl", rows)
    columns = {"prompt_column": "instruction", "input_column": "input", "response_column": "output"}
    cfg = sft_config(file, **columns, system_prompt="Be brief.", eval_fraction=0)
    assert sample_texts(cfg) == [
        "Be brief.\nAdd.\n\n1, 2\n3</s>",
        "Be brief.\nSay hi.\nhi</s>",
        "Be brief.\nSay ho.\nho</s>",
        "Be brief.\nSay hu.\nhu</s>",
    ]
    assert same_problems(sft_config(file, **{**columns, "input_column": "inputs"}))[0].endswith("did you mean 'input'?")


def test_openai_and_sharegpt_conversations_give_the_same_text(tmp_path):
    openai = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sharegpt = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
        {"from": "human", "value": "c"},
    ]
    write(tmp_path / "openai.jsonl", [{"messages": openai}])
    write(tmp_path / "sharegpt.parquet", [{"conversations": sharegpt}])
    first = ChatDataConfig(path=str(tmp_path / "openai.jsonl"), eval_fraction=0)
    second = ChatDataConfig(
        path=str(tmp_path / "sharegpt.parquet"),
        eval_fraction=0,
        messages_column="conversations",
        role_key="from",
        content_key="value",
        user_role="human",
        assistant_role="gpt",
    )
    assert sample_texts(first) == sample_texts(second) == ["a\nb</s>"]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "data.messages_column=messages: holds null, not a list of messages"),
        ("text", "data.messages_column=messages: holds str 'text', not a list of messages"),
        (["text"], "message 1 of 'messages' is str 'text', not an object"),
        (
            [{"role": "human", "content": "a"}],
            "message 1 of 'messages' has the role 'human' (data.role_key=role), which is not one of system, user, "
            "assistant, tool, developer, function, ipython; set data.user_role, data.assistant_role, data.system_role "
            "or data.tool_role",
        ),
        (
            [{"role": "user", "content": None}],
            "message 1 of 'messages' (role user): data.content_key=content: holds null, not text",
        ),
        (
            [{"role": "user", "content": ""}],
            "message 1 of 'messages' (role user): data.content_key=content: is empty",
        ),
        (
            [{"role": "user", "content": "a"}],
            "'messages' needs a message with the role 'assistant' after another message",
        ),
        ([], "'messages' needs a message with the role 'assistant' after another message"),
        (
            [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}],
            "'messages' needs a message with the role 'assistant' after another message",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [None]}],
            "message 2 of 'messages' has tool_calls that are list [None], not a list of objects",
        ),
    ],
)
def test_invalid_conversations_are_bad_rows(tmp_path, messages, problem):
    file = write(tmp_path / "x.jsonl", [{"messages": messages}])
    assert bad_row_lines(ChatDataConfig(path=str(file)))[1] == f"  {file}:1: {problem}"
    cfg = ChatDataConfig(path=str(file), bad_rows=BadRows.drop)
    bad = BadRowReport()
    assert list(each_conversation(cfg, read_rows(file), bad)) == []
    assert bad.count == 1
