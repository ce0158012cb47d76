"""Data of score models: labels of rows, the scored token, conversations, packing and wrong rows."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, LlamaConfig

from components import data
from components.config.schema.data import LabelsDataConfig, PreferencesDataConfig
from components.data.sources.columns import answer_configs, each_answer
from components.data.sources.files import read_rows
from components.data.sources.rows import BadRowReport, each_labeled_text, train_location
from components.data.sources.split import rows_of
from components.models.classifier import set_labels
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError

PAD = 258
"""The byte tokenizer's pad token."""


def build(folder: Path, rows: list[dict[str, Any]], *, seq_len: int = 32, **keys: Any) -> Any:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cfg = LabelsDataConfig(path=str(folder / "rows.jsonl"), eval_fraction=0.0, cache=None, **keys)
    return data.build_scored(cfg, byte_tokenizer(), seq_len=seq_len, split="train")


def test_scored_token_is_the_last_one_that_is_not_the_pad_token() -> None:
    assert data.scored_example([5, 6, 7], 0, 2) == data.Example([5, 6, 7, 0], [-100, -100, -100, 2])
    assert data.scored_example([5, 0, 6, 0, 0], 0, 1) == data.Example([5, 0, 6, 0], [-100, -100, -100, 1])
    assert data.scored_example([0, 0], 0, 1) == data.Example([0, 0], [-100, 1])  # as transformers: token 0


def test_texts_get_their_labels(tmp_path: Path) -> None:
    rows = [{"text": "ab", "label": "spam"}, {"text": "c", "label": 0}, {"text": "d", "label": "1"}]
    texts = build(tmp_path, [*rows, {"text": "e", "label": 1.0}], label_names=["ham", "spam"])
    assert [each.labels[-1] for each in texts] == [1, 0, 1, 1]
    assert texts[0] == data.Example([97, 98, PAD], [-100, -100, 1])
    assert texts.show(0) == "spam: a[[b]]"
    assert texts.facts.target_tokens == 4


LABELS = [
    # label_names or num_labels, labels, positions as transformers' id2label reads them (None: a bad row)
    (["1", "0"], [1, 0, "1", "0", 1.0, True, False, 2, None], [0, 1, 0, 1, 0, 0, 1, None, None]),
    (["1", "2", "3"], [1, 2, 3, "3", 3.0, 0, " 2"], [0, 1, 2, 2, 2, None, 1]),
    (["true", "false"], [True, False, "true", "True", "FALSE", 1, 0], [0, 1, 0, 0, 1, 0, 1]),
    (["False", "True"], [True, "false", 0.0], [1, 0, 0]),
    (["0.5", "1"], [0.5, "0.50", 1, 0], [0, 0, 1, None]),
    (["01", "1"], ["01", "1", 1, "1.0"], [0, 1, 1, None]),
    (["ham", "spam"], ["spam", " ham", 1, "0", 1.0, True, "true", 2, -1, 0.5], [1, 0, 1, 0, 1, *[None] * 5]),
    (["nan", "None"], ["nan", "None", math.nan, None], [0, 1, None, None]),
    (2, [1, 0, True, False, "true", "1.0", 2, "x", "1_0"], [1, 0, 1, 0, 1, 1, None, None, None]),
]


def write_column(file: Path, labels: list[Any]) -> Path:
    """Write rows of a text and a label with the standard tool of the format."""
    match file.suffix:
        case ".jsonl":
            rows = [{"text": "a", "label": label} for label in labels]
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        case ".csv":
            with file.open("w", newline="") as out:
                csv.writer(out).writerows([["text", "label"], *(["a", label] for label in labels)])
        case _:
            pq.write_table(pa.table({"text": ["a"] * len(labels), "label": labels}), file)
    return file


def positions_in(file: Path, names: list[str] | int) -> list[int | None]:
    """Return the label of each row; None: a bad row."""
    keys: dict[str, Any] = {"num_labels": names} if isinstance(names, int) else {"label_names": names}
    cfg = LabelsDataConfig(path=str(file), **keys)
    rows = list(rows_of(cfg, train_location(cfg)))
    return [next((each.label for each in each_labeled_text(cfg, [row], BadRowReport())), None) for row in rows]


@pytest.mark.parametrize(("names", "labels", "positions"), LABELS)
def test_label_equals_a_name_whatever_its_type_in_every_format(
    tmp_path: Path, names: list[str] | int, labels: list[Any], positions: list[int | None]
) -> None:
    assert positions_in(write_column(tmp_path / "x.jsonl", labels), names) == positions
    kept = [(label, position) for label, position in zip(labels, positions, strict=True) if label is not None]
    kept = [(label, position) for label, position in kept if label == label]  # CSV has no null, which is a text there
    assert positions_in(write_column(tmp_path / "x.csv", [each[0] for each in kept]), names) == [
        each[1] for each in kept
    ]
    for number, kind in enumerate(set(map(type, labels))):  # a Parquet column has one type
        some = [(label, position) for label, position in zip(labels, positions, strict=True) if type(label) is kind]
        file = write_column(tmp_path / f"{number}.parquet", [each[0] for each in some])
        assert positions_in(file, names) == [each[1] for each in some]


def test_labels_of_kto_are_the_same_in_every_format(tmp_path: Path) -> None:
    labels = [True, False, 1, 0, 1.0, "true", "False", "1", "0.0", " 1"]
    for name in ("x.jsonl", "x.csv"):
        file = write_column(tmp_path / name, labels)
        cfg = PreferencesDataConfig(path=str(file), completion_column="text", label_column="label", prompt_column="p")
        (answers,) = answer_configs(cfg, ["text", "label", "p"], "x")
        rows = [row._replace(values={"p": "q", **row.values}) for row in read_rows(file)]
        found = [each.is_desirable for each in each_answer(answers, rows, BadRowReport())]
        assert found == [True, False, True, False, True, True, False, True, False, True]


def test_names_of_a_score_head_are_in_the_order_of_its_rows(tmp_path: Path) -> None:
    config = LlamaConfig()
    set_labels(config, ["1", "0"])
    config.architectures = ["LlamaForSequenceClassification"]
    config.save_pretrained(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path)
    texts = build(tmp_path, [{"text": "a", "label": 1}, {"text": "b", "label": 0}], label_names=["1", "0"])
    assert [saved.id2label[each.labels[-1]] for each in texts] == ["1", "0"]
    set_labels(saved, ["good", "bad"])  # other names for the same rows
    with pytest.raises(ConfigError, match=r"are those of the score head of model.path in another order; set data.lab"):
        set_labels(saved, ["bad", "good"])


def test_long_text_keeps_its_first_tokens_and_its_label(tmp_path: Path) -> None:
    texts = build(tmp_path, [{"text": "abcdefgh", "label": 1}], num_labels=2, seq_len=5)
    assert texts[0] == data.Example([*b"abcd", PAD], [-100] * 4 + [1])
    assert texts.facts.truncated == 1


def test_conversation_is_rendered_by_the_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    texts = build(tmp_path, [{"text": messages, "label": 1}], num_labels=2, seq_len=100)
    tokenizer = byte_tokenizer()
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert texts[0].input_ids == [*tokenizer(rendered)["input_ids"], PAD]


def test_packed_rows_have_a_target_per_text(tmp_path: Path) -> None:
    rows = [{"text": "abc"[: 1 + number % 3], "label": number % 2} for number in range(9)]
    packed = build(tmp_path, rows, num_labels=2, seq_len=12, pack=True)
    targets = [label for row in packed for label in row.labels if label != -100]
    assert sorted(targets) == [0] * 5 + [1] * 4
    assert all(row.labels[end - 1] != -100 for row in packed for end in row.ends)


def test_wrong_rows_are_listed_with_file_and_row(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 2}, {"text": "", "label": 1}, {"text": "c"}]
    with pytest.raises(ConfigError) as error:
        build(tmp_path, [*rows, {"text": "d", "label": "x"}], label_names=["ham", "spam"])
    first, *lines = error.value.problems[0].splitlines()
    assert "4 rows cannot become a sample" in first
    assert "rows.jsonl:2: data.label_column=label: holds int 2; must be a number from 0 to 1" in lines[0]
    assert "rows.jsonl:3: data.text_column=text: is empty" in lines[1]
    assert "rows.jsonl:4: data.label_column=label: holds null (the key is missing)" in lines[2]
    assert "rows.jsonl:5" in lines[3]
    assert "one of ham, spam" in lines[3]


ENDINGS = {
    "newline": "<|im_end|>\n",
    "end of turn": "<|im_end|>",
    "pad token": "<|pad|>",
    "end of turn and pad tokens": "<|im_end|><|pad|><|pad|>",
}


@torch.no_grad()
@pytest.mark.parametrize("pad", ["<|pad|>", "<|im_end|>"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_pairs_and_labeled_conversations_are_scored_at_the_token_of_transformers(
    tmp_path: Path, ending: str, pad: str
) -> None:
    """Also if the pad token ends the turn: plain transformers then scores the word before it."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = pad
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}" + ENDINGS[ending] + "{% endfor %}"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=264, num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes)
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(config).double().eval()

    def score(row: data.Example) -> float:
        states = model.model(torch.tensor([row.input_ids])).last_hidden_state
        (position,) = [index - 1 for index, label in enumerate(row.labels) if label >= 0]
        return float(model.score(states)[0, position, 0])

    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}] for answer in ("yes", "n")]
    pairs, texts = tmp_path / "pairs.jsonl", tmp_path / "texts.jsonl"
    pairs.write_text(json.dumps({"prompt": "q", "chosen": "yes", "rejected": "n"}) + "\n")
    texts.write_text("".join(json.dumps({"text": each, "label": 0}) + "\n" for each in chats))
    keys: dict[str, Any] = {"eval_fraction": 0.0, "cache": None}
    configs = PreferencesDataConfig(path=str(pairs), **keys), LabelsDataConfig(path=str(texts), num_labels=2, **keys)
    of_pairs, of_texts = (data.build_scored(each, tokenizer, seq_len=99, split="train") for each in configs)
    batch = tokenizer.apply_chat_template(chats, padding=True, return_tensors="pt", return_dict=True)
    expected = model(**batch).logits[:, 0].tolist()
    assert [score(row) for row in of_pairs[0][:2]] == pytest.approx(expected, abs=1e-12)
    assert [score(row) for row in of_texts] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seq_len", [100, 40])
def test_answers_of_pairs_are_scored_at_the_token_of_the_same_labeled_conversation(
    tmp_path: Path, seq_len: int
) -> None:
    """It is the last token of the template's text, after the end of the turn."""
    answers = ["b", "cd" * 20]
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}] for answer in answers]
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": answers[0], "rejected": answers[1]}) + "\n")
    cfg = PreferencesDataConfig(path=str(file), eval_fraction=0.0, cache=None)
    pairs = data.build_scored(cfg, byte_tokenizer(), seq_len=seq_len, split="train")
    texts = build(tmp_path, [{"text": each, "label": 0} for each in chats], seq_len=seq_len, num_labels=2)
    for row, text, messages in zip(pairs[0][:2], texts, chats, strict=True):
        assert row == text
        rendered = byte_tokenizer().apply_chat_template(messages, return_dict=True)["input_ids"]
        assert row.input_ids == [*rendered[: seq_len - 1], PAD]
        assert row.labels == [-100] * (len(row.labels) - 1) + [0]
