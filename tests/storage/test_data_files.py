"""Data files and exports in an object store, against a real S3 server."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from components.config.schema.data import SftDataConfig
from components.conversation import Conversation
from components.data.preflight import check_files
from components.data.sources.split import SourceSplit
from components.protocol.errors import ConfigError
from scripts._export.object_output import output_folder, removed_on, upload_output
from tests.storage.conftest import S3

ROWS = [{"prompt": f"question {number}", "response": f"answer {number}"} for number in range(40)]


def lines(rows: list[dict[str, str]]) -> bytes:
    """Return rows as JSONL."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def prompts(cfg: SftDataConfig, is_eval: bool = False) -> list[object]:
    """Return the prompts of a split."""
    return [record.messages[0]["content"] for record in SourceSplit(cfg, is_eval)]  # type: ignore[union-attr]


def test_files_of_a_store_are_those_of_a_folder(s3: S3, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    local = tmp_path / "data"
    local.mkdir()
    parts = {"train-1.jsonl": ROWS[:10], "train-2.jsonl": ROWS[10:30], "test.jsonl": ROWS[30:]}
    for name, rows in parts.items():
        (local / name).write_bytes(lines(rows))
        s3.put(f"data/{name}", lines(rows))
    s3.put("data/notes.md", b"not data")
    (local / "notes.md").write_bytes(b"not data")
    s3.put("data/train2.jsonl", lines(ROWS))  # in no split
    (local / "train2.jsonl").write_bytes(lines(ROWS))
    s3.put("data/empty/", b"")  # as consoles create a folder
    folders = [SftDataConfig(path=path, cache=cache, eval_split="test") for path in ("s3://bucket/data/", str(local))]
    for is_eval in (False, True):
        assert prompts(folders[0], is_eval) == prompts(folders[1], is_eval)
        notes = [SourceSplit(cfg, is_eval).folder_notes for cfg in folders]
        assert notes == [["not read: notes.md, train2.jsonl (in no split)"]] * 2
    one = SftDataConfig(path="s3://bucket/data/train-1.jsonl", cache=cache, eval_fraction=0)
    assert prompts(one) == [row["prompt"] for row in ROWS[:10]]
    assert SourceSplit(one, is_eval=False).folder_notes == []
    assert check_files(folders[0]) == check_files(one) == []


def test_compressed_objects_are_read_whatever_the_case_of_their_names(s3: S3, tmp_path: Path) -> None:
    s3.put("mixed/a.NDJSON.GZ", gzip.compress(lines(ROWS[:1])))
    s3.put("mixed/b.jsonl.zst", pa.Codec("zstd").compress(lines(ROWS[1:2]), asbytes=True))
    s3.put("mixed/c.JSONL", gzip.compress(lines(ROWS[2:3])))
    s3.put("mixed/README.txt", b"no data")
    cfg = SftDataConfig(path="s3://bucket/mixed", cache=str(tmp_path), eval_fraction=0)
    assert prompts(cfg) == [row["prompt"] for row in ROWS[:3]]
    assert SourceSplit(cfg, is_eval=False).folder_notes == ["not read: README.txt (text beside files of rows)"]


def test_an_object_is_downloaded_once_and_again_after_a_change(s3: S3, tmp_path: Path) -> None:
    cfg = SftDataConfig(path="s3://bucket/rows.jsonl", cache=str(tmp_path), eval_fraction=0)
    s3.put("rows.jsonl", lines(ROWS[:5]))
    assert len(prompts(cfg)) == 5
    (copy,) = tmp_path.rglob("rows.jsonl")
    before = copy.stat().st_ino
    assert len(prompts(cfg)) == 5
    assert copy.stat().st_ino == before
    s3.put("rows.jsonl", lines(ROWS[:7]))
    assert len(prompts(cfg)) == 7


def test_all_passes_over_a_source_read_the_same_copies(s3: S3, tmp_path: Path) -> None:
    """The key of cached tokens is a hash of the copies that are found first."""
    s3.put("x.jsonl", lines([{"prompt": "old", "response": "b"}]))
    cfg = SftDataConfig(path="s3://bucket/x.jsonl", cache=str(tmp_path), eval_fraction=0)
    split = SourceSplit(cfg, is_eval=False)
    before = split.identity()
    s3.put("x.jsonl", lines([{"prompt": "new", "response": "b"}]))
    (record,) = split
    assert isinstance(record, Conversation)
    assert record.messages[0]["content"] == "old"
    assert split.identity() == before


def test_absent_and_empty_objects_are_found_before_launch(s3: S3, tmp_path: Path) -> None:
    s3.put("empty.jsonl", b"")
    s3.put("only/test.jsonl", lines(ROWS))
    cases = {
        "s3://bucket/absent.jsonl": "data.path=s3://bucket/absent.jsonl: there is no such object",
        "s3://bucket/empty.jsonl": "data.path=s3://bucket/empty.jsonl: s3://bucket/empty.jsonl is empty",
        "s3://bucket/nothing": "data.path=s3://bucket/nothing: the folder contains no file of a supported format",
        "s3://bucket/only": "data.path=s3://bucket/only: the folder has no split 'train', it has test",
    }
    for path, message in cases.items():
        (problem,) = check_files(SftDataConfig(path=path, cache=str(tmp_path)))
        assert problem.startswith(message)
    with pytest.raises(ConfigError, match=r"data.cache=null: objects of s3://bucket/x.jsonl are copied to it"):
        SftDataConfig(path="s3://bucket/x.jsonl", cache=None)
    with pytest.raises(ConfigError, match="ftp:// are not supported"):
        SftDataConfig(path="ftp://bucket/x.jsonl")


def test_an_export_is_uploaded_with_its_config_last(s3: S3, tmp_path: Path) -> None:
    out = "s3://bucket/models/mine"
    folder = output_folder(out, tmp_path / "unused", tmp_path)
    assert folder.name == "mine"
    folder.mkdir(parents=True)
    contents = {"config.json": b"{}", "model.safetensors": os.urandom(1000), "tokenizer.json": b"[]"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    upload_output(folder, out)
    assert {name: s3.get(f"models/mine/{name}") for name in contents} == contents
    assert list(tmp_path.iterdir()) == []
    times = s3.times("models/mine/")
    assert times["models/mine/config.json"] == max(times.values())
    with pytest.raises(ConfigError, match=f"--out {out}: there are objects below it"):
        output_folder(out, tmp_path / "unused", tmp_path)
    assert output_folder(None, tmp_path / "local", tmp_path) == tmp_path / "local"


def test_an_interrupted_upload_leaves_no_folder(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = "s3://bucket/models/mine"

    errors: list[BaseException] = [OSError("lost"), KeyboardInterrupt()]

    def fail(*_: object) -> None:
        raise errors.pop()

    monkeypatch.setattr("scripts._export.object_output.upload_folder", fail)
    for raised, left in ((KeyboardInterrupt, 0), (ConfigError, 1)):
        folder = output_folder(out, tmp_path / "unused", tmp_path)
        folder.mkdir(parents=True)
        with pytest.raises(raised):
            upload_output(folder, out)
        assert len(list(tmp_path.iterdir())) == left  # the message about a failure names the folder
    with pytest.raises(ZeroDivisionError), removed_on(BaseException, folder, out):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_export_replaces_no_objects_written_meanwhile(s3: S3, tmp_path: Path) -> None:
    out = "s3://bucket/models/mine"
    folder = output_folder(out, tmp_path / "unused", tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    s3.put("models/mine/config.json", b"a stranger's")
    with pytest.raises(ConfigError, match=f"--out {out}: .* objects were written below it .*; the export in {folder}"):
        upload_output(folder, out)
    assert s3.get("models/mine/config.json") == b"a stranger's"


def test_objects_whose_names_no_file_can_have_are_named_and_not_read(s3: S3, tmp_path: Path) -> None:
    s3.put("data/rows.jsonl", lines(ROWS[:3]))
    for name in ("data//rows.jsonl", "data/./rows.jsonl", "data/../rows.jsonl", f"data/{'a' * 300}.jsonl"):
        s3.put(name, lines(ROWS))
    cfg = SftDataConfig(path="s3://bucket/data", cache=str(tmp_path), eval_fraction=0)
    assert prompts(cfg) == [row["prompt"] for row in ROWS[:3]]
    (note,) = SourceSplit(cfg, is_eval=False).folder_notes
    assert note.startswith("not read: ")
    assert "'./rows.jsonl' (no name of a file), '/rows.jsonl' (no name of a file)" in note
    assert check_files(cfg) == []
