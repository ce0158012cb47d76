"""Preference data: pairs and labeled answers in every form, and the columns of the usual datasets of the hub."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import trl

from components.config.schema.data import BadRows, Overlong, PreferencesDataConfig, UnusedKeys
from components.data import EvalBatches, build_pairs
from components.data.batches import BatchPlan
from components.data.labels import build_scored
from components.data.pairs import DESIRABLE, PairedRows, pack_pairs
from components.data.preflight import check_files
from components.protocol.errors import ConfigError
from tests.unit.test_data_examples import byte_tokenizer
from tests.unit.test_data_files import write

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template without {% generation %} blocks."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl", **keys: Any) -> PairedRows:
    """Return the pairs of all rows."""
    seq_len = keys.pop("seq_len", 1000)
    file = write(folder / name, rows)
    template = keys.pop("template", CHATML)
    cfg = PreferencesDataConfig(path=str(file), eval_fraction=0.0, cache=None, **keys)
    return build_pairs(cfg, byte_tokenizer(template), seq_len=seq_len, split="train")


def texts(pairs: PairedRows) -> list[list[str]]:
    """Return the text of both rows of each pair, with the answers in [[ ]]."""
    return [[marked(row.input_ids, row.labels) for row in pair[:2]] for pair in pairs]


def marked(ids: list[int], labels: list[int]) -> str:
    groups = itertools.groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] >= 0)
    parts = [(has_loss, byte_tokenizer().decode([token for token, _ in group])) for has_loss, group in groups]
    return "".join(f"[[{part}]]" if has_loss else part for has_loss, part in parts)


PROMPT = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
EXPECTED = [[f"{PROMPT}[[yes<|im_end|>]]", f"{PROMPT}[[no<|im_end|>]]"]]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": "why?", "chosen": "yes", "rejected": "no"}, {}),
        ({"prompt": [user("why?")], "chosen": [assistant("yes")], "rejected": [assistant("no")]}, {}),
        ({"prompt": [user("why?")], "chosen": "yes", "rejected": [assistant("no")]}, {}),
        ({"prompt": "ignored", "chosen": [user("why?"), assistant("yes")], "rejected": [user("why?"), assistant("no")]},
         {}),
        ({"chosen": [user("why?"), assistant("yes")], "rejected": [user("why?"), assistant("no")]},
         {"prompt_column": None}),
    ],
    ids=["texts", "messages", "mixed", "conversations and a prompt", "conversations"],
)  # fmt: skip
def test_every_form_of_a_pair_becomes_the_same_tokens(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, Any]
) -> None:
    assert texts(read(tmp_path, [row], **keys)) == EXPECTED


def test_template_receives_the_tools_and_the_variables_of_a_row(tmp_path: Path) -> None:
    """As TRL's DPO does; the reference is plain transformers."""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    pair = {"prompt": "why?", "chosen": "yes", "rejected": "no"}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    for inputs in ({"tools": tools}, kwargs, {"tools": json.dumps(tools), **kwargs}):
        ((chosen, rejected, *_),) = read(tmp_path, [{**pair, **inputs}], template=template)
        options = inputs.get("chat_template_kwargs", {})
        for row, answer in ((chosen, "yes"), (rejected, "no")):
            text = byte_tokenizer(template).apply_chat_template(
                [user("why?"), assistant(answer)], tools=tools if "tools" in inputs else None, tokenize=False, **options
            )
            assert byte_tokenizer().decode(row.input_ids) == text.rstrip("\n")
            assert marked(row.input_ids, row.labels).count("[[") == 1


def test_system_column_beside_the_chosen_one_is_named_as_unused(tmp_path: Path) -> None:
    row = {"prompt": "why?", "chosen": "yes", "rejected": "no", "system": "a", "persona": "b"}
    pairs = read(tmp_path, [row], system_column="persona", unused_keys=UnusedKeys.report)
    assert pairs.facts.unused == ["column system"]
    with pytest.raises(ConfigError, match="data.tools_column=prompt: is also data.prompt_column; the two must differ"):
        read(tmp_path, [row], tools_column="prompt", prompt_column="prompt")


def test_only_turns_after_the_shared_messages_have_a_loss(tmp_path: Path) -> None:
    """The first answer is part of the prompt; both conversations then differ in all later turns."""
    shared = [user("a"), assistant("b"), user("c")]
    row = {"chosen": [*shared, assistant("d"), user("e"), assistant("f")], "rejected": [*shared, assistant("g")]}
    ((chosen, rejected),) = texts(read(tmp_path, [row], prompt_column=None, system_prompt="s"))
    assert chosen.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb")
    assert [part.partition("]]")[0] for part in chosen.split("[[")[1:]] == ["d<|im_end|>", "f<|im_end|>"]
    assert [part.partition("]]")[0] for part in rejected.split("[[")[1:]] == ["g<|im_end|>"]


def test_answers_whose_turns_are_rendered_differently_later_are_rejected(tmp_path: Path) -> None:
    """Each would become a sample per turn. Equal totals must not hide it: here both sides have three samples."""
    template = CHATML.replace("{{ m.content }}", "{{ '<t>' if m.role == 'assistant' and loop.last }}{{ m.content }}")
    short, long = [assistant("yes")], [assistant("wait"), {"role": "tool", "content": "4"}, assistant("no")]
    rows = [
        {"prompt": [user("one")], "chosen": short, "rejected": long},
        {"prompt": [user("two")], "chosen": long, "rejected": short},
    ]
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: .* no single sample contains the answer; use answers of one"):
        read(tmp_path, rows, template=template)
    labeled = [{"prompt": [user("one")], "completion": long, "label": True}, LABELED[1]]
    with pytest.raises(ConfigError, match="no single sample contains the answer"):
        read(tmp_path, labeled, template=template, label_column="label")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "data.chosen_column=chosen: is equal to 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "data.rejected_column=rejected: holds null, not text"),
        ({"prompt": None, "chosen": "b", "rejected": "c"}, "data.prompt_column=prompt: holds null, not text"),
        ({"prompt": "x", "chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]},
         "'chosen' needs an answer of the assistant to a prompt"),
        ({"prompt": "x", "chosen": [user("a"), assistant("b"), user("d")], "rejected": [user("a"), assistant("c")]},
         "'chosen' needs an answer of the assistant"),
        ({"prompt": "x", "chosen": [{"role": "bot", "content": "a"}], "rejected": "c"},
         "message 1 of 'chosen' has the role 'bot'"),
        ({"prompt": "x", "chosen": ["a"], "rejected": "c"}, "message 1 of 'chosen' is str 'a', not an object"),
    ],
)  # fmt: skip
def test_row_that_is_no_pair_is_rejected_with_its_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, [good, row])
    heading, line = str(caught.value.problems[0]).splitlines()
    assert heading.startswith("data.bad_rows=refuse: 1 row cannot become a sample")
    assert line.strip().startswith(f"{tmp_path}/rows.jsonl:2: {message}")


LABELED = [
    {"prompt": "one", "completion": "A", "label": True},
    {"prompt": "two", "completion": "B", "label": False},
    {"prompt": [user("three")], "completion": [assistant("C")], "label": 1},
]


def test_labeled_answer_is_paired_with_the_answer_of_the_next_sample(tmp_path: Path) -> None:
    pairs = read(tmp_path, LABELED, label_column="label")
    answers = [
        tuple(text.rpartition("user\n")[2].replace("<|im_end|>\n<|im_start|>assistant\n", " ") for text in rows)
        for rows in texts(pairs)
    ]
    end = "<|im_end|>]]"
    assert answers == [
        (f"one [[A{end}", f"one [[B{end}"),
        (f"two [[B{end}", f"two [[C{end}"),
        (f"three [[C{end}", f"three [[A{end}"),
    ]
    plan = BatchPlan(global_batch_size=2, micro_batch_size=2, dp_rank=0, dp_size=1)
    labels = [batch.rows[DESIRABLE].tolist() for batch in EvalBatches(pairs, plan)]
    assert labels == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert "(train), 67% of the answers desirable: 3 answers, " in str(pairs.facts)
    assert pairs.facts.batch_unit == "answers"
    assert pairs.show(1).startswith("undesirable: ")


def test_answers_are_paired_with_those_of_other_prompts(tmp_path: Path) -> None:
    """Rows unpaired from preference pairs have both answers to a prompt next to each other."""
    rows = [
        {"prompt": prompt, "completion": answer, "label": True} for prompt, answer in ("1a", "1b", "2c", "2d", "1e")
    ]
    pairs = read(tmp_path, rows, label_column="label")
    seconds = [rows_of[1].rpartition("[[")[2][0] for rows_of in texts(pairs)]
    assert seconds == ["c", "c", "e", "e", "c"]
    with pytest.raises(ConfigError, match="has a single prompt; objective=kto compares"):
        read(tmp_path, rows[:2], label_column="label")


def test_labels_change_the_fingerprint_and_follow_dropped_rows(tmp_path: Path) -> None:
    pairs = read(tmp_path, LABELED, label_column="label")
    changed = read(tmp_path, [LABELED[0], {**LABELED[1], "label": True}, LABELED[2]], label_column="label")
    assert pairs.fingerprint != changed.fingerprint
    long = {"prompt": "x", "completion": "y" * 200, "label": True}
    rows = [LABELED[1], long, LABELED[0], LABELED[1]]
    kept = read(tmp_path, rows, label_column="label", overlong=Overlong.drop, seq_len=60)
    assert kept.values[DESIRABLE][:, 0].tolist() == [0, 1, 0]


def test_length_that_mismatched_answers_are_cut_to_changes_the_fingerprint(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 30, "completion": "A", "label": True}, {"prompt": "y", "completion": "B" * 30, "label": 0}]
    whole, cut = (read(tmp_path, rows, label_column="label", seq_len=length) for length in (1000, 60))
    assert [pair.first for pair in cut] == [pair.first for pair in whole]
    assert [pair.second for pair in cut] != [pair.second for pair in whole]
    assert cut.fingerprint != whole.fingerprint


def test_labels_of_a_csv_file_are_read_from_text(tmp_path: Path) -> None:
    rows = [{"prompt": label, "completion": "b", "label": label} for label in ("True", "false", "0", "1")]
    assert read(tmp_path, rows, "rows.csv", label_column="label").values[DESIRABLE][:, 0].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("label", [None, "good", 2, 0.5])
def test_label_other_than_true_or_false_is_rejected(tmp_path: Path, label: object) -> None:
    with pytest.raises(ConfigError, match="data.label_column=label: holds .*; must be true, false, 1 or 0"):
        read(tmp_path, [LABELED[0], {**LABELED[1], "label": label}], label_column="label")


def test_single_labeled_answer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a single prompt; objective=kto compares"):
        read(tmp_path, LABELED[:1], label_column="label")


def test_flagged_messages_of_an_answer_have_no_loss(tmp_path: Path) -> None:
    """Flags on the prompt change nothing, as it has no loss in any case."""
    answers = [
        [{**assistant("a"), "weight": 0}, user("b"), assistant("c")],
        [assistant("d"), user("b"), assistant("e")],
    ]
    prompt = [user("p"), {**assistant("q"), "loss": True}, user("r")]
    rows = [{"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}]
    whole = [{"chosen": [*prompt, *answers[0]], "rejected": [*prompt, *answers[1]]}]
    ((chosen, rejected),) = texts(read(tmp_path, whole, system_prompt="s"))
    assert chosen.split("[[")[1:] == ["c<|im_end|>]]"]
    assert rejected.count("[[") == 2
    flagged = {"prompt": "p", "chosen": [{**assistant("a"), "train": False}], "rejected": "b"}
    with pytest.raises(ConfigError, match="'chosen': all messages of the answer are marked as not trained on"):
        read(tmp_path, [*rows, flagged])


# Pairs whose answers have the same tokens

TRIMS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
LONG = "the same long beginning of both answers " * 3
EQUAL = {
    "cut": ({"prompt": "c", "chosen": LONG + "good", "rejected": LONG + "bad"}, {"seq_len": 80}),
    "longer than the cut": ({"prompt": "c", "chosen": LONG, "rejected": LONG + "and more"}, {"seq_len": 80}),
    "trimmed": ({"prompt": "c", "chosen": "a", "rejected": " a\n"}, {"template": TRIMS}),
    "without reasoning": (
        {
            "prompt": "c",
            "chosen": [{**assistant("a"), "reasoning_content": "x"}],
            "rejected": [{**assistant("a"), "reasoning_content": "y"}],
        },
        {},
    ),
}


@pytest.mark.parametrize("builder", ["dpo", "packed", "reward"])
@pytest.mark.parametrize("case", EQUAL)
def test_pairs_of_equal_tokens_are_dropped_and_counted(tmp_path: Path, case: str, builder: str) -> None:
    """Their loss would be ln 2 without a gradient. The pairs that remain keep their order."""
    row, keys = EQUAL[case]
    good = [{"prompt": str(number), "chosen": f"+{number}", "rejected": f"-{number}"} for number in range(3)]
    file = write(tmp_path / "rows.jsonl", [row, good[0], row, *good[1:]])
    cfg = PreferencesDataConfig(path=str(file), eval_fraction=0.0, cache=None, pack=builder == "packed")
    tokenizer = byte_tokenizer(keys.get("template", CHATML))
    tokenizer.pad_token = "</s>"
    build = build_scored if builder == "reward" else build_pairs

    def built() -> Any:
        return build(cfg, tokenizer, seq_len=keys.get("seq_len", 200), split="train")

    pairs = built()
    assert [pairs.show(index).count(f"+{index}") for index in range(len(pairs))] == [1, 1, 1]
    assert pairs.facts.dropped_equal == 2
    assert f"{file} (train): 3 pairs, " in str(pairs.facts)
    assert "; 2 pairs of equal answers dropped" in str(pairs.facts)
    assert pairs.facts.batch_unit == "pairs"
    assert f"2 of 5 rows of {file} (train) are dropped (40%): 2 pairs of equal answers" in pairs.facts.warning
    lengths = [len(each.input_ids) for index in range(3) for each in pairs.rows_of(index)]
    assert pairs.facts.tokens == sum(lengths)
    if builder == "packed":
        packed = pack_pairs(pairs)
        assert sum(len(row.row.ends) for row in packed) == 6
        assert "2 pairs of equal answers dropped" in str(packed.facts)
    write(file, [row, row])
    with pytest.raises(ConfigError, match="2 pairs of equal answers dropped.*no pair remains: ") as caught:
        built()
    assert ("raise training.seq_len" if "seq_len" in keys else "set model.chat_template") in str(caught.value)


def test_answers_that_differ_in_one_token_remain(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "chosen": f"{LONG}a", "rejected": f"{LONG}b"},
        {"prompt": "p", "chosen": "a", "rejected": "a "},
    ]
    assert len(read(tmp_path, rows)) == 2


SYSTEM = "<|im_start|>system\nbe brief<|im_end|>\n"
END = "<|im_end|>]]"


def answered(prompt: str) -> list[list[str]]:
    return [[f"{prompt}[[yes{END}", f"{prompt}[[no{END}"]]


HISTORY = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello\n\nyou<|im_end|>\n"
TRANSCRIPT = "\n\nHuman: hi\n\nAssistant: hello\n\nyou\n\nHuman: why?\n\nAssistant:"
CHAT = {"chosen": [user("why?"), assistant("yes")], "rejected": [user("why?"), assistant("no")]}
TEXTS = {"chosen": "yes", "rejected": "no"}
FORMS: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "Anthropic/hh-rlhf": ({"chosen": f"{TRANSCRIPT} yes", "rejected": f"{TRANSCRIPT} no"}, answered(HISTORY + PROMPT)),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {"prompt": "why?", "prompt_id": "0f", **CHAT, "messages": CHAT["chosen"], "score_chosen": 8.5,
         "score_rejected": 2.0}, answered(PROMPT),
    ),
    "Intel/orca_dpo_pairs": ({"system": "be brief", "question": "why?", **TEXTS}, answered(SYSTEM + PROMPT)),
    "Intel/orca_dpo_pairs, no system message": ({"system": "", "question": "why?", **TEXTS}, answered(PROMPT)),
    "argilla/distilabel-intel-orca-dpo-pairs": (
        {"system": "be brief", "input": "why?", **TEXTS, "generations": ["yes", "no"]}, answered(SYSTEM + PROMPT),
    ),
    "trl-lib/hh-rlhf-helpful-base": (
        {"prompt": [user("why?")], "chosen": [assistant("yes")], "rejected": [assistant("no")]}, answered(PROMPT),
    ),
    "trl-lib/ultrafeedback_binarized": ({**CHAT, "score_chosen": 8.0, "score_rejected": 2.0}, answered(PROMPT)),
    "trl-lib/tldr-preference": ({"prompt": "why?", **TEXTS}, answered(PROMPT)),
    "Skywork/Skywork-Reward-Preference-80K-v0.2": ({**CHAT, "source": "magpie"}, answered(PROMPT)),
    "metadata of messages": (
        {"chosen": [user("why?") | {"id": 1}, assistant("yes") | {"model": "a", "rating": 5.0}],
         "rejected": [user("why?") | {"id": 2}, assistant("no") | {"model": "b", "rating": 1.0}]}, answered(PROMPT),
    ),
    "mlabonne/orpo-dpo-mix-40k": ({"source": "x", **CHAT, "prompt": "why?", "question": "why?"}, answered(PROMPT)),
    "argilla/ultrafeedback-binarized-preferences": (
        {"instruction": "why?", "chosen_response": "yes", "rejected_response": "no", "chosen_avg_rating": 5.0},
        answered(PROMPT),
    ),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "expected"), FORMS.values(), ids=FORMS)
def test_usual_columns_need_no_options(
    tmp_path: Path, row: dict[str, Any], expected: list[list[str]], suffix: str
) -> None:
    pairs = read(tmp_path, [row], f"rows.{suffix}")
    assert texts(pairs) == expected
    assert check_files(PreferencesDataConfig(path=str(tmp_path / f"rows.{suffix}"))) == []


def test_labeled_answers_with_usual_columns_need_only_their_label(tmp_path: Path) -> None:
    """trl-lib/kto-mix-14k has lists of messages; the other row is its form as text."""
    rows = [
        {"prompt": [user("why?")], "completion": [assistant("yes")], "label": True},
        {"prompt": [user("how?")], "completion": [assistant("no")], "label": False},
    ]
    as_text = [
        {"prompt": "why?", "response": "yes", "label": True},
        {"prompt": "how?", "response": "no", "label": False},
    ]
    for number, labeled in enumerate((rows, as_text)):
        pairs = read(tmp_path, labeled, f"{number}.jsonl", label_column="label")
        assert texts(pairs)[0] == [f"{PROMPT}[[yes{END}", f"{PROMPT}[[no{END}"]
        assert pairs.values[DESIRABLE][:, 0].tolist() == [1, 0]


def test_both_samples_of_a_pair_have_the_prompt_of_the_chosen_one(tmp_path: Path) -> None:
    """Metadata in a shared message must not put the two samples of a pair into different splits."""
    answers = {"chosen": (1, "yes"), "rejected": (-1, "no")}
    rows = [
        {key: [user(f"why {n}?") | {"id": sign * n}, assistant(text)] for key, (sign, text) in answers.items()}
        for n in range(1, 21)
    ]
    file = write(tmp_path / "rows.jsonl", rows)
    cfg = PreferencesDataConfig(path=str(file), eval_fraction=0.5, cache=None)
    for split in ("train", "eval"):
        pairs = build_pairs(cfg, byte_tokenizer(CHATML), seq_len=100, split=split)
        assert len(pairs) == 10
        for chosen, rejected in texts(pairs):
            assert chosen.partition("[[")[0] == rejected.partition("[[")[0]


def test_pairs_with_a_bad_answer_are_dropped_as_a_whole(tmp_path: Path) -> None:
    """hh-rlhf has such rows: equal answers, an empty turn, and an answer that ends with the user."""
    shared = "\n\nHuman: why?\n\nAssistant:"
    good = [{"chosen": f"{shared} {a}", "rejected": f"{shared} {b}"} for a, b in ("ab", "cd")]
    bad = [
        {"chosen": f"{shared} same", "rejected": f"{shared} same"},
        {"chosen": f"{shared} a", "rejected": shared},
        {"chosen": f"{shared} a", "rejected": f"{shared} b\n\nHuman: more"},
        {"chosen": f"{shared} a", "rejected": None},
    ]
    rows = [bad[0], good[0], *bad[1:], good[1]]
    pairs = read(tmp_path, rows, bad_rows=BadRows.drop)
    assert [[text.partition("[[")[2][0] for text in pair] for pair in texts(pairs)] == [["a", "b"], ["c", "d"]]
    assert pairs.facts.dropped_bad_rows == 4
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, rows)
    _, *lines = caught.value.problems[0].splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "data.chosen_column=chosen: is equal to 'rejected'",
        "turn 2 of 'rejected' is empty",
        "'rejected' needs an answer of the assistant to a prompt, in this column or in data.prompt_column=null, that "
        "the answers of the row share",
        "data.rejected_column=rejected: holds null, not text",
    ]


@pytest.mark.parametrize(
    ("columns", "keys", "problems"),
    [
        ("text better worse", {},
         ["data.chosen_column=null: FILE has no column chosen or chosen_response, it has text, better, worse; write "
          "data.chosen_column=better data.rejected_column=worse"]),
        ("prompt completion label", {"rejected_column": "completion"},
         ["data.chosen_column=null: FILE has no column chosen or chosen_response, it has prompt, completion, label; "
          "write objective=kto"]),
        ("prompt chosen rejected", {"label_column": "label"},
         ["data.label_column=label: FILE has no such column, it has prompt, chosen, rejected",
          "data.completion_column=null: FILE has no column completion or response, it has prompt, chosen, rejected; "
          "set data.completion_column to the column with these answers, or another objective than kto for pairs of "
          "answers"]),
        ("prompt chosen rejected", {"system_column": "sytem"},
         ["data.system_column=sytem: FILE has no such column, it has prompt, chosen, rejected"]),
    ],
    ids=["other names", "labeled answers", "pairs", "system"],
)  # fmt: skip
def test_columns_that_do_not_determine_the_form_are_named_with_the_keys_to_set(
    tmp_path: Path, columns: str, keys: dict[str, Any], problems: list[str]
) -> None:
    row = {name: name == "label" or f"a {name}" for name in columns.split()}
    file = tmp_path / "rows.jsonl"
    problems = [each.replace("FILE", str(file)) for each in problems]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, [row], **keys)
    assert caught.value.problems == problems
    assert check_files(PreferencesDataConfig(path=str(file), **keys)) == problems


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "yes", "rejected": "no", "topic": "x"},
        {"chosen": [assistant("yes")], "rejected": [assistant("no")], "topic": "x"},
        {"chosen": "Assistant: yes", "rejected": "Assistant: no", "topic": "x"},
    ],
    ids=["texts", "messages", "answers of a transcript"],
)
def test_answers_without_a_prompt_are_rejected_with_the_columns(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, [row])
    assert caught.value.problems[0].partition(".jsonl:1: ")[2] == (
        "data.prompt_column=null: 'chosen' holds an answer without its prompt; the columns are chosen, rejected, "
        "topic; set data.prompt_column to the column with the prompts"
    )


def test_a_named_column_is_not_read_a_second_time(tmp_path: Path) -> None:
    """The prompt is named as one of the answers usually is."""
    row = {"chosen": "why?", "chosen_response": "yes", "rejected": "no"}
    pairs = read(tmp_path, [row], prompt_column="chosen")
    assert texts(pairs) == answered(PROMPT)
