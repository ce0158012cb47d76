"""Data files of every format, folders of them, and the errors for invalid ones, before launch and at load time."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from components.config.schema.data import ChatDataConfig, CustomDataConfig, DataConfig, DocsDataConfig, SftDataConfig
from components.data.loading import build_dataset
from components.data.preflight import check_files
from components.data.sources.files import Location, is_local, read_rows
from components.data.sources.split_files import files_of_split
from components.protocol.errors import ConfigError
from tests.unit.test_data_examples import byte_tokenizer

ROWS = [
    {"prompt": "One, two?", "response": "Three."},
    {"prompt": 'He said: "no,\nnever"', "response": "Ünïcödé 数学\n\nline"},
    {"prompt": "tab\there", "response": "ok"},
]


def write(file: Path, rows: list[dict]) -> Path:
    """Write rows with the standard library or tool of each format."""
    if file.suffix == ".gz":
        plain = write(file.with_suffix(""), rows)
        file.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
        return file
    match file.suffix:
        case ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        case ".json":
            file.write_text(json.dumps(rows, indent=2), encoding="utf-8")
        case ".parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
        case _:
            with file.open("w", newline="", encoding="utf-8") as out:
                writer = csv.DictWriter(out, list(rows[0]), dialect="excel-tab" if file.suffix == ".tsv" else "excel")
                writer.writeheader()
                writer.writerows(rows)
    return file


def sft_config(path: Path | str, **values) -> SftDataConfig:
    return SftDataConfig(path=str(path), **values)


def sample_texts(cfg: DataConfig, split: str = "train") -> list[str]:
    """Return the samples of `build_dataset` as plain text."""
    tokenizer = byte_tokenizer(eos="</s>")
    dataset = build_dataset(cfg, tokenizer, seq_len=10_000, split=split)
    return [tokenizer.decode(example.input_ids) for example in dataset]


def problems(cfg: DataConfig, split: str = "train") -> list[str]:
    """Return the config errors that loading raises."""
    with pytest.raises(ConfigError) as caught:
        sample_texts(cfg, split)
    return caught.value.problems


def same_problems(cfg: DataConfig, split: str = "train") -> list[str]:
    """Return the config errors, which must be the same before launch (`check_files`) and at load time."""
    found = problems(cfg, split)
    assert check_files(cfg) == found
    return found


# Formats


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.tsv", "x.parquet", "x.jsonl.gz", "x.tsv.gz"])
def test_every_format_gives_the_same_samples(tmp_path, name):
    file = write(tmp_path / name, ROWS)
    cfg = sft_config(file, eval_fraction=0)
    assert check_files(cfg) == []
    assert sample_texts(cfg) == [f"{row['prompt']}\n{row['response']}</s>" for row in ROWS]


def test_json_lines_with_a_byte_order_mark_and_blank_lines_are_read(tmp_path):
    lines = "\n".join(json.dumps(row) for row in ROWS)
    (tmp_path / "x.json").write_text("\n" + lines + "\n\n", encoding="utf-8-sig")
    assert len(sample_texts(sft_config(tmp_path / "x.json", eval_fraction=0))) == 3
    assert [row.where[-2:] for row in read_rows(tmp_path / "x.json")] == [":2", ":3", ":4"]


def test_damaged_compressed_file_is_reported(tmp_path):
    file = write(tmp_path / "x.jsonl.gz", ROWS)
    whole = file.read_bytes()
    file.write_bytes(whole[:-12])
    damaged = "x.jsonl.gz: is damaged: its compressed data is incomplete or invalid"
    assert damaged in same_problems(sft_config(file))[0]
    file = write(tmp_path / "y.parquet", ROWS).rename(tmp_path / "y.parquet.gz")
    assert "files with suffix '.gz' are not supported; use .jsonl" in same_problems(sft_config(file))[0]


def test_csv_with_a_very_long_field_does_not_change_the_global_field_limit(tmp_path):
    file = write(tmp_path / "x.csv", [{"prompt": "p" * 300_000, "response": "r"}])
    before = csv.field_size_limit(1000)
    try:
        assert [len(row.values["prompt"]) for row in read_rows(file)] == [300_000]
        assert csv.field_size_limit() == 1000
    finally:
        csv.field_size_limit(before)


def test_folder_is_read_by_split_in_order_of_file_names(tmp_path):
    write(tmp_path / "train-00001-of-00002.parquet", [ROWS[1]])
    write(tmp_path / "train-00000-of-00002.parquet", [ROWS[0]])
    (tmp_path / "test").mkdir()
    write(tmp_path / "test" / "part.jsonl", [ROWS[2]])
    (tmp_path / "info.json").write_text("{}")  # not read: the file name has no split, but others have one
    write(tmp_path / "train2.jsonl", ROWS)
    (tmp_path / ".cache").mkdir()
    write(tmp_path / ".cache" / "train.jsonl", ROWS)
    cfg = sft_config(tmp_path, eval_split="test")
    assert check_files(cfg) == []
    assert [text[:3] for text in sample_texts(cfg)] == ["One", "He "]
    assert [text[:3] for text in sample_texts(cfg, "eval")] == ["tab"]
    facts = build_dataset(cfg, byte_tokenizer(eos="</s>"), seq_len=1000, split="train").facts
    assert "; not read: info.json (in no split), train2.jsonl (in no split)" in str(facts)


def test_folder_without_split_names_is_all_training_data(tmp_path):
    for number, row in enumerate(ROWS):
        write(tmp_path / f"shard_{number}.jsonl", [row])
    assert len(sample_texts(sft_config(tmp_path, eval_fraction=0))) == 3
    problem = f"data.path={tmp_path}: the folder has no split 'test', it has train; choose one of these"
    assert problems(sft_config(tmp_path, eval_split="test"), "eval")[0].startswith(problem)


def test_is_local_distinguishes_paths_from_hub_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    assert all(is_local(path) for path in ("x.jsonl", "owner/x.parquet", "./x", "/x/y", "~/x", "owner"))
    assert not any(is_local(path) for path in ("owner/name", "squad"))


# Errors, reported before launch (check_files) and again at load time


def test_missing_file_and_empty_folder_are_reported(tmp_path):
    assert same_problems(sft_config(tmp_path / "x.jsonl")) == [
        f"data.path={tmp_path}/x.jsonl: no such file or folder; set data.path to a JSONL, JSON, CSV, TSV "
        "or Parquet file, a folder of them, or the name of a hub dataset (owner/name)"
    ]
    assert same_problems(sft_config(tmp_path)) == [
        f"data.path={tmp_path}: the folder contains no file of a supported format "
        "(.jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .txt, or compressed with gzip or zstd, such as "
        ".jsonl.gz and .jsonl.zst); it has none"
    ]
    file = write(tmp_path / "x.jsonl", ROWS)
    (problem,) = same_problems(sft_config(file, eval_path=str(tmp_path / "y.csv")), "eval")
    assert problem.startswith(f"data.eval_path={tmp_path}/y.csv: no such file or folder; set data.eval_path")


def test_unsupported_format_is_reported(tmp_path):
    (tmp_path / "x.xlsx").write_text("x")
    assert same_problems(sft_config(tmp_path / "x.xlsx")) == [
        f"data.path={tmp_path}/x.xlsx: files with suffix '.xlsx' are not supported; "
        "use .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .txt, or compressed with gzip or zstd, such as "
        ".jsonl.gz and .jsonl.zst"
    ]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.parquet"])
def test_empty_file_is_reported(tmp_path, name):
    (tmp_path / name).touch()
    assert check_files(sft_config(tmp_path / name)) == [f"data.path={tmp_path}/{name}: {name} is empty"]
    (problem,) = problems(sft_config(tmp_path / name))
    assert f"{tmp_path}/{name}" in problem


@pytest.mark.parametrize(("name", "content"), [("x.json", "[]"), ("x.csv", "prompt,response\n"), ("x.jsonl", "\n\n")])
def test_file_without_rows_is_reported(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert check_files(sft_config(tmp_path / name)) == [f"data.path={tmp_path}/{name}: {name} has no rows"]
    assert problems(sft_config(tmp_path / name)) == [
        f"data: {tmp_path}/{name} (train): has no rows; set data.path or data.split to one with rows"
    ]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_unknown_columns_are_reported_with_all_columns_and_the_settings_that_fit(tmp_path, name):
    file = write(tmp_path / name, ROWS)
    assert same_problems(sft_config(file, prompt_column="promt", response_column="answer")) == [
        f"data.prompt_column=promt: {file} has no such column, it has prompt, response; write "
        "data.prompt_column=prompt data.response_column=response"
    ]


def test_unknown_parquet_column_is_reported_at_load_time(tmp_path):
    file = write(tmp_path / "x.parquet", ROWS)
    cfg = sft_config(file, prompt_column="promt")
    assert check_files(cfg) == []
    assert problems(cfg) == [
        f"data.prompt_column=promt: {file} has no such column, it has prompt, response; write data.prompt_column=prompt"
    ]


def test_damaged_parquet_file_is_reported(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1, but no Parquet data")
    assert check_files(sft_config(tmp_path / "x.parquet")) == [
        f"data.path={tmp_path}/x.parquet: x.parquet is damaged or not a Parquet file"
    ]
    assert problems(sft_config(tmp_path / "x.parquet"))[0].startswith(
        f"{tmp_path}/x.parquet: is damaged or has another format: "
    )


def test_invalid_json_is_reported_with_its_line_number(tmp_path):
    file = write(tmp_path / "x.jsonl", ROWS)
    with file.open("a") as stream:
        stream.write('{"prompt": "a", "response": }\n{"prompt": "a", "response": "b"\r\n')
    assert problems(sft_config(file))[0].splitlines()[1:] == [
        f"  {file}:{number}: not valid JSON ({error}); every line must be one object such as "
        '{"prompt": "...", "response": "..."}'
        for number, error in ((4, "Expecting value, column 29"), (5, "Expecting ',' delimiter, column 32"))
    ]
    file.write_text('"text"\n')
    assert same_problems(sft_config(file)) == [f"{file}:1: is a str; must be an object with the columns as keys"]
    array = tmp_path / "x.json"
    array.write_text('[\n{"prompt": "a", "response": "b"},\n{"prompt": "a",\n]')
    assert same_problems(sft_config(array))[0].startswith(f"{array}:4: not valid JSON (")


def test_invalid_csv_row_and_non_utf8_text_are_reported(tmp_path):
    file = tmp_path / "x.csv"
    file.write_text("prompt,response\na,b\nc,d,e\n")
    assert problems(sft_config(file))[0].splitlines()[1] == (
        f"  {file}:3: more fields than the 2 of the header; put a field that contains the separator or a line break in "
        "double quotes"
    )
    file.write_bytes(b"prompt,response\n" + b"a,b\n" * 5000 + "é,b\n".encode("latin-1"))
    assert problems(sft_config(file))[0].splitlines()[1] == (
        f"  {file}:5002: is not UTF-8 text; convert the file to UTF-8"
    )
    file.write_text("prompt,response,,response,\na,good,,bad,\n")
    assert same_problems(sft_config(file)) == [
        f"{file}:1: the header has the column 'response' more than once; rename one"
    ]
    file.write_text("prompt,response,,\na,b,,\n")  # columns without a name are not used
    assert sample_texts(sft_config(file, eval_fraction=0)) == ["a\nb</s>"]


def test_unreadable_file_is_reported(tmp_path):
    file = write(tmp_path / "x.jsonl", ROWS)
    file.chmod(0)
    if os.access(file, os.R_OK):
        pytest.skip("this user can read files of mode 0")
    assert check_files(sft_config(file)) == [f"data.path={file}: x.jsonl cannot be read: Permission denied"]


def test_eval_split_of_a_single_file_is_rejected_unless_eval_path_is_set(tmp_path):
    file = write(tmp_path / "x.jsonl", ROWS)
    (problem,) = same_problems(sft_config(file, eval_split="test"), "eval")
    assert problem == (
        f"data.eval_split=test: data.path={file} is a single file, which has no other split; set "
        "data.eval_path to a file, or data.eval_split=null to hold out data.eval_fraction"
    )
    assert len(sample_texts(sft_config(file, eval_path=str(file), eval_split="test"), "eval")) == 3


def test_check_files_imports_no_heavy_package_and_ignores_hub_names(tmp_path):
    file = write(tmp_path / "x.parquet", ROWS)
    script = f"""
import sys
from components.config.schema.data import SftDataConfig
from components.data.preflight import check_files
assert check_files(SftDataConfig(path="openai/gsm8k", subset="main")) == []
assert check_files(SftDataConfig(path={str(file)!r})) == []
heavy = {{"torch", "pyarrow", "datasets", "transformers", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


def test_check_files_of_docs_and_custom_data():
    assert check_files(DocsDataConfig()) == []
    assert check_files(CustomDataConfig(factory="tests.unit:build")) == []
    (problem,) = check_files(CustomDataConfig(factory="no_such_package.data:build"))
    assert problem.startswith("data.factory=no_such_package.data:build: no module named 'no_such_package'")


def test_path_in_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "x.jsonl", ROWS)
    assert files_of_split(Location("data.path", "~/x.jsonl", "train")) == [file]


DEEP = {
    "300 lists": "[" * 300 + "]" * 300,
    "open lists": "[" * 200_000,
    "objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
}


@pytest.mark.parametrize("case", DEEP)
def test_deeply_nested_values_are_bad_rows_in_every_format(tmp_path: Path, case: str) -> None:
    value = DEEP[case]
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "x", "response": "y", "messages": {value}}}\n')
    (row,) = read_rows(tmp_path / "a.jsonl")
    assert "nests more than 200" in row.problem or "recursion" in row.problem or "JSON" in row.problem
    (tmp_path / "b.json").write_text(f'[{{"prompt": "x", "messages": {value}}}]')
    with pytest.raises(ConfigError, match=r"b.json"):
        list(read_rows(tmp_path / "b.json"))
    call = {"function": {"name": "f", "arguments": value}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answered = [turns[0], {"role": "assistant", "content": "y"}]
    for name, row_values in (("calls", {"messages": turns}), ("tools", {"messages": answered, "tools": value})):
        write(tmp_path / f"{name}.jsonl", [row_values])
        cfg = ChatDataConfig(path=str(tmp_path / f"{name}.jsonl"))
        with pytest.raises(ConfigError, match="that (is|are) not JSON"):
            sample_texts(cfg)


def test_pipes_are_reported_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    cfg = sft_config(tmp_path)
    for read in (lambda: list(read_rows(tmp_path / "a.jsonl")), lambda: problems(cfg), lambda: sample_texts(cfg)):
        with pytest.raises(ConfigError, match=r"a.jsonl: cannot be read: Not a regular file"):
            raise ConfigError(read())  # type: ignore[arg-type]


@pytest.mark.parametrize("metadata", ["[" * 100_000, "[1]", '{"info": 5}', '{"info": {"features": {"a": 5}}}', "{"])
def test_damaged_metadata_of_a_table_are_reported(tmp_path: Path, metadata: str) -> None:
    table = pa.table({"prompt": ["x"]}).replace_schema_metadata({"huggingface": metadata})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet: is damaged or has another format"):
        list(read_rows(tmp_path / "a.parquet"))
