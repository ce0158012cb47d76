"""scripts/tokenize_corpus.py with URLs of a corpus and of a store, against a real S3 server."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
from safetensors.numpy import load

from components.data.token_store.corpus import StoreFolder, remove_scratch, scratch_folder
from components.data.token_store.manifest import read_manifest
from components.storage.object_store import ObjectStore
from scripts.tokenize_corpus import main
from tests.distributed.disks import small_disk
from tests.storage.conftest import S3

END = 257
"""End-of-text token of the byte tokenizer."""
STORE = "s3://bucket/store"
GIVEN = ("s3://bucket/corpus", "--tokenizer", "bytes", "--workers", "2")


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def texts_of(name: str, count: int = 20) -> list[str]:
    return [f"{name} row {number} ü数 {'x' * (number % 7)}" for number in range(count)]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_corpus(s3: S3, count: int = 20) -> dict[str, list[str]]:
    """Write three objects and some that are not read; return the texts by name of the shard."""
    texts = {name: texts_of(name, count) for name in ("a.jsonl", "b.jsonl.gz", "more__c.jsonl")}
    s3.put("corpus/a.jsonl", lines(texts["a.jsonl"]))
    s3.put("corpus/b.jsonl.gz", gzip.compress(lines(texts["b.jsonl.gz"])))
    s3.put("corpus/more/c.jsonl", lines(texts["more__c.jsonl"]))
    s3.put("corpus/notes.md", b"no data")
    return {f"{name}.safetensors": each for name, each in texts.items()}


def documents_of(s3: S3, name: str) -> list[str]:
    """Return the documents of a shard in the store, decoded without the library."""
    stored = load(s3.get(f"store/{name}"))
    ids, found, begin = stored["ids"].tolist(), [], 0
    for end in stored["ends"].tolist():
        assert ids[end - 1] == END
        found.append(bytes(ids[begin : end - 1]).decode())
        begin = end
    assert begin == len(ids)
    return found


def has_texts(s3: S3, texts: dict[str, list[str]]) -> bool:
    """Return whether the store has these documents, each once and in this order, and a manifest of its shards."""
    manifest = read_manifest(STORE)
    assert [shard.path for shard in manifest.shards] == sorted(texts)
    assert s3.names("store/") == [f"store/{name}" for name in sorted([*texts, "manifest.json"])]
    return {name: documents_of(s3, name) for name in texts} == texts


def downloads(s3: S3) -> Counter[str]:
    """Return how often each object of the corpus was requested."""
    return Counter({name: count for name, count in s3.requests().items() if name.startswith("GET /bucket/corpus/")})


def test_objects_become_shards_and_are_downloaded_once(
    faulty_s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty_s3.faults(share=0.0)
    texts = write_corpus(faulty_s3)
    scratch = tmp_path / "scratch"
    given = (*GIVEN, "--out", STORE, "--scratch", scratch)
    assert run(*given) == 0
    assert has_texts(faulty_s3, texts)
    assert "s3://bucket/corpus: not read: notes.md\n" in capsys.readouterr().out
    first = downloads(faulty_s3)
    assert sorted(first.values()) == [1, 1, 1]
    times = faulty_s3.times("store/")
    assert times["store/manifest.json"] == max(times.values())
    assert run(*given) == 0
    assert downloads(faulty_s3) == first, "unchanged objects were downloaded again"
    assert capsys.readouterr().out.count("20 documents, kept") == 3
    texts["a.jsonl.safetensors"] = texts_of("changed")
    faulty_s3.put("corpus/a.jsonl", lines(texts["a.jsonl.safetensors"]))
    assert run(*given) == 0
    assert downloads(faulty_s3) - first == {"GET /bucket/corpus/a.jsonl": 1}
    assert has_texts(faulty_s3, texts)
    assert list(scratch.iterdir()) == []
    local = tmp_path / "local"
    assert run(*GIVEN, "--out", local) == 0
    for name in texts:
        assert (local / name).read_bytes() == faulty_s3.get(f"store/{name}")
    assert sorted(each.name for each in local.iterdir()) == sorted([*texts, "manifest.json"])


def test_tasks_of_an_array_share_a_store_behind_a_url(s3: S3, tmp_path: Path) -> None:
    texts = write_corpus(s3)
    for task in (2, 1):
        assert run(*GIVEN, "--out", STORE, "--scratch", tmp_path, "--shard", f"{task}/2") == 0
        assert "store/manifest.json" not in s3.names()
    assert run("--out", STORE, "--index") == 0
    assert has_texts(s3, texts)


def killed_when(condition: Callable[[], object], scratch: Path) -> None:
    """Start the command in a process group of its own, and kill the group once the condition holds."""

    def begin() -> None:
        os.setsid()
        os._exit(run(*GIVEN, "--out", STORE, "--scratch", scratch))

    process = get_context("fork").Process(target=begin)
    process.start()
    deadline, holds = time.monotonic() + 60, False
    while not holds:
        with suppress(FileNotFoundError):  # a folder was removed during the search for a file
            holds = bool(condition())
        assert holds or process.is_alive(), "the command ended before it could be killed"
        assert time.monotonic() < deadline
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    process.join()


def test_each_row_is_stored_once_however_often_the_command_is_killed(s3: S3, tmp_path: Path) -> None:
    texts = write_corpus(s3, 2500)
    scratch = tmp_path / "scratch"
    points: list[Callable[[], object]] = [
        lambda: any(scratch.glob("*/a.jsonl")),  # an object was, or is being, downloaded
        lambda: any(scratch.glob("*/.*.safetensors.tmp-*")),  # a shard is being assembled
        lambda: any(name.endswith(".safetensors") for name in s3.names("store/")),
    ]
    for point in points:
        killed_when(point, scratch)
        assert "store/manifest.json" not in s3.names()
    assert list(scratch.iterdir()) != [], "nothing was left, so that this test shows nothing"
    with scratch_folder(scratch) as live:
        assert run(*GIVEN, "--out", STORE, "--scratch", scratch) == 0
        assert list(scratch.iterdir()) == [live]  # of another command, which still runs
    assert has_texts(s3, texts)


def test_folders_of_others_are_left_in_scratch(tmp_path: Path) -> None:
    (tmp_path / ".tokenize_corpus.tmp-mine").mkdir()
    (tmp_path / ".tokenize_corpus.tmp-0123456789abcdef").mkdir()
    (tmp_path / ".a.tmp-0123456789abcdef").touch()
    remove_scratch(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        ".a.tmp-0123456789abcdef",
        ".tokenize_corpus.tmp-mine",
    ]


def test_an_object_that_changes_while_it_is_read_is_an_error(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_corpus(s3)
    download = ObjectStore.download

    def change(store: ObjectStore, source: object, file: Path) -> None:
        download(store, source, file)  # type: ignore[arg-type]
        if file.name == "a.jsonl":
            s3.put("corpus/a.jsonl", lines(texts_of("other")))

    monkeypatch.setattr(ObjectStore, "download", change)
    assert run(*GIVEN, "--out", STORE, "--scratch", tmp_path) == 2
    assert "s3://bucket/corpus/a.jsonl: was changed while it was read; start again" in capsys.readouterr().err
    assert s3.names("store/") == [f"store/{name}" for name in sorted(texts) if not name.startswith("a.")]
    assert list(tmp_path.iterdir()) == []


def test_a_small_disk_is_refused_and_a_full_one_leaves_no_shard(
    s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounts a small disk: needs root")
    s3.put("corpus/large.jsonl", lines(["x" * 1000] * 800))
    s3.put("corpus/small.jsonl", lines(["one"]))
    dense = gzip.compress(lines(["x" * 1000] * 3000))  # 20 times as much text as the estimate assumes
    with small_disk(tmp_path / "disk", "2m") as disk:
        given = ("--tokenizer", "bytes", "--out", STORE, "--scratch", disk.folder)
        assert run("s3://bucket/corpus", *given) == 2
        message = capsys.readouterr().err
        assert f"--scratch {disk.folder}: " in message
        assert "files at a time with their shards need about 3," in message
        assert "(s3://bucket/corpus/large.jsonl); split the largest files, or set --scratch" in message
        assert s3.names("store/") == []
        s3.put("corpus/large.jsonl.gz", dense)
        s3.delete("corpus/large.jsonl")
        assert run("s3://bucket/corpus", *given) == 1
        assert "s3://bucket/corpus/large.jsonl.gz: " in (message := capsys.readouterr().err)
        assert "No space left on device" in message
        assert "Traceback" not in message
        assert s3.names("store/") == ["store/small.jsonl.safetensors"]
        assert list(disk.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("s3://no-such-bucket/x --out out", "INPUT=s3://no-such-bucket/x: the folder contains no file"),
        ("s3://bucket/absent.jsonl --out out", "INPUT=s3://bucket/absent.jsonl: there is no such object"),
        ("s3://bucket/corpus --split test --out out", "INPUT=s3://bucket/corpus: the folder contains no file"),
        ("s3://bucket/good.jsonl --out s3://no-such-bucket/store",
         "s3://no-such-bucket/store: there is no s3://no-such-bucket; create it, or choose another folder"),
        ("s3://bucket/good.jsonl --out ftp://host/store", "--out=ftp://host/store: URLs with ftp:// are not supported"),
        ("ftp://host/good.jsonl --out out", "INPUT=ftp://host/good.jsonl: URLs with ftp:// are not supported"),
        ("s3://bucket/good.jsonl --out out --scratch file", "--scratch file: is not a folder"),
        ("s3://bucket/good.jsonl --out s3://bucket/foreign", "s3://bucket/foreign: manifest.json exists and is no"),
        ("s3://bucket/good.jsonl --out s3://bucket/shards",
         "s3://bucket/shards/x.safetensors: is not a shard of a tokenized corpus"),
        ("s3://bucket/good.jsonl --bad-rows drop --out s3://bucket/old",
         "s3://bucket/old: good.jsonl.safetensors was written with bad rows refuse, not drop"),
        ("--index --out s3://bucket/none", "s3://bucket/none: has no shards of a tokenized corpus"),
    ],
)  # fmt: skip
def test_invalid_urls_are_rejected(
    arguments: str,
    message: str,
    s3: S3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    s3.put("good.jsonl", lines(["one"]))
    s3.put("foreign/manifest.json", b"{}")
    s3.put("shards/x.safetensors", b"x" * 100)
    if "old" in arguments:
        assert run("s3://bucket/good.jsonl", "--tokenizer", "bytes", "--out", "s3://bucket/old") == 0
    before = s3.names()
    capsys.readouterr()
    assert run("--tokenizer", "bytes", *arguments.split()) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1
    assert s3.names() == before
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_missing_credentials_are_reported_before_anything_is_written(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.jsonl").write_bytes(lines(["one"]))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for given, argument in (
        ("s3://bucket/corpus --out out", "INPUT="),
        ("good.jsonl --out s3://bucket/store", "--out "),
    ):
        monkeypatch.chdir(tmp_path)
        assert run("--tokenizer", "bytes", *given.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(argument)
        assert "Unable to locate credentials" in line
    assert [each.name for each in tmp_path.iterdir()] == ["good.jsonl"]


def test_headers_are_read_by_ranges(faulty_s3: S3, tmp_path: Path) -> None:
    """A shard whose header is longer than the first range; no request returns a whole shard of more than that."""
    faulty_s3.faults(share=0.0)
    faulty_s3.put("corpus/a.jsonl", lines(["x" * 1000] * 100))
    assert run(*GIVEN, "--out", STORE, "--scratch", tmp_path) == 0
    shard = StoreFolder(STORE).shard("a.jsonl.safetensors")
    assert shard is not None
    assert (shard.entry.documents, shard.entry.tokens) == (100, 100_100)
    stored = faulty_s3.get("store/a.jsonl.safetensors")
    assert shard.entry.bytes == len(stored)
    assert StoreFolder(STORE)._open(Path("a.jsonl.safetensors")).read(1000, 100_000) == stored[100_000:101_000]
