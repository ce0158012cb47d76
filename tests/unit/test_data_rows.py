"""Conversion of rows to conversations: columns, roles, and the errors for bad rows."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from components import chat_template
from components.config.schema.data import (
    BadRows,
    ChatDataConfig,
    LabelsDataConfig,
    PreferencesDataConfig,
    RowsDataConfig,
    SftDataConfig,
    TextDataConfig,
)
from components.data import cache
from components.data.labels import build_scored
from components.data.loading import build_dataset
from components.data.pairs import build_pairs
from components.data.preflight import check_files
from components.data.sources.files import read_rows
from components.data.sources.rows import BadRowReport, each_conversation
from components.protocol.errors import ConfigError
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
        (ChatDataConfig, {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": HALF}]}]},
         "message 2 of 'messages' (role assistant): data.content_key=content: holds"),
        (ChatDataConfig, {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": HALF}]},
         "message 2 of 'messages' (role assistant): holds"),
        (ChatDataConfig, {"messages": [USER, {"role": "assistant", "content": "a"}], "tools": [{"name": HALF}]},
         "data.tools_column=tools: holds"),
    ],
    ids=["sft", "text", "parts", "reasoning", "tools"],
)  # fmt: skip
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
        {"instruction": "Say hu.", "output": "hu", "system": "Be loud."},
    ]
    file = write(tmp_path / "x.jsonl", rows)
    columns = {"prompt_column": "instruction", "input_column": "input", "response_column": "output"}
    cfg = sft_config(file, **columns, system_prompt="Be brief.", eval_fraction=0)
    assert sample_texts(cfg) == [
        "Be brief.\nAdd.\n\n1, 2\n3</s>",
        "Be brief.\nSay hi.\nhi</s>",
        "Be brief.\nSay ho.\nho</s>",
        "Be loud.\nSay hu.\nhu</s>",
    ]
    problem = same_problems(sft_config(file, **{**columns, "input_column": "inputs"}))[0]
    assert problem.endswith(f"; write data=alpaca data.path={file}")


def test_openai_and_sharegpt_conversations_give_the_same_text(tmp_path):
    openai = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
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
            "assistant, tool, developer, function, ipython, observation; set data.user_role, data.assistant_role, "
            "data.system_role or data.tool_role",
        ),
        ([{"role": "user", "content": None}],
         "message 1 of 'messages' (role user): data.content_key=content: holds null, not text"),
        ([{"role": "user", "content": ""}], "message 1 of 'messages' (role user): data.content_key=content: is empty"),
        ([{"role": "user", "content": "a"}],
         "'messages' needs a message with the role 'assistant' after another message"),
        ([], "'messages' needs a message with the role 'assistant' after another message"),
        ([{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}],
         "'messages' needs a message with the role 'assistant' after another message"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [None]}],
         "message 2 of 'messages' has tool_calls that are list [None], not a list of objects"),
    ],
)  # fmt: skip
def test_invalid_conversations_are_bad_rows(tmp_path, messages, problem):
    file = write(tmp_path / "x.jsonl", [{"messages": messages}])
    assert bad_row_lines(ChatDataConfig(path=str(file)))[1] == f"  {file}:1: {problem}"
    cfg = ChatDataConfig(path=str(file), bad_rows=BadRows.drop)
    bad = BadRowReport()
    assert list(each_conversation(cfg, read_rows(file), bad)) == []
    assert bad.count == 1


# Rows that only the chat template rejects are bad rows like all others

STRICT = (
    "{% for m in messages %}{% if 'BAD' in m.content %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def as_labeled(question, answer):
    return {"text": conversation(question, answer), "label": int(answer) if answer.isdecimal() else 0}


FORMS = {
    "sft": (SftDataConfig, lambda question, answer: {"prompt": question, "response": answer}, {}),
    "chat": (ChatDataConfig, lambda question, answer: {"messages": conversation(question, answer)}, {}),
    "chosen": (PreferencesDataConfig, lambda q, answer: {"prompt": q, "chosen": answer, "rejected": f"not {q}"}, {}),
    "rejected": (PreferencesDataConfig, lambda q, answer: {"prompt": q, "chosen": f"not {q}", "rejected": answer}, {}),
    "kto": (
        PreferencesDataConfig,
        lambda question, answer: {"prompt": question, "completion": answer, "label": answer in "02468"},
        {"label_column": "label"},
    ),
    "reward": (PreferencesDataConfig, lambda q, answer: {"prompt": q, "chosen": answer, "rejected": f"not {q}"}, {}),
    "labels": (LabelsDataConfig, as_labeled, {"num_labels": 10}),
}


def built(form, file, seq_len=200, **keys):
    kind, _, more = FORMS[form]
    cfg = kind(path=str(file), **{"eval_fraction": 0.0, "cache": None} | more | keys)
    build = {"labels": build_scored, "reward": build_scored}.get(form, build_dataset)
    build = build_pairs if form in ("chosen", "rejected", "kto") else build
    tokenizer = byte_tokenizer(STRICT)
    tokenizer.pad_token = "</s>"
    return build(cfg, tokenizer, seq_len=seq_len, split="train")


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_row_that_the_template_rejects_is_a_bad_row(tmp_path, form, name):
    """The rows that remain keep their labels and partners; all bad rows of both splits are listed in order."""
    row = FORMS[form][1]
    rows = [row(f"q{number}", f"BAD{number}" if number in (0, 3, 4, 7, 8, 9) else str(number)) for number in range(10)]
    rows[4] = dict.fromkeys(rows[4])
    file = write(tmp_path / name, rows)
    where = (lambda number: f"{file}:{number}") if name == "x.jsonl" else (lambda number: f"{file} row {number}")
    for fraction in (0.0, 0.3):
        with pytest.raises(ConfigError) as caught:
            built(form, file, eval_fraction=fraction)
        heading, *listed, more = caught.value.problems[0].splitlines()
        assert heading.startswith(
            "data.bad_rows=refuse: 6 rows cannot become a sample; correct these, or set data.bad_"
        )
        assert [line.strip().partition(": ")[0] for line in listed] == [where(number) for number in (1, 4, 5, 8, 9)]
        assert "the chat template rejects this conversation: no assistant" in listed[0]
        assert more == "  ... and 1 more"
    dropped = built(form, file, bad_rows=BadRows.drop)
    facts = dropped.facts
    assert (len(dropped), facts.dropped_bad_rows, facts.dropped_without_target) == (4, 6, 0)
    assert "6 bad rows dropped" in str(facts)
    for index, number in enumerate((1, 2, 5, 6)):
        shown = dropped.show(index)
        assert shown.count(f"user q{number}<") >= 1
        assert f"assistant {number}" in shown.replace("[[", "")
        if form == "labels":
            assert dropped[index].labels[-1] == number
        if form == "kto":
            assert shown.startswith("desirable" if number in (2, 6) else "undesirable")


def test_bad_chosen_and_bad_rejected_answers_are_counted_together(tmp_path):
    answers = [("BAD", "b"), ("a", "BAD"), ("BAD", "BAD"), ("a", "b")]
    rows = [{"prompt": f"q{n}", "chosen": a, "rejected": b} for n, (a, b) in enumerate(answers)]
    file = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(ConfigError, match="data.bad_rows=refuse: 3 rows cannot") as caught:
        built("chosen", file)
    assert [line.split(": ")[0][-2:] for line in str(caught.value).splitlines()[1:]] == [":1", ":2", ":3"]
    pairs = built("chosen", file, bad_rows=BadRows.drop)
    assert (len(pairs), pairs.facts.dropped_bad_rows) == (1, 3)
    assert pairs.facts.tokens == sum(len(each.input_ids) for each in pairs.rows_of(0))
    assert pairs.facts.target_tokens == sum(label >= 0 for each in pairs.rows_of(0) for label in each.labels)


@pytest.mark.parametrize("form", ["chat", "chosen", "labels"])
def test_source_whose_rows_are_all_bad_is_refused_with_their_problems(tmp_path, form):
    file = write(tmp_path / "x.jsonl", [FORMS[form][1](f"q{number}", "BAD") for number in range(7)])
    with pytest.raises(ConfigError, match="7 rows cannot become a sample; correct these, there are no other") as caught:
        built(form, file)
    assert "bad_rows=drop" not in str(caught.value)
    with pytest.raises(ConfigError, match="has no rows left, all 7 are bad; correct these") as caught:
        built(form, file, bad_rows=BadRows.drop)
    assert "x.jsonl:1: " in str(caught.value)
    assert "... and 2 more" in str(caught.value)


def test_lines_that_cannot_be_read_are_bad_rows(tmp_path):
    """The rows between them are those that the json module reads."""
    good = '{"prompt": "a", "response": "b"}'
    lines = [good, "{not json", "[1]", good, '"text"', "1" * 5000, "[" * 100_000, good]
    file = tmp_path / "x.jsonl"
    file.write_bytes("\n".join(lines).encode() + b'\n{"prompt": "\xff", "response": "b"}\n')
    heading, *listed = bad_row_lines(sft_config(file))
    assert heading.startswith("data.bad_rows=refuse: 6 rows cannot become a sample; correct these")
    for line, problem in zip(
        listed,
        [
            "2: not valid JSON (Expecting property name enclosed in double quotes, column 2); every line must",
            "3: is a list; must be an object with the columns as keys",
            "5: is a str; must be an object",
            "6: JSON that cannot be read (Exceeds the limit",
            "7: JSON that cannot be read (maximum recursion depth",
            "... and 1 more",
        ],
        strict=True,
    ):
        assert line.strip().removeprefix(f"{file}:").startswith(problem)
    dataset = build_dataset(
        sft_config(file, bad_rows=BadRows.drop, eval_fraction=0), byte_tokenizer(eos="</s>"), seq_len=99, split="train"
    )
    assert (len(dataset), dataset.facts.dropped_bad_rows) == (3, 6)


def test_csv_records_with_another_number_of_fields_are_bad_rows(tmp_path):
    """A record that ends inside of quotes may hold any number of rows, so it is refused in any case."""
    file = tmp_path / "x.csv"
    text = b'prompt,response,id\na,"b\nb",1\nc,d\ne,f,g,h\n"i"x,j,2\nk,\xff,3\nl,m,4\n'
    file.write_bytes(text)
    heading, *listed = bad_row_lines(sft_config(file))
    assert heading.startswith("data.bad_rows=refuse: 4 rows cannot become a sample; correct these")
    assert [line.strip().removeprefix(f"{file}:").partition(" (")[0] for line in listed] == [
        "4: fewer fields than the 3 of the header; put a field that contains the separator or a line break in double "
        "quotes",
        "5: more fields than the 3 of the header; put a field that contains the separator or a line break in double "
        "quotes",
        "6: not valid CSV",
        "7: is not UTF-8 text; convert the file to UTF-8",
    ]
    drop = sft_config(file, bad_rows=BadRows.drop, eval_fraction=0)
    assert sample_texts(drop) == ["a\nb\nb</s>", "l\nm</s>"]
    file.write_bytes(text + b'n,"o\np,q,5\n')
    assert problems(drop) == [f"{file}:10: not valid CSV (unexpected end of data)"]


def test_bad_rows_are_counted_once_if_the_cache_cannot_be_written(tmp_path, monkeypatch):
    file = write(tmp_path / "x.jsonl", [FORMS["sft"][1](f"q{n}", "BAD" if n % 2 else "a") for n in range(6)])

    def full_disk(entry, batches, *settings):
        list(batches)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_WORTH_BYTES", 0)
    written = [built("sft", file, bad_rows=BadRows.drop, cache=str(tmp_path / "cache")) for _ in range(2)]
    monkeypatch.setattr(cache, "write_shard", full_disk)
    failed = built("sft", file, bad_rows=BadRows.drop, cache=str(tmp_path / "other"))
    assert [(len(each), each.facts.dropped_bad_rows) for each in [*written, failed]] == [(3, 3)] * 3
    assert [each.sources.tolist() for each in [*written, failed]] == [[0, 2, 4]] * 3


def test_time_limit_of_a_template_ends_the_run_at_the_first_row(tmp_path, monkeypatch):
    """It may be exceeded on every row, each of which would take seconds."""
    monkeypatch.setattr(chat_template, "_RENDER_SECONDS", 0.1)
    file = write(tmp_path / "x.jsonl", ROWS * 30)
    tokenizer = byte_tokenizer("{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    cfg, began = sft_config(file, bad_rows=BadRows.drop, cache=None, eval_fraction=0.0), time.process_time()
    with pytest.raises(ConfigError, match=r"x.jsonl:1: the chat template did not finish within 0.1 s of CPU time"):
        build_dataset(cfg, tokenizer, seq_len=99, split="train")
    assert time.process_time() - began < 2


def test_template_that_rejects_all_rows_is_reported_before_the_last_one(tmp_path):
    rows = [FORMS["sft"][1](f"q{number}", "BAD") for number in range(1500)]
    with pytest.raises(ConfigError, match="none of the first 1,000 rows can become a sample") as caught:
        built("sft", write(tmp_path / "x.jsonl", rows))
    assert str(caught.value).endswith("... and 995 more")
    rows[1400]["response"] = "good"
    assert len(built("sft", write(tmp_path / "x.jsonl", rows), bad_rows=BadRows.drop)) == 1


@pytest.mark.parametrize(
    ("name", "lines", "problem"),
    [
        (
            "x.jsonl",
            ['{"prompt": "a", "response": "b"}', '{"prompt": "c" "response": "d"}'],
            "x.jsonl:2: not valid JSON",
        ),
        ("x.csv", ["prompt,response", "a,b", "c,d,e"], "x.csv:3: more fields than the 2 of the header"),
    ],
)
def test_first_rows_that_cannot_be_read_are_reported_before_the_launch(name, lines, problem, tmp_path):
    file = tmp_path / name
    file.write_text("\n".join(lines) + "\n")
    cfg = SftDataConfig(path=str(file), eval_fraction=0)
    (message,) = check_files(cfg)
    assert message.startswith(f"data.bad_rows=refuse: 1 of the first 2 rows of {file} cannot be read; ")
    assert problem in message
    assert check_files(replace(cfg, bad_rows=BadRows.drop)) == []
