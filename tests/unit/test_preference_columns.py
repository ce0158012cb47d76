"""Columns and forms of the usual preference datasets of the hub, read without options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.config.schema.data import BadRows, PreferencesDataConfig
from components.data.pairs import DESIRABLE, build_pairs
from components.data.preflight import check_files
from components.protocol.errors import ConfigError
from tests.unit.test_data_examples import byte_tokenizer
from tests.unit.test_data_files import write
from tests.unit.test_data_pairs import CHATML, PROMPT, assistant, read, texts, user

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
    ("row", "keys", "problems"),
    [
        (
            {"text": "a", "better": "b", "worse": "c"},
            {},
            [
                "data.chosen_column=null: FILE has no column chosen or chosen_response, it has text, better, worse; "
                "write data.chosen_column=better data.rejected_column=worse"
            ],
        ),
        (
            {"prompt": "a", "completion": "b", "label": True},
            {"rejected_column": "completion"},
            [
                "data.chosen_column=null: FILE has no column chosen or chosen_response, it has prompt, completion, "
                "label; write objective=kto"
            ],
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"label_column": "label"},
            [
                "data.label_column=label: FILE has no such column, it has prompt, chosen, rejected",
                "data.completion_column=null: FILE has no column completion or response, it has prompt, chosen, "
                "rejected; set data.completion_column to the column with these answers, or another objective than kto "
                "for pairs of answers",
            ],
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"system_column": "sytem"},
            ["data.system_column=sytem: FILE has no such column, it has prompt, chosen, rejected"],
        ),
    ],
    ids=["other names", "labeled answers", "pairs", "system"],
)
def test_columns_that_do_not_determine_the_form_are_named_with_the_keys_to_set(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, Any], problems: list[str]
) -> None:
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
