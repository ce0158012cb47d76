"""Tokenized samples on disk: equal to those made anew, never stale, made once, and no reason for a run to fail."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from components.config.errors import ConfigError
from components.config.schema.data import Overlong, SftDataConfig
from components.data import cache
from components.data.batches import BatchPlan, TrainBatches
from components.data.examples import IGNORED, Example, encode_conversations
from components.data.loading import build_dataset
from components.data.sources import split as sides
from components.data.sources.split import SourceSplit
from components.data.tokens import StoredColumn
from components.models.tokenizer import byte_tokenizer

ONE = BatchPlan(global_batch_size=1, micro_batch_size=1)


def source(folder: Path, count: int = 40, word: str = "answer", **values: Any) -> SftDataConfig:
    """A file of prompts and responses, 5 % of which are held out, and where its tokens are kept."""
    file = folder / "source.jsonl"
    rows = ({"prompt": f"question {i} " * (1 + i % 7), "response": f"{word} {i} " * (1 + i % 7)} for i in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SftDataConfig(path=str(file), **{"cache": str(folder / "cache"), **values})


def made_by(cfg: SftDataConfig, tokenizer: Any = None, is_eval: bool = False) -> cache.TokenizedSplit:
    return cache.tokenize(SourceSplit(cfg, is_eval), cfg, tokenizer or byte_tokenizer(), 1 << 20)


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


def same(one: cache.TokenizedSplit, other: cache.TokenizedSplit) -> bool:
    arrays = zip(one.tokens, other.tokens, strict=True)
    return one[1:] == other[1:] and all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in arrays)


def entries(folder: Path) -> list[Path]:
    assert all(file.suffix == ".safetensors" for file in folder.iterdir())  # no lock, nothing half written
    return sorted(folder.iterdir())


def test_what_is_kept_is_what_was_made(tmp_path: Path, made: list[int]) -> None:
    cfg = source(tmp_path, cache=str(tmp_path / "new" / "cache"))
    expected = made_by(replace(cfg, cache=None))
    assert len(expected.prompts) == len(expected.tokens.starts) == 38
    assert same(made_by(cfg), expected)
    folder = tmp_path / "new" / "cache"
    assert folder.stat().st_mode & 0o777 == 0o700
    again = made_by(cfg)
    assert same(again, expected)
    assert isinstance(again.tokens.ids, StoredColumn)  # it stays in the file
    assert made == [38, 38]
    (entry,) = entries(folder)
    stored = load_file(entry)
    assert sorted(stored) == ["ends", "ids", "labels"]
    assert np.array_equal(stored["ids"], expected.tokens.ids)
    assert len(made_by(cfg, is_eval=True).tokens.starts) == 2
    assert made == [38, 38, 2]


def test_what_nobody_reads_goes_when_another_entry_is_made(tmp_path: Path, made: list[int]) -> None:
    cfg = source(tmp_path, 200)
    first = made_by(cfg)
    folder, day = tmp_path / "cache", 24 * 3600
    (entry,) = entries(folder)
    ages = {
        "0" * 32 + ".safetensors": 31, "1" * 32 + ".safetensors": 29, f".{'2' * 32}.tmp": 2, f".{'3' * 32}.tmp": 0.5,
        "model.safetensors": 99, f"{'4' * 32}.lock": 99, ".mine.tmp": 99, entry.name: 31,
    }  # fmt: skip
    now = time.time()
    for name, days in ages.items():
        (folder / name).touch()
        os.utime(folder / name, (now - days * day,) * 2)
    made_by(cfg)  # it is read
    assert entry.stat().st_mtime > now - 60
    os.utime(entry, (now - 29 * day,) * 2)
    made_by(cfg, is_eval=True)
    left = {file.name for file in folder.iterdir()} - ages.keys()
    assert len(left) == 1
    assert {name for name in ages if not (folder / name).exists()} == {"0" * 32 + ".safetensors", f".{'2' * 32}.tmp"}
    os.utime(entry, (now - 31 * day,) * 2)
    (folder / left.pop()).unlink()
    made_by(cfg, is_eval=True)
    assert not entry.exists()
    assert same(first, made_by(replace(cfg, cache=None)))  # what is mapped can be read on


def test_whatever_changes_the_tokens_gives_another_key(tmp_path: Path, made: list[int], monkeypatch: Any) -> None:
    cfg = source(tmp_path)

    def changed(**values: Any) -> Any:
        tokenizer = byte_tokenizer()
        for name, value in values.items():
            setattr(tokenizer, name, value)
        return tokenizer

    template = byte_tokenizer().chat_template
    more = byte_tokenizer()
    more.add_tokens(["question"])
    made_by(cfg)
    made_by(source(tmp_path, word="other"))
    source(tmp_path)
    made_by(cfg, changed(chat_template=template.replace("<|im_end|>", "<|im_end|>!")))
    made_by(cfg, changed(eos_token="<|pad|>"))
    made_by(cfg, more)
    for values in ({"max_samples": 30}, {"eval_fraction": 0.5}, {"system_prompt": "Answer."},
                   {"prompt_column": "response", "response_column": "prompt"}):  # fmt: skip
        made_by(replace(cfg, **values))
    (tmp_path / "code").mkdir()
    for name, value in (("version", lambda package: "0.0"), ("FORMAT", cache.FORMAT + 1), ("CODE", tmp_path / "code")):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, value)
            made_by(cfg)
    assert len(made) == len(entries(tmp_path / "cache")) == 12
    moved = shutil.copy(cfg.path, tmp_path / "moved.jsonl")
    padded = byte_tokenizer()
    padded(["a", "bc"], padding=True, truncation=True, max_length=2)  # what a call sets is no part of the tokenizer
    made_by(replace(cfg, path=str(moved), overlong=Overlong.drop, pack=True, max_eval_samples=1), padded)
    assert len(made) == 12


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "header"])
def test_a_damaged_entry_is_made_again(damage: str, tmp_path: Path, made: list[int], caplog: Any) -> None:
    cfg = source(tmp_path)
    expected = made_by(replace(cfg, cache=None))
    made_by(cfg)
    (entry,) = entries(tmp_path / "cache")
    content = bytearray(entry.read_bytes())
    content[-5] ^= 1
    damaged = {"flip": content, "cut": content[: len(content) // 2], "empty": b"", "header": b"\xff" * 64}
    entry.write_bytes(damaged[damage])
    assert same(made_by(cfg), expected)
    assert f"{entry} is damaged" in caplog.text
    assert len(made) == 3
    assert same(made_by(cfg), expected)
    assert len(made) == 3


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "below", Path("/proc/nowhere")):
        caplog.clear()
        assert len(made_by(source(tmp_path, cache=str(folder))).tokens.starts) == 38
        assert f"data.cache={folder}" in caplog.text


def test_a_user_without_a_home_costs_a_warning(tmp_path: Path, caplog: Any) -> None:
    assert len(made_by(source(tmp_path, cache="~no-such-user/cache")).tokens.starts) == 38
    assert "data.cache=~no-such-user/cache: Could not determine home directory" in caplog.text


def test_a_little_text_leaves_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WORTH_BYTES", 1_000_000)
    made_by(source(tmp_path))
    assert not (tmp_path / "cache").exists()


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = source(tmp_path)

    def encode(tokenizer: Any, those: Any) -> Any:
        source(tmp_path, word="other")
        return encode_conversations(tokenizer, those)

    monkeypatch.setattr(cache.examples, "encode_conversations", encode)
    with pytest.raises(ConfigError, match="was changed while it was read"):
        made_by(cfg)
    assert not entries(tmp_path / "cache")


def process(cfg: SftDataConfig, told: Any, start: Any) -> None:
    def encode(tokenizer: Any, part: Any) -> Any:
        told.put(os.getpid())
        return encode_conversations(tokenizer, part)

    cache.examples.encode_conversations = encode  # type: ignore[assignment]
    start.wait()
    told.put(made_by(cfg).tokens.fingerprint)


def test_of_processes_that_start_at_once_one_tokenizes(tmp_path: Path) -> None:
    context = get_context("fork")
    told, start = context.Queue(), context.Event()
    cfg = source(tmp_path, 2500, eval_fraction=0.0)
    processes = [context.Process(target=process, args=(cfg, told, start)) for _ in range(4)]
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
    assert len(entries(tmp_path / "cache")) == 1


def read_truncated(cfg: SftDataConfig, told: Any) -> None:
    """Truncate a cache entry that this process reads, and report what reading a sample raises."""
    cache.WORTH_BYTES = 0
    dataset = build_dataset(cfg, byte_tokenizer(), seq_len=1 << 20, split="train")
    (entry,) = entries(Path(str(cfg.cache)))
    os.truncate(entry, 4096)
    try:
        dataset[len(dataset) - 1]
    except OSError as error:
        told.put(str(error))


def test_a_cache_truncated_while_it_is_read_fails_with_its_name(tmp_path: Path) -> None:
    context = get_context("fork")
    told = context.SimpleQueue()
    cfg = source(tmp_path, 2000, eval_fraction=0.0)
    process = context.Process(target=read_truncated, args=(cfg, told))
    process.start()
    process.join(60)
    assert process.exitcode == 0  # a mapped file ends the process with SIGBUS instead
    message = told.get()
    (entry,) = entries(tmp_path / "cache")
    assert str(entry) in message
    assert "truncated" in message
    assert len(made_by(cfg).tokens.starts) == 2000  # the next start rebuilds it


def growth(cfg: SftDataConfig, told: Any) -> None:
    """Tell by how much this process grew (memory of its own, not mapped files) while a data set was made and read."""
    words = list(range(200))

    def encode(tokenizer: Any, part: Any) -> list[Example]:
        return [Example(words * 250, [IGNORED] + words[1:] + words * 249) for _ in part]

    def own() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) // 1024

    cache.examples.encode_conversations = encode  # type: ignore[assignment]
    cache._ENCODED_AT_ONCE, cache.WORTH_BYTES, sides._CACHED_CHARACTERS = 4, 0, 0
    tokenizer = byte_tokenizer()
    next(
        TrainBatches(build_dataset(replace(cfg, max_samples=1), tokenizer, seq_len=60_000, split="train"), ONE, seed=0)
    )
    before, seen, done = own(), [], threading.Event()  # everything is imported by now
    watch = threading.Thread(target=lambda: [seen.append(own()) for _ in iter(lambda: done.wait(0.005), True)])
    watch.start()
    dataset = build_dataset(cfg, tokenizer, seq_len=60_000, split="train")
    batches = TrainBatches(dataset, ONE, seed=0)
    next(batches)
    done.set()
    watch.join()
    told.put((max(seen) - before, dataset.facts.tokens * 8 >> 20, batches.state_dict()["sample"]))


@pytest.mark.slow
def test_tokens_need_not_fit_in_memory(tmp_path: Path) -> None:
    context = get_context("spawn")  # a fork of a process with threads may find their locks taken
    told = context.Queue()
    process = context.Process(target=growth, args=(source(tmp_path, 300, eval_fraction=0.0, pack=True), told))
    process.start()
    mebibytes, of_tokens, samples = told.get(timeout=150)
    process.join()
    assert of_tokens > 110
    assert mebibytes < 50
    assert samples == 1
