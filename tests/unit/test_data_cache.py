"""The disk cache of tokenized samples: equal to fresh ones, never stale, built once, and cache errors are not fatal."""

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
from safetensors.numpy import load_file, save_file

from components.config.schema.data import Overlong, SftDataConfig
from components.data import cache
from components.data.batches import BatchPlan, TrainBatches
from components.data.dataset import Dataset, Facts
from components.data.examples import IGNORED, Example, encode_conversations
from components.data.loading import build_dataset
from components.data.sources import split as split_module
from components.data.sources.split import SourceSplit
from components.data.token_store.shards import IdColumn
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError
from components.storage import tensor_files
from components.storage.tensor_files import OpenFile

ONE = BatchPlan(global_batch_size=1, micro_batch_size=1)


def write_source(folder: Path, count: int = 40, answer: str = "answer", **values: Any) -> SftDataConfig:
    """Write a file of prompts and responses; return its config, which holds out 5 % and caches tokens in `folder`."""
    file = folder / "source.jsonl"
    rows = (
        {"prompt": f"question {i} " * (1 + i % 7), "response": f"{answer} {i} " * (1 + i % 7)} for i in range(count)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SftDataConfig(path=str(file), **{"cache": str(folder / "cache"), **values})


def tokenized(cfg: SftDataConfig, tokenizer: Any = None, is_eval: bool = False) -> cache.TokenizedSplit:
    return cache.tokenize(SourceSplit(cfg, is_eval), cfg, tokenizer or byte_tokenizer(), 1 << 20)


@pytest.fixture(autouse=True)
def cache_small_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_WORTH_BYTES", 0)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of conversations tokenized by each call."""
    counted: list[int] = []

    def encode(tokenizer: Any, conversations: Any, **options: Any) -> Any:
        counted.append(len(conversations))
        return encode_conversations(tokenizer, conversations, **options)

    monkeypatch.setattr(cache.examples, "encode_conversations", encode)
    return counted


def same(one: cache.TokenizedSplit, other: cache.TokenizedSplit) -> bool:
    arrays = zip(one.tokens[:4], other.tokens[:4], strict=True)
    return one[1:] == other[1:] and all(np.array_equal(a[:], b[:]) for a, b in arrays)


def age(file: Path, seconds: float = 60.0) -> None:
    """Set the time of modification back; numbers about files that were modified in the last seconds are not kept."""
    os.utime(file, (time.time() - seconds,) * 2)


def entries(folder: Path) -> list[Path]:
    files = [file for file in sorted(folder.iterdir()) if not file.name.endswith(".known.json")]
    assert all(file.suffix == ".safetensors" for file in files)  # no lock and no temporary file is left
    return files


def test_cached_samples_equal_fresh_samples(tmp_path: Path, counts: list[int]) -> None:
    cfg = write_source(tmp_path, cache=str(tmp_path / "new" / "cache"))
    expected = tokenized(replace(cfg, cache=None))
    assert len(expected.prompts) == len(expected.tokens.starts) == 38
    assert same(tokenized(cfg), expected)
    folder = tmp_path / "new" / "cache"
    assert folder.stat().st_mode & 0o777 == 0o700
    cached = tokenized(cfg)
    assert same(cached, expected)
    assert isinstance(cached.tokens.ids, IdColumn)  # read on demand, not loaded
    assert counts == [38, 38]
    (entry,) = entries(folder)
    stored = load_file(entry)
    assert sorted(stored) == ["ends", "ids", "mask"]
    assert np.array_equal(stored["ids"], expected.tokens.ids)
    assert np.array_equal(stored["mask"], expected.tokens.labels[:] != IGNORED)
    assert len(tokenized(cfg, is_eval=True).tokens.starts) == 2
    assert counts == [38, 38, 2]


def test_unused_entries_are_removed_when_another_entry_is_written(tmp_path: Path, counts: list[int]) -> None:
    cfg = write_source(tmp_path, 200)
    first = tokenized(cfg)
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
    known = entry.with_suffix(".known.json")
    tokenized(cfg)  # stores what it read, and the next use updates the time of that file
    assert known.stat().st_mtime > now - 60
    os.utime(known, (now - 40 * day,) * 2)
    tokenized(cfg)
    assert known.stat().st_mtime > now - 60
    tokenized(cfg, is_eval=True)
    new_entries = {file.name for file in folder.iterdir()} - ages.keys() - {known.name}
    assert len(new_entries) == 1
    assert {name for name in ages if not (folder / name).exists()} == {"0" * 32 + ".safetensors", f".{'2' * 32}.tmp"}
    for file in (entry, known):
        os.utime(file, (now - 31 * day,) * 2)
    (folder / new_entries.pop()).unlink()
    tokenized(cfg, is_eval=True)
    assert not entry.exists()
    assert not known.exists()
    assert same(first, tokenized(replace(cfg, cache=None)))  # a removed entry that is still open remains readable


def test_cache_of_an_earlier_version_is_rebuilt_once_and_said(tmp_path: Path, counts: list[int], caplog: Any) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    columns = {"ends": np.arange(3), "ids": np.zeros(2, np.int32), "labels": np.zeros(2, np.int32)}
    save_file(columns, folder / f"{'0' * 32}.safetensors", metadata={"summary": "{}", "hash": "0" * 32})
    cfg, line = write_source(tmp_path), f"data.cache={folder}: its entries are of an earlier version"
    tokenized(cfg)
    assert caplog.text.count(line) == 1
    tokenized(cfg)
    tokenized(cfg, is_eval=True)
    assert caplog.text.count(line) == 1
    assert counts == [38, 2]


def test_whatever_changes_the_tokens_changes_the_key(tmp_path: Path, counts: list[int], monkeypatch: Any) -> None:
    cfg = write_source(tmp_path)

    def changed(**values: Any) -> Any:
        tokenizer = byte_tokenizer()
        for name, value in values.items():
            setattr(tokenizer, name, value)
        return tokenizer

    template = byte_tokenizer().chat_template
    extended = byte_tokenizer()
    extended.add_tokens(["question"])
    tokenized(cfg)
    tokenized(write_source(tmp_path, answer="other"))
    write_source(tmp_path)
    tokenized(cfg, changed(chat_template=template.replace("<|im_end|>", "<|im_end|>!")))
    tokenized(cfg, changed(eos_token="<|pad|>"))
    tokenized(cfg, extended)
    for values in ({"max_samples": 30}, {"eval_fraction": 0.5}, {"system_prompt": "Answer."},
                   {"prompt_column": "response", "response_column": "prompt"}):  # fmt: skip
        tokenized(replace(cfg, **values))
    fewer = [tuple(name for name in cache.CODE if name != left_out) for left_out in cache.CODE]
    versions = [("version", lambda package: "0.0"), ("_FORMAT", cache._FORMAT + 1)]
    for name, value in (*versions, *(("CODE", each) for each in fewer)):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, value)
            tokenized(cfg)
    assert len(counts) == len(entries(tmp_path / "cache")) == 14
    moved = shutil.copy(cfg.path, tmp_path / "moved.jsonl")
    padded = byte_tokenizer()
    padded(["a", "bc"], padding=True, truncation=True, max_length=2)  # per-call settings must not change the key
    tokenized(replace(cfg, path=str(moved), overlong=Overlong.drop, pack=True, max_eval_samples=1), padded)
    assert len(counts) == 14


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "header"])
def test_damaged_entry_is_rebuilt(damage: str, tmp_path: Path, counts: list[int], caplog: Any) -> None:
    cfg = write_source(tmp_path)
    expected = tokenized(replace(cfg, cache=None))
    tokenized(cfg)
    (entry,) = entries(tmp_path / "cache")
    content = bytearray(entry.read_bytes())
    content[-5] ^= 1
    damaged = {"flip": content, "cut": content[: len(content) // 2], "empty": b"", "header": b"\xff" * 64}
    entry.write_bytes(damaged[damage])
    assert same(tokenized(cfg), expected)
    assert f"{entry} is damaged" in caplog.text
    assert len(counts) == 3
    assert same(tokenized(cfg), expected)
    assert len(counts) == 3


def test_start_reads_no_token_of_an_unchanged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for truncated samples. A changed file is read again, and a changed source is tokenized again."""
    read = 0
    original = OpenFile.read_into

    def counted(file: OpenFile, buffer: memoryview, offset: int) -> None:
        nonlocal read
        read += len(buffer)
        original(file, buffer, offset)

    monkeypatch.setattr(OpenFile, "read_into", counted)
    cfg = write_source(tmp_path, 2000)

    def start(seq_len: int) -> tuple[int, list[Any]]:
        nonlocal read
        read = 0
        dataset = Dataset(
            tokenized(cfg).tokens,
            byte_tokenizer(),
            facts=Facts(source="x"),
            seq_len=seq_len,
            overlong=Overlong.truncate,
        )
        return read, [dataset.facts.target_tokens, dataset.fingerprint, len(dataset)]

    monkeypatch.setattr(tensor_files, "_RECENT_SECONDS", 30.0)  # on a busy machine, more than this test takes
    _, expected = start(512)
    _, truncated = start(20)
    (entry,) = entries(tmp_path / "cache")
    for file in (entry, Path(cfg.path)):
        age(file)
    first, found = start(512)
    assert found == expected
    assert first > entry.stat().st_size  # the hash of the content, and the numbers of the samples
    again, found = start(512)
    assert found == expected
    # The ends of the samples, and the header with 100 prompts.
    assert again < 8 * 2001 + 50_000 < entry.stat().st_size / 8
    start(20)
    short, found = start(20)
    assert found == truncated != expected
    assert short < entry.stat().st_size / 2  # targets of long samples decide where they end
    source = Path(cfg.path)
    with monkeypatch.context() as patch:
        patch.setattr(SourceSplit, "identity", lambda split: pytest.fail("the source is read"))
        start(512)
    source.write_text(source.read_text().replace("answer", "ANSWER"))
    age(source, 50)
    assert start(512)[1] != expected


def test_unwritable_cache_folder_is_only_a_warning(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    home = "~no-such-user/cache: Could not determine home directory"
    for warning in (f"{tmp_path}/file/below", "/proc/nowhere", home):
        caplog.clear()
        assert len(tokenized(write_source(tmp_path, cache=warning.partition(":")[0])).tokens.starts) == 38
        assert f"data.cache={warning}" in caplog.text


def test_small_source_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_WORTH_BYTES", 1_000_000)
    tokenized(write_source(tmp_path))
    assert not (tmp_path / "cache").exists()


def test_source_that_changes_while_it_is_read_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = write_source(tmp_path)

    def encode(tokenizer: Any, conversations: Any, **options: Any) -> Any:
        write_source(tmp_path, answer="other")
        return encode_conversations(tokenizer, conversations, **options)

    monkeypatch.setattr(cache.examples, "encode_conversations", encode)
    with pytest.raises(ConfigError, match="was changed while it was read"):
        tokenized(cfg)
    assert not entries(tmp_path / "cache")


def tokenize_at_event(cfg: SftDataConfig, reports: Any, start: Any) -> None:
    """Report this process's pid for each batch that it tokenizes, then the fingerprint of the samples."""

    def encode(tokenizer: Any, conversations: Any, **options: Any) -> Any:
        reports.put(os.getpid())
        return encode_conversations(tokenizer, conversations, **options)

    cache.examples.encode_conversations = encode  # type: ignore[assignment]
    start.wait()
    reports.put(tokenized(cfg).tokens.fingerprint)


def test_only_one_of_concurrent_processes_tokenizes(tmp_path: Path) -> None:
    context = get_context("fork")
    reports, start = context.Queue(), context.Event()
    cfg = write_source(tmp_path, 2500, eval_fraction=0.0)
    processes = [context.Process(target=tokenize_at_event, args=(cfg, reports, start)) for _ in range(4)]
    for each in processes:
        each.start()
    start.set()
    received = [reports.get(timeout=60) for _ in range(3 + 4)]  # batches of at most 1,000, and four fingerprints
    for each in processes:
        each.join()
        assert each.exitcode == 0
    assert reports.empty()
    assert len({each for each in received if isinstance(each, int)}) == 1
    assert len({each for each in received if isinstance(each, str)}) == 1
    assert len(entries(tmp_path / "cache")) == 1


def read_truncated_cache(cfg: SftDataConfig, reports: Any) -> None:
    """Truncate a cache entry that this process has open, and report the error raised when a sample is read."""
    cache._WORTH_BYTES = 0
    dataset = build_dataset(cfg, byte_tokenizer(), seq_len=1 << 20, split="train")
    (entry,) = entries(Path(str(cfg.cache)))
    os.truncate(entry, 4096)
    try:
        dataset[len(dataset) - 1]
    except OSError as error:
        reports.put(str(error))


def test_reading_a_truncated_cache_raises_an_error_with_its_path(tmp_path: Path) -> None:
    context = get_context("fork")
    reports = context.SimpleQueue()
    cfg = write_source(tmp_path, 2000, eval_fraction=0.0)
    process = context.Process(target=read_truncated_cache, args=(cfg, reports))
    process.start()
    process.join(60)
    assert process.exitcode == 0  # with a memory-mapped file it would be killed by SIGBUS
    message = reports.get()
    (entry,) = entries(tmp_path / "cache")
    assert str(entry) in message
    assert "truncated" in message
    assert len(tokenized(cfg).tokens.starts) == 2000  # the next start rebuilds it


def report_memory_growth(cfg: SftDataConfig, reports: Any) -> None:
    """Report the growth of anonymous memory (without mapped files) while a dataset is built and read."""
    tokens = list(range(200))

    def encode(tokenizer: Any, conversations: Any, **options: Any) -> list[Example]:
        return [Example(tokens * 250, [IGNORED] + tokens[1:] + tokens * 249) for _ in conversations]

    def anon_mib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) // 1024

    cache.examples.encode_conversations = encode  # type: ignore[assignment]
    cache._ENCODED_AT_ONCE, cache._WORTH_BYTES, split_module._CACHED_CHARACTERS = 4, 0, 0
    tokenizer = byte_tokenizer()
    next(
        TrainBatches(build_dataset(replace(cfg, max_samples=1), tokenizer, seq_len=60_000, split="train"), ONE, seed=0)
    )
    before, samples, done = anon_mib(), [], threading.Event()  # measured after all imports
    watch = threading.Thread(target=lambda: [samples.append(anon_mib()) for _ in iter(lambda: done.wait(0.005), True)])
    watch.start()
    dataset = build_dataset(cfg, tokenizer, seq_len=60_000, split="train")
    batches = TrainBatches(dataset, ONE, seed=0)
    next(batches)
    done.set()
    watch.join()
    reports.put((max(samples) - before, dataset.facts.tokens * 8 >> 20, batches.state_dict()["sample"]))


@pytest.mark.slow
def test_memory_growth_is_much_less_than_the_size_of_the_tokens(tmp_path: Path) -> None:
    context = get_context("spawn")  # a forked child could inherit locks held by threads
    reports = context.Queue()
    process = context.Process(
        target=report_memory_growth, args=(write_source(tmp_path, 300, eval_fraction=0.0, pack=True), reports)
    )
    process.start()
    mebibytes, of_tokens, samples = reports.get(timeout=150)
    process.join()
    assert of_tokens > 110
    assert mebibytes < 50
    assert samples == 1
