"""The default data: identical in every process, built without output, and without leakage into the held-out split."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from components.config.schema.data import BadRows, DocsDataConfig, TextDataConfig
from components.data import cache
from components.data.dataset import Dataset
from components.data.examples import IGNORED
from components.data.loading import build_dataset
from components.data.preflight import check_files
from components.data.sources.files import STDLIB
from components.data.sources.text import MODULES, _is_held_out, pydocs_conversations
from components.protocol.errors import ConfigError
from tests.unit.test_data_examples import byte_tokenizer

TRAIN, EVAL = pydocs_conversations("train"), pydocs_conversations("eval")
ROOT = Path(__file__).parents[2]
PRINT_ALL = """
import json
from components.data.sources.text import pydocs_conversations
print(json.dumps([c.messages for split in ("train", "eval") for c in pydocs_conversations(split)]))
"""
TOKENIZER = byte_tokenizer(eos="</s>")


def build_in_subprocess(before: str = "", *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *flags, "-c", before + PRINT_ALL], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_known_function_gives_the_expected_conversation():
    (fill,) = [c for c in EVAL if c.where == "textwrap.fill"]
    question, answer = (message["content"] for message in fill.messages)
    assert question == "What does `textwrap.fill` do?"
    assert answer == (
        "`textwrap.fill(text, width=70, **kwargs)`\n\nFill a single paragraph of text, returning a new string."
    )


def test_split_sizes_and_a_tenth_of_the_packages_held_out():
    assert len(TRAIN) > 1200
    assert 80 < len(EVAL) < 200
    packages = {module.partition(".")[0] for module in MODULES}
    held_out = {package for package in packages if _is_held_out(package)}
    assert 0.08 < len(held_out) / len(packages) < 0.12
    assert {"email", "subprocess", "textwrap", "uuid"} <= held_out


def test_splits_share_no_package_and_no_question_or_docstring_repeats():
    def packages(conversations):
        return {c.where.partition(".")[0] for c in conversations}

    def summaries(conversations):
        return [c.messages[1]["content"].rpartition("`\n\n")[2] for c in conversations]

    assert not packages(TRAIN) & packages(EVAL)
    everything = summaries(TRAIN) + summaries(EVAL)
    assert len(set(everything)) == len(everything)
    questions = [c.messages[0]["content"] for c in [*TRAIN, *EVAL]]
    assert len(set(questions)) == len(questions)


@pytest.mark.slow
def test_other_processes_build_the_same_data_without_warnings():
    here = [c.messages for c in [*TRAIN, *EVAL]]
    for flags, before in ((["-W", "error"], ""), ([], "import torch, transformers, datasets\n")):
        other = build_in_subprocess(before, *flags)
        assert json.loads(other.stdout) == here
        assert other.stderr == ""


def test_text_contains_no_address_or_path_of_this_machine():
    for conversation in [*TRAIN, *EVAL]:
        text = "".join(message["content"] for message in conversation.messages)
        assert not re.search(r" at 0x|<(class|object|function|module)", text), conversation
        assert sys.prefix not in text
        assert str(Path.home()) + "/" not in text


def test_python_without_docstrings_is_rejected():
    other = build_in_subprocess("", "-OO")
    assert "ConfigError: data=pydocs: python -OO (PYTHONOPTIMIZE=2) removes the docstrings" in other.stderr


@pytest.mark.parametrize("key", ["split", "eval_split"])
def test_unknown_splits_are_rejected(key):
    with pytest.raises(ConfigError, match=rf"data.{key}=test: must be train or eval"):
        DocsDataConfig(**{key: "test"})


def build(path: Path | str, split: str = "train", seq_len: int = 16, **values: object) -> Dataset:
    cfg = TextDataConfig(path=str(path), **{"cache": None, **values})
    return build_dataset(cfg, TOKENIZER, seq_len=seq_len, split=split)


def target_text(dataset: Dataset) -> str:
    """Return the text of all targets, in order."""
    return TOKENIZER.decode([label for example in dataset for label in example.labels if label != IGNORED])


def jsonl(file: Path, texts: list[object], column: str = "text") -> Path:
    file.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return file


def numbered(count: int) -> list[str]:
    return [f"document {number}: " + "word " * (number % 7) for number in range(count)]


@pytest.mark.parametrize("seq_len", [2, 3, 16, 17, 1000])
def test_every_token_except_the_first_of_a_document_is_a_target_once(tmp_path: Path, seq_len: int) -> None:
    texts = ["Ünïcödé 数学, a first document.", "x", "the third\n\nends here  "]
    dataset = build(jsonl(tmp_path / "corpus.jsonl", texts), seq_len=seq_len, eval_fraction=0.0)
    documents = [TOKENIZER.encode(text, add_special_tokens=False) + [TOKENIZER.eos_token_id] for text in texts]
    targets = [token for ids in documents for token in ids[1:]]
    assert [label for example in dataset for label in example.labels if label != IGNORED] == targets
    assert all(len(example.input_ids) <= seq_len for example in dataset)
    assert dataset.facts.target_tokens == len(targets)
    for example in dataset:  # labels are aligned with the inputs
        assert example.labels[1:] == example.input_ids[1:]


def test_entire_documents_are_held_out_if_there_are_many(tmp_path: Path) -> None:
    texts = numbered(60)
    path = jsonl(tmp_path / "corpus.jsonl", texts)
    train, held_out = (build(path, split, 1000, eval_fraction=0.1) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (54, 6)
    splits = [{TOKENIZER.decode(example.input_ids) for example in split} for split in (train, held_out)]
    assert not splits[0] & splits[1]
    assert {text.removesuffix("</s>") for split in splits for text in split} == set(texts)


def test_last_lines_of_a_single_document_are_held_out(tmp_path: Path) -> None:
    text = "".join(f"line {number} of the text\n" for number in range(100))
    (tmp_path / "book.txt").write_text(text)
    train, held_out = (build(tmp_path / "book.txt", split, 1 << 20) for split in ("train", "eval"))
    first, second = (TOKENIZER.decode(split[0].input_ids).removesuffix("</s>") for split in (train, held_out))
    assert first + second == text
    assert second.startswith("line 9")
    assert len(second) == pytest.approx(0.05 * len(text), abs=30)
    assert [prompt.text for prompt in held_out.prompts] == [second.partition("\n")[0]]


def test_held_out_end_of_a_document_with_long_lines_is_near_its_share(tmp_path: Path) -> None:
    """Lengths of lines, the share, and the number of lines that are held out; None: none is near the share."""
    file = tmp_path / "book.txt"
    for lengths, fraction, count in (([90, 8, 1], 0.05, 2), ([100, 3, 4], 0.05, 1), ([50] * 20, 0.04, 1)):
        texts = [f"{index % 10}" * (length - 1) + "\n" for index, length in enumerate(lengths)]
        file.write_text("".join(texts))
        held_out = build(file, "eval", 1 << 20, eval_fraction=fraction)
        assert TOKENIZER.decode(held_out[0].input_ids) == "".join(texts[-count:]) + "</s>"
    file.write_text("a" * 69 + "\n" + "b" * 29 + "\n" + "c")
    message = r"book.txt: data.eval_fraction=0.1 .*; set data.eval_fraction=0.009901 or 0.3"
    with pytest.raises(ConfigError, match=message):
        build(file, eval_fraction=0.1)
    for share, end in ((0.009901, "c"), (0.3069, "b" * 29 + "\nc")):
        assert TOKENIZER.decode(build(file, "eval", 99, eval_fraction=share)[0].input_ids) == f"{end}</s>"


def test_folder_of_text_files_is_read_in_order(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second"), ("a.txt", "first")):
        (tmp_path / name).write_text(text)
    assert target_text(build(tmp_path, eval_fraction=0.0)) == "irst</s>econd</s>"


def test_standard_library_source_is_a_deterministic_corpus() -> None:
    dataset = build(STDLIB, seq_len=256, max_samples=300)
    held_out = build(STDLIB, "eval", seq_len=256, max_eval_samples=50)
    assert (len(dataset), len(held_out)) == (300, 50)
    assert "import" in target_text(dataset)
    assert build(STDLIB, seq_len=256, max_samples=300).fingerprint == dataset.fingerprint
    assert check_files(TextDataConfig(path=STDLIB)) == []


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of documents tokenized by each call."""
    monkeypatch.setattr(cache, "_WORTH_BYTES", 0)
    counted: list[int] = []
    encode = cache.text.encode_documents

    def count(tokenizer: object, documents: list[object], seq_len: int) -> object:
        counted.append(len(documents))
        return encode(tokenizer, documents, seq_len)

    monkeypatch.setattr(cache.text, "encode_documents", count)
    return counted


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_documents_are_tokenized_once(tmp_path: Path, split: str, pack: bool, encoded: list[int]) -> None:
    corpus = jsonl(tmp_path / "corpus.jsonl", numbered(60))
    book = tmp_path / "book.txt"
    book.write_text("".join(f"line {number} of the text\n" for number in range(100)))
    for path, documents in ((corpus, 54 if split == "train" else 6), (book, 1)):
        values = {"eval_fraction": 0.1, "pack": pack}
        fresh = build(path, split, **values)
        cached = [build(path, split, cache=str(tmp_path / "cache"), **values) for _ in range(2)]
        assert encoded == [documents] * 2  # once without the cache and once to fill it
        assert {each.fingerprint for each in cached} == {fresh.fingerprint}
        assert [list(each) for each in cached] == [list(fresh)] * 2
        assert {(str(each.facts), str(each.prompts)) for each in cached} == {(str(fresh.facts), str(fresh.prompts))}
        encoded.clear()


def test_whatever_changes_the_samples_changes_the_cache_key(tmp_path: Path, encoded: list[int]) -> None:
    path = jsonl(tmp_path / "corpus.jsonl", [f"{text}\n\nand more" for text in numbered(60)])
    values = {"path": path, "cache": str(tmp_path / "cache")}
    variants = [{}, {"seq_len": 17}, {"eval_fraction": 0.1}, {"max_samples": 7}, {"split": "eval"}]
    made = [build(**values, **changes) for changes in variants]
    jsonl(path, numbered(61))
    made.append(build(**values))
    assert len({each.fingerprint for each in made}) == len(encoded) == len(made) == 6
    build(**values, max_eval_samples=1, pack=True)
    assert len(encoded) == 6


def test_batches_of_long_documents_are_limited_by_characters(
    tmp_path: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "corpus.jsonl", ["a" * 400] * 5 + ["b" * 30] * 20)
    expected = list(build(path, eval_fraction=0.0))
    monkeypatch.setattr(cache, "_CHARACTERS_AT_ONCE", 700)
    monkeypatch.setattr(cache, "_ENCODED_AT_ONCE", 8)
    encoded.clear()
    assert list(build(path, eval_fraction=0.0)) == expected
    assert encoded == [2, 2, 8, 8, 5]
    encoded.clear()
    assert list(build(path, eval_fraction=0.0, max_samples=60)) == expected[:60]  # a long document gives 27 samples
    assert encoded == [2, 2]


def test_max_samples_keeps_the_first_samples(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "corpus.jsonl", numbered(60))
    full = build(path)
    assert [each.input_ids for each in build(path, max_samples=7)] == [each.input_ids for each in full[:7]]


def test_invalid_text_data_is_reported(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "corpus.jsonl", ["a text", "", 3], column="content")
    problems = check_files(TextDataConfig(path=str(path)))
    assert problems == [
        f"data.text_column=text: {path} has no such column, it has content; write data.text_column=content"
    ]
    with pytest.raises(ConfigError) as caught:
        build(path, text_column="content")
    assert f"{path}:2: data.text_column=content: is empty" in str(caught.value)
    assert f"{path}:3: data.text_column=content: holds int 3, not text" in str(caught.value)
    dataset = build(path, text_column="content", bad_rows=BadRows.drop, eval_fraction=0.0)
    assert (target_text(dataset), dataset.facts.dropped_bad_rows) == (" text</s>", 2)
    (tmp_path / "one_line.txt").write_text("no line begins near its end")
    with pytest.raises(ConfigError, match="data.eval_fraction=0.05 of it cannot be held out"):
        build(tmp_path / "one_line.txt")
    with pytest.raises(ConfigError, match="data.overlong=drop: documents are cut"):
        TextDataConfig(path="x.txt", overlong="drop")
