"""Tokenized samples on disk: equal to those made anew, never stale, made once, and no reason for a run to fail."""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.data import cache
from components.data.examples import encode_conversations
from components.data.rows import Conversation
from components.data.tokens import Tokens, flattened
from components.models.tokenizer import byte_tokenizer


def conversations(count: int = 40, word: str = "answer") -> list[Conversation]:
    roles = (("user", "question"), ("assistant", word))
    return [
        Conversation(f"row {i}", [{"role": role, "content": f"{text} {i} " * (1 + i % 7)} for role, text in roles])
        for i in range(count)
    ]


@pytest.fixture(autouse=True)
def small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WORTH_BYTES", 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many conversations were tokenized, by call."""
    counted: list[int] = []

    def encode(tokenizer: Any, those: Any) -> Any:
        counted.append(len(those))
        return encode_conversations(tokenizer, those)

    monkeypatch.setattr(cache.examples, "encode_conversations", encode)
    return counted


def same(one: Tokens, other: Tokens) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def entries(folder: Path) -> list[Path]:
    assert all(file.suffix == ".safetensors" for file in folder.iterdir())  # no lock, nothing half written
    return sorted(folder.iterdir())


def test_what_is_kept_is_what_was_made(tmp_path: Path, made: list[int]) -> None:
    tokenizer, those = byte_tokenizer(), conversations()
    expected = flattened(encode_conversations(tokenizer, those))
    folder = tmp_path / "new" / "cache"
    assert same(cache.tokenize(those, tokenizer, str(folder)), expected)
    assert folder.stat().st_mode & 0o777 == 0o700
    again = cache.tokenize(those, byte_tokenizer(), str(folder))
    assert same(again, expected)
    assert isinstance(again.ids, np.memmap)
    assert made == [40]
    assert same(cache.tokenize(those, tokenizer, None), expected)
    assert made == [40, 40]
    assert len(entries(folder)) == 1


def test_whatever_changes_the_tokens_gives_another_key(tmp_path: Path, made: list[int], monkeypatch: Any) -> None:
    folder, those = str(tmp_path), conversations()

    def changed(**values: Any) -> Any:
        tokenizer = byte_tokenizer()
        for name, value in values.items():
            setattr(tokenizer, name, value)
        return tokenizer

    template = byte_tokenizer().chat_template
    cache.tokenize(those, byte_tokenizer(), folder)
    cache.tokenize([*those[:-1], *conversations(1, "other")], byte_tokenizer(), folder)
    cache.tokenize(those, changed(chat_template=template.replace("<|im_end|>", "<|im_end|>!")), folder)
    cache.tokenize(those, changed(eos_token="<|pad|>"), folder)
    more = byte_tokenizer()
    more.add_tokens(["question"])
    cache.tokenize(those, more, folder)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "version", lambda package: "0.0")
        cache.tokenize(those, byte_tokenizer(), folder)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "FORMAT", cache.FORMAT + 1)
        cache.tokenize(those, byte_tokenizer(), folder)
    with monkeypatch.context() as patch:
        patch.setattr(cache.examples, "__file__", __file__)  # another way to make samples
        cache.tokenize(those, byte_tokenizer(), folder)
    assert len(made) == 8
    assert len(entries(tmp_path)) == 8
    padded = byte_tokenizer()
    padded(["a", "bc"], padding=True, truncation=True, max_length=2)  # what a call sets is no part of the tokenizer
    cache.tokenize(those, padded, folder)
    assert len(made) == 8


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "header"])
def test_a_damaged_entry_is_made_again(damage: str, tmp_path: Path, made: list[int], caplog: Any) -> None:
    tokenizer, those = byte_tokenizer(), conversations()
    expected = flattened(encode_conversations(tokenizer, those))
    cache.tokenize(those, tokenizer, str(tmp_path))
    (entry,) = entries(tmp_path)
    content = bytearray(entry.read_bytes())
    content[-5] ^= 1
    damaged = {"flip": content, "cut": content[: len(content) // 2], "empty": b"", "header": b"\xff" * 64}
    entry.write_bytes(damaged[damage])
    assert same(cache.tokenize(those, tokenizer, str(tmp_path)), expected)
    assert f"{entry} is damaged" in caplog.text
    assert len(made) == 2
    assert same(cache.tokenize(those, tokenizer, str(tmp_path)), expected)
    assert len(made) == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, made: list[int], caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "below", Path("/proc/nowhere")):
        caplog.clear()
        tokens = cache.tokenize(conversations(), byte_tokenizer(), str(folder))
        assert len(tokens.ends) == 41
        assert f"data.cache={folder}" in caplog.text


def test_a_little_text_leaves_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WORTH_BYTES", 1_000_000)
    cache.tokenize(conversations(), byte_tokenizer(), str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def process(folder: str, told: Any, start: Any) -> None:
    those, tokenizer = conversations(3000), byte_tokenizer()

    def encode(tokenizer: Any, part: Any) -> Any:
        told.put(os.getpid())
        return encode_conversations(tokenizer, part)

    cache.examples.encode_conversations = encode  # type: ignore[assignment]
    start.wait()
    tokens = cache.tokenize(those, tokenizer, folder)
    told.put(cache.hash_of_arrays(tokens))


def test_of_processes_that_start_at_once_one_tokenizes(tmp_path: Path) -> None:
    context = get_context("fork")
    told, start = context.Queue(), context.Event()
    processes = [context.Process(target=process, args=(str(tmp_path), told, start)) for _ in range(4)]
    for each in processes:
        each.start()
    start.set()
    said = [told.get(timeout=60) for _ in range(3 + 4)]  # three parts of a thousand, and four results
    for each in processes:
        each.join()
        assert each.exitcode == 0
    assert told.empty()
    assert len({each for each in said if isinstance(each, int)}) == 1
    assert len({each for each in said if isinstance(each, str)}) == 1
    assert len(entries(tmp_path)) == 1
