"""Files of a folder and datasets of the hub: what is read, the names of the rest, and content against the name."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.config.schema.data import (
    ChatDataConfig,
    LabelsDataConfig,
    PreferencesDataConfig,
    SftDataConfig,
    TextDataConfig,
)
from components.data.labels import build_scored
from components.data.loading import build_dataset
from components.data.preflight import check_files
from components.data.sources.columns import answer_configs, each_answer
from components.data.sources.rows import BadRowReport, train_location
from components.data.sources.split import columns_at, rows_of
from components.models.tokenizer import byte_tokenizer
from tests.suites import in_torture
from tests.unit.test_data_files import ROWS, problems, sample_texts, write


def row(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "response": "r"}


def zstd(content: bytes) -> bytes:
    """Return content in two frames, as parallel compressors write it."""
    codec = pa.Codec("zstd")
    return b"".join(codec.compress(part, asbytes=True) for part in (content[:10], content[10:]))


def lines(*prompts: str) -> bytes:
    return "".join(json.dumps(row(prompt)) + "\n" for prompt in prompts).encode()


def read(cfg: SftDataConfig, split: str = "train") -> tuple[list[str], str]:
    """Return the prompts of a split, sorted, and its line in the banner."""
    assert check_files(cfg) == []
    facts = build_dataset(cfg, byte_tokenizer(), seq_len=100, split=split).facts
    return sorted(text.partition("\n")[0] for text in sample_texts(cfg, split)), str(facts)


def test_every_readable_file_of_a_folder_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    contents = {
        "a.jsonl": lines("a"),
        "b.jsonl.zst": zstd(lines("b")),
        "c.JSONL": lines("c"),
        "d.ndjson": lines("d"),
        "sub/e.Csv": b"prompt;response\ne;r\n",
        "f.NDJSON.GZ": gzip.compress(lines("f")),
        "a.csv": b"prompt,response\ng,r\n",
        **dict.fromkeys(["LICENSE", "README.md", "README.txt", "old.jsonl.bak", "x.jsonl.bz2", ".h.jsonl"], b"no data"),
        **dict.fromkeys([".gitattributes", ".git/x.jsonl"], b"no data"),
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    prompts, banner = read(SftDataConfig(path=str(tmp_path), eval_fraction=0))
    assert prompts == list("abcdefg")
    assert (
        "; not read: .h.jsonl, LICENSE, README.md, README.txt (text beside files of rows), old.jsonl.bak, x.jsonl.bz2; "
        "read although their names differ only in the format: a.csv, a.jsonl" in banner
    )
    texts = TextDataConfig(path=str(tmp_path), text_column="prompt", eval_fraction=0)
    assert sorted(sample_texts(texts)) == [f"{letter}</s>" for letter in "abcdefg"]


def test_many_files_that_are_not_read_are_counted(tmp_path: Path) -> None:
    for number in range(25):
        (tmp_path / f"{number:02}.xlsx").touch()
    listed = ", ".join(f"{number:02}.xlsx" for number in range(20)) + ", and 5 more"
    cfg = SftDataConfig(path=str(tmp_path), eval_fraction=0)
    assert check_files(cfg)[0].endswith(f"; it has {listed}")
    (tmp_path / "a.jsonl").write_bytes(lines("a"))
    assert f"; not read: {listed}" in read(cfg)[1]


def test_text_files_are_read_in_a_folder_without_files_of_rows(tmp_path: Path) -> None:
    for name in ("one.txt", "TWO.TXT", "three.txt.gz"):
        content = name.encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (tmp_path / "dataset_info.json").write_text("{}")  # of the package datasets
    cfg = TextDataConfig(path=str(tmp_path), eval_fraction=0)
    assert sorted(sample_texts(cfg)) == ["TWO.TXT</s>", "one.txt</s>", "three.txt.gz</s>"]
    assert "; not read: dataset_info.json" in read(cfg)[1]


def test_files_of_unused_splits_are_named_and_names_of_splits_may_be_in_capitals(tmp_path: Path) -> None:
    for name in ("Train-1.jsonl", "TEST.jsonl", "Validation/x.jsonl", "other.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines(name))
    prompts, banner = read(SftDataConfig(path=str(tmp_path), eval_fraction=0))
    assert prompts == ["Train-1.jsonl"]
    unread = "TEST.jsonl (split test), Validation/x.jsonl (split validation), other.jsonl (in no split)"
    assert f"; not read: {unread}" in banner
    for held_out in ({"eval_split": "test"}, {"eval_path": str(tmp_path / "TEST.jsonl")}):
        prompts, banner = read(SftDataConfig(path=str(tmp_path), **held_out))
        assert prompts == ["Train-1.jsonl"]
        assert "; not read: Validation/x.jsonl (split validation), other.jsonl (in no split)" in banner
    assert read(SftDataConfig(path=str(tmp_path), eval_split="test"), "eval")[0] == ["TEST.jsonl"]


def test_files_of_the_held_out_split_are_not_trained_on_whatever_its_name(tmp_path: Path) -> None:
    for name in ("a.jsonl", "mine.jsonl"):
        (tmp_path / name).write_bytes(lines(name))
    cfg = SftDataConfig(path=str(tmp_path), eval_split="mine")
    (problem,) = check_files(cfg)
    assert problem.startswith(f"data.path={tmp_path}: the folder has no split 'train', it has mine;")
    (tmp_path / "a.jsonl").rename(tmp_path / "train.jsonl")
    assert [read(cfg, split)[0] for split in ("train", "eval")] == [["a.jsonl"], ["mine.jsonl"]]
    assert "not read" not in read(cfg)[1]
    (tmp_path / "mine.jsonl").rename(tmp_path / "train_small.jsonl")
    assert read(SftDataConfig(path=str(tmp_path), eval_fraction=0))[0] == ["a.jsonl", "mine.jsonl"]
    cfg = SftDataConfig(path=str(tmp_path), eval_split="train_small")
    assert [read(cfg, split)[0] for split in ("train", "eval")] == [["a.jsonl"], ["mine.jsonl"]]


def test_links_to_folders_are_followed_and_broken_ones_are_reported(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.jsonl").write_bytes(lines("b"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines("a"))
    (folder / "more").symlink_to("../elsewhere")
    (folder / "again").symlink_to(".")
    cfg = SftDataConfig(path=str(folder), eval_fraction=0)
    assert read(cfg)[0] == ["a", "b"]
    (folder / "c.jsonl").symlink_to("absent")
    assert check_files(cfg) == [f"data.path={folder}: c.jsonl cannot be read: No such file or directory"]


def test_folder_that_cannot_be_listed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("a"))

    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", denied)
    assert check_files(SftDataConfig(path=str(tmp_path))) == [f"{tmp_path}: cannot be read: Permission denied"]


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "gzip.jsonl": gzip.compress,
    "gzip.csv": gzip.compress,
    "zstd.json": zstd,
    "plain.jsonl.gz": bytes,
    "zstd.jsonl.gz": zstd,
    "metadata.jsonl.zst": lambda content: b"\x50\x2a\x4d\x18\x01\x00\x00\x00x" + zstd(content),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_compression_is_recognized_by_the_content(tmp_path: Path, name: str) -> None:
    content = b"prompt,response\na,r\nb,r\n" if ".csv" in name else lines("a", "b")
    (tmp_path / name).write_bytes(CONTENTS[name](content))
    assert read(SftDataConfig(path=str(tmp_path / name), eval_fraction=0))[0] == ["a", "b"]


def test_content_of_another_format_is_read_or_rejected_by_its_name(tmp_path: Path) -> None:
    table = write(tmp_path / "x.parquet", [row("a"), row("b")])
    for name in ("x.jsonl", "X.PARQUET"):
        (tmp_path / name).write_bytes(table.read_bytes())
        assert read(SftDataConfig(path=str(tmp_path / name), eval_fraction=0))[0] == ["a", "b"]
    for name, content, reason in (
        ("y.jsonl", bz2.compress(lines("a")), "is bzip2, which is not read; convert or decompress the file"),
        (
            "y.csv",
            b"PK\x03\x04...",
            "is a ZIP archive (.xlsx, .npz), which is not read; convert or decompress the file",
        ),
        ("y.jsonl.zst", zstd(lines("a" * 1000))[:-4], "cannot be read: Truncated compressed stream"),
    ):
        (tmp_path / name).write_bytes(content)
        cfg = SftDataConfig(path=str(tmp_path / name))
        assert check_files(cfg) == problems(cfg) == [f"{tmp_path / name}: {reason}"]


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("x.csv", 'prompt;response\n"a;b";"1,5"\nc;r\n', ["a;b", "c"]),
        ("x.csv", "prompt;response;score, from 0\na, b;r;1\n", ["a, b"]),
        ("x.csv", "prompt\tresponse\na,b\tr\n", ["a,b"]),
        ("x.tsv", "prompt;response\na;r\n", ["a"]),
        ("x.csv", "prompt|response\na,b|r\n", ["a,b"]),
        ("x.csv", '"prompt","response","a;b;c;d"\nx;y,r,z\n', ["x;y"]),
    ],
)
def test_separator_is_that_of_the_header(tmp_path: Path, name: str, content: str, prompts: list[str]) -> None:
    (tmp_path / name).write_text(content)
    assert read(SftDataConfig(path=str(tmp_path / name), eval_fraction=0))[0] == prompts


def test_two_columns_of_one_name_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    columns = [pa.array(["a"]), pa.array(["good"]), pa.array(["bad"])]
    pq.write_table(pa.table(columns, names=["prompt", "response", "response"]), file)
    rejected = "has the column 'response' more than once; rename one"
    assert problems(SftDataConfig(path=str(file))) == [f"{file}: {rejected}"]
    twice = '{"prompt": "a", "response": "good", "response": "bad"}'
    reason = "JSON that cannot be read (an object has the key 'response' more than once; rename one)"
    for name, content in (("x.jsonl", f"{twice}\n"), ("x.json", f"[{twice}]")):
        (tmp_path / name).write_text(content)
        assert reason in problems(SftDataConfig(path=str(tmp_path / name)))[0]


def saved(folder: Path) -> datasets.Dataset:
    """Save rows as the package datasets does, as one data set and with a folder per split."""
    datasets.disable_progress_bars()
    rows = [{**row(f"p{i}"), "label": i % 2} for i in range(4)]
    features = datasets.Features(
        prompt=datasets.Value("string"),
        response=datasets.Value("string"),
        label=datasets.ClassLabel(names=["no", "yes"]),
    )
    made = datasets.Dataset.from_list(rows, features=features)
    made.save_to_disk(folder / "one", num_shards=2)
    splits = {"train": made.select([0]), "train_sft": made.select([1]), "test": made.select([2])}
    datasets.DatasetDict(splits).save_to_disk(folder / "splits")
    return made


def test_folders_that_datasets_saved_are_read(tmp_path: Path) -> None:
    saved(tmp_path)
    shard = tmp_path / "one" / "data-00001-of-00002.arrow"
    (shard.parent / "cache-1.arrow").write_bytes(shard.read_bytes())  # the result of a map
    prompts, banner = read(SftDataConfig(path=str(tmp_path / "one"), eval_fraction=0))
    assert prompts == ["p0", "p1", "p2", "p3"]
    assert "; not read: cache-1.arrow" in banner
    assert "state.json" not in banner
    assert read(SftDataConfig(path=str(shard), eval_fraction=0))[0] == ["p2", "p3"]
    cfg = SftDataConfig(path=str(tmp_path / "splits"), eval_split="test")
    assert read(cfg)[0] == ["p0"]
    prompts, banner = read(cfg, "eval")
    assert prompts == ["p2"]
    assert "; not read: train_sft/data-00000-of-00001.arrow (split train_sft)" in banner
    (problem,) = check_files(SftDataConfig(path=str(tmp_path / "splits"), split="validation"))
    assert "has no split 'validation', it has test, train, train_sft;" in problem


def test_numbers_of_named_classes_have_the_names_of_their_source(tmp_path: Path) -> None:
    saved(tmp_path).to_parquet(tmp_path / "x.parquet")
    cases = {("yes", "no"): [1, 0, 1, 0], ("no", "yes"): [0, 1, 0, 1], ("renamed", "too"): [0, 1, 0, 1]}
    for path in (tmp_path / "x.parquet", tmp_path / "one"):
        for names, labels in cases.items():
            cfg = LabelsDataConfig(path=str(path), text_column="prompt", label_names=list(names), eval_fraction=0)
            texts = build_scored(cfg, byte_tokenizer(), seq_len=32, split="train")
            assert [each.labels[-1] for each in texts] == labels
        kto = PreferencesDataConfig(path=str(path), label_column="label", completion_column="response")
        (answers,) = answer_configs(kto, columns_at(kto, train_location(kto)), "x")
        bad = BadRowReport()
        assert list(each_answer(answers, rows_of(answers, train_location(kto)), bad)) == []
        assert bad.count == 4  # neither name is true or false


def test_json_columns_of_datasets_are_decoded(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tags": [1, None]}]
    features = datasets.Features(messages=datasets.List(datasets.Json()))
    made = datasets.Dataset.from_dict({"messages": [turns]}, features=features)
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "x.parquet")
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as out, pa.ipc.new_file(out, made.data.table.schema) as writer:
        writer.write_table(made.data.table)
    for name in ("saved", "x.parquet", "file.arrow"):
        cfg = ChatDataConfig(path=str(tmp_path / name), eval_fraction=0)
        assert [each.values for each in rows_of(cfg, train_location(cfg))] == [{"messages": turns}]


HUB_SCRIPT = """
import sys
from components.protocol.errors import ConfigError
from components.data.sources.files import Location
from components.data.sources.split import _hub_files, _hub_rows
columns = {"prompt_column": sys.argv[2], "response_column": "response"}
try:
    location = Location("data.path", sys.argv[1], sys.argv[3])
    for row in _hub_rows(location, None, None, columns):
        print(row.where.split("/")[-1], sorted(row.values), row.values["response"])
        mapped = open("/proc/self/maps").read()
    print("mapped:", [file.name for file in _hub_files(location, None, None) if str(file) in mapped])
except ConfigError as error:
    print("ConfigError", error)
"""


def start_hub_reader(cache: Path, name: str, column: str = "prompt", split: str = "train") -> subprocess.Popen:
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", HUB_SCRIPT, name, column, split],
        env=environment,
        cwd=Path(__file__).parents[2],
        text=True,
        stdout=subprocess.PIPE,
    )


@in_torture
def test_concurrent_processes_can_fill_the_datasets_cache(tmp_path):
    """A local folder replaces the hub repository: `datasets` builds its cache from both in the same way."""
    folder = tmp_path / "repository"
    folder.mkdir()
    write(folder / "train.jsonl", [{**row, "other": 1} for row in ROWS[:1]] * 50)
    readers = [start_hub_reader(tmp_path / "cache", str(folder)) for _ in range(3)]
    expected = "".join(f"repository row {i} ['prompt', 'response'] Three.\n" for i in range(1, 51))
    expected += "mapped: ['repository-train.arrow']\n"
    assert [reader.communicate(timeout=120)[0] for reader in readers] == [expected] * 3
    wrong_column = start_hub_reader(tmp_path / "cache", str(folder), column="promt").communicate(timeout=120)[0]
    assert wrong_column == (
        f"ConfigError data.prompt_column=promt: {folder} has no such column, it has prompt, response, other; "
        "did you mean 'prompt'?\n"
    )
    wrong_split = start_hub_reader(tmp_path / "cache", str(folder), split="test").communicate(timeout=120)[0]
    assert "ConfigError" in wrong_split
    assert "loading its split 'test' from the hub failed" in wrong_split


def test_hub_dataset_without_network_is_reported(tmp_path):
    output = start_hub_reader(tmp_path, "no-such-owner/no-such-data").communicate(timeout=120)[0]
    assert output.startswith(
        "ConfigError data.path=no-such-owner/no-such-data: is not a local file, and loading its split "
        "'train' from the hub failed (data.subset=null): "
    )
    assert "Traceback" not in output
