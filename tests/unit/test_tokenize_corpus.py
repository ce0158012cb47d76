"""scripts/tokenize_corpus.py: shards against plain tokenizers, kills, tasks of an array, and rejected inputs."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from components.data.token_store.manifest import read_manifest
from components.data.token_store.shards import ShardFiles
from components.models.tokenizer import byte_tokenizer
from meshbook.programs import tools
from scripts.tokenize_corpus import main
from tests.unit.token_shards import documents_of, flat, write_datatrove, write_llmc, write_megatron

ROOT = Path(__file__).resolve().parents[2]
KILLS = 40 if os.environ.get("MESHBOOK_TORTURE") == "1" else 3
END = 257
"""End-of-text token of the byte tokenizer."""


def texts_of(seed: int, count: int = 40, most: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randint(0, 69_000)}" for _ in range(rng.randint(1, most))) + " ü数" for _ in range(count)]


def write_corpus(folder: Path, column: str = "text") -> dict[str, list[str]]:
    """Write a file of each kind below `folder`; return the texts by name of the shard."""
    (folder / "more").mkdir(parents=True)
    texts = {name: texts_of(seed) for seed, name in enumerate(("a.jsonl", "b.jsonl.gz", "more__c.parquet", "d.csv"))}
    lines = {name: "".join(json.dumps({column: text, "id": 1}) + "\n" for text in each) for name, each in texts.items()}
    (folder / "a.jsonl").write_text(lines["a.jsonl"])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines["b.jsonl.gz"].encode()))
    pyarrow.parquet.write_table(
        pa.Table.from_pylist([{column: text} for text in texts["more__c.parquet"]]), folder / "more" / "c.parquet"
    )
    (folder / "d.csv").write_text(
        "".join(f"{line}\n" for line in (f"id,{column}", *(f"1,{t}" for t in texts["d.csv"])))
    )
    return {f"{name}.safetensors": each for name, each in texts.items()}


def word_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with 70,002 tokens, one per word, and return its folder."""
    vocabulary = {f"w{number}": number for number in range(70_000)} | {"<unk>": 70_000, "<end>": 70_001}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    return folder


def test_ids_of_a_vocabulary_with_gaps_fit(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 1, "b": 70_000, "<unk>": 2, "<end>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path / "gaps")
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n')
    assert run(tmp_path / "a.jsonl", "--tokenizer", tmp_path / "gaps", "--out", tmp_path / "out") == 0
    assert load_file(tmp_path / "out" / "a.jsonl.safetensors")["ids"].tolist() == [1, 70_000, 3]


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if not file.name.startswith(".")}


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_shards_hold_the_tokens_of_plain_tokenizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write_corpus(tmp_path / "corpus", "body")
    words = word_tokenizer(tmp_path / "words")
    plain = Tokenizer.from_file(str(words / "tokenizer.json"))
    encoders = {"bytes": lambda text: [*text.encode(), END], str(words): lambda text: [*plain.encode(text).ids, 70_001]}
    for name, encode in encoders.items():
        out = tmp_path / Path(name).name / "store"
        assert run(tmp_path / "corpus", "--tokenizer", name, "--out", out, "--text-column", "body", "--workers", 2) == 0
        manifest = read_manifest(str(out))
        assert [shard.path for shard in manifest.shards] == sorted(texts)
        assert manifest.vocabulary is not None
        assert manifest.vocabulary.tokenizer == name
        for number, shard in enumerate(manifest.shards):
            documents = [encode(text) for text in texts[shard.path]]
            expected = [id for document in documents for id in document]
            stored = load_file(out / shard.path)
            assert stored["ids"].dtype == ("uint16" if name == "bytes" else "uint32")
            assert stored["ids"].tolist() == expected
            assert stored["ends"].tolist() == [sum(map(len, documents[: count + 1])) for count in range(len(documents))]
            assert ShardFiles(manifest).open(number).ids(0, len(expected)).tolist() == expected
    assert max(each.max_id for each in manifest.shards) == 70_001
    assert "4 shards, 160 documents" in capsys.readouterr().out


def test_tasks_of_an_array_write_what_one_run_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "corpus")
    given = (tmp_path / "corpus", "--tokenizer", "bytes")
    assert run(*given, "--out", tmp_path / "whole") == 0
    for task in (2, 1):
        assert run(*given, "--out", tmp_path / "parts", "--shard", f"{task}/2", "--workers", 1) == 0
        assert "manifest.json" not in files_of(tmp_path / "parts")
    assert run("--out", tmp_path / "parts", "--index") == 0
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    capsys.readouterr()
    changed = tmp_path / "corpus" / "a.jsonl"
    changed.write_text(changed.read_text().replace("w", "v"))
    assert run(*given, "--out", tmp_path / "whole") == 0  # only the shard of the changed file is written anew
    lines = capsys.readouterr().out.splitlines()
    assert sum("documents, kept" in line for line in lines) == 3
    assert ["a.jsonl" in line for line in lines if " tokens" in line] == [True, False]
    assert files_of(tmp_path / "parts")["a.jsonl.safetensors"] != files_of(tmp_path / "whole")["a.jsonl.safetensors"]


def test_store_in_the_folder_of_its_corpus_can_be_written_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    for out in (tmp_path / "store", tmp_path):
        for _ in range(2):
            assert run(tmp_path, "--tokenizer", "bytes", "--out", out) == 0
        assert [shard.path for shard in read_manifest(str(out)).shards] == ["a.jsonl.safetensors"]
        shutil.rmtree(tmp_path / "store", ignore_errors=True)


def test_files_of_a_corpus_are_read_whatever_their_endings_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, line = tmp_path / "corpus", b'{"text": "one"}\n'
    corpus.mkdir()
    (corpus / "a.JSONL").write_bytes(line)
    (corpus / "b.ndjson.zst").write_bytes(pa.Codec("zstd").compress(line, asbytes=True))
    for name in ("README.txt", "c.jsonl.xz"):
        (corpus / name).write_bytes(b"no data")
    assert run(corpus, "--tokenizer", "bytes", "--out", tmp_path / "out") == 0
    assert [shard.documents for shard in read_manifest(str(tmp_path / "out")).shards] == [1, 1]
    assert f"{corpus}: not read: README.txt (text beside files of rows), c.jsonl.xz\n" in capsys.readouterr().out


def processes_with(text: str) -> list[int]:
    """Return the processes that hold a file of this folder open."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and any(text in os.readlink(each) for each in (entry / "fd").iterdir()):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Killed by SIGKILL at random moments, also between the shards."""
    (tmp_path / "corpus").mkdir()
    for seed in range(3):
        rows = [{"text": text} for text in texts_of(seed, 1200, 300)]
        (tmp_path / "corpus" / f"{seed}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = (tmp_path / "corpus", "--tokenizer", "bytes", "--workers", "2", "--out")
    began = time.monotonic()
    assert run(*given, tmp_path / "undisturbed") == 0
    took, rng, shards = time.monotonic() - began, random.Random(), list[int]()
    for number in range(KILLS):
        out = tmp_path / f"killed_{number}"
        process = get_context("fork").Process(target=run, args=(*given, out))
        process.start()
        while not out.is_dir():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, took))
        process.kill()
        process.join()
        deadline = time.monotonic() + 60
        while processes_with(f"{out}/"):  # the processes of the files end with it
            assert time.monotonic() < deadline
            time.sleep(0.01)
        shards.append(len(list(out.glob("*.safetensors"))))
        assert run(*given, out) == 0
        assert files_of(out) == files_of(tmp_path / "undisturbed"), shards
    print("shards that were complete when the run was killed:", shards)


def write_wrong(folder: Path) -> None:
    good = '{"text": "one"}\n'
    files = {
        "good.jsonl": good, "line.jsonl": f'{good}{{"text": \n{good}', "column.jsonl": '{"content": "one"}\n',
        "empty.jsonl": "", "blank.jsonl": f'{good}{{"text": " "}}\n{good}{{"text": 7}}\n', "x.pdf": "",
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "more").mkdir()
    (folder / "more" / "good.jsonl").write_text(good)
    (folder / "store").mkdir()
    assert run(folder / "good.jsonl", "--tokenizer", "bytes", "--out", folder / "store") == 0
    (folder / "foreign").mkdir()
    (folder / "foreign" / "good.jsonl.safetensors").write_bytes(b"x" * 100)
    for name in ("beyond", "bare"):
        (folder / name).mkdir()
    np.asarray([1, 500], np.uint16).tofile(folder / "beyond" / "a.bin")
    np.asarray([1, 2], np.uint16).tofile(folder / "bare" / "a.npy")
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    stored = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    stored["model"]["vocab"] |= {"a": 98, "b": 97}
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("line.jsonl", "line.jsonl:2: not valid JSON (Expecting value"),
        ("column.jsonl", "--text-column text: column.jsonl has no such column, it has content"),
        ("empty.jsonl", "empty.jsonl: has no rows; leave it out"),
        ("blank.jsonl", "--bad-rows refuse: 2 rows cannot become a sample; correct these, or set --bad-rows drop to "
         "leave such rows out: blank.jsonl:2: --text-column text: is empty blank.jsonl:4: --text-column text: holds"),
        ("latin.txt", "latin.txt:1: is not UTF-8 text"),
        ("x.pdf", "INPUT=x.pdf: files with suffix '.pdf' are not supported"),
        ("none.jsonl", "none.jsonl: no such file or folder"),
        ("good.jsonl more/good.jsonl", "more/good.jsonl: its shard would have the name of that of good.jsonl"),
        ("more --split test", "INPUT=more: the folder has no split 'test'"),
        ("good.jsonl --shard 0/2", "--shard 0/2: must be I/N with I from 1 to N, such as 3/16"),
        ("good.jsonl --shard 1/2 --index", "--shard 1/2: other tasks may still write shards"),
        ("good.jsonl --workers 0", "--workers 0: must be at least 1"),
        ("good.jsonl --out good.jsonl", "--out good.jsonl: is not a folder"),
        ("good.jsonl --out store --tokenizer ./tokenizer",
         "store: good.jsonl.safetensors was written with the tokenizer bytes, not ./tokenizer; tokenize into another"),
        ("good.jsonl --out store --bad-rows drop", "was written with bad rows refuse, not drop"),
        ("good.jsonl --out foreign", "foreign/good.jsonl.safetensors: is not a shard of a tokenized corpus"),
        ("good.jsonl --tokenizer ./none", "--tokenizer ./none: no such folder"),
        ("--index", "out: has no shards of a tokenized corpus"),
        ("--index --out bare --document-end <eot>", "--document-end <eot>: is neither a token of bytes nor an id of "
         "one; its end-of-text token is <|im_end|> (257)"),
        ("--index --out bare --document-end 264", "--document-end 264: is neither a token of bytes nor an id"),
        ("--index --out foreign", "foreign/good.jsonl.safetensors: is not a shard of a tokenized corpus"),
        ("--index --out store --document-end 257", "--out store: has no shards of other programs (.bin, .npy, .ds); "
         "leave out --document-end"),
        ("--index --out beyond", "beyond: holds the id 500 (a.bin), but the vocabulary has 260 tokens"),
        ("--index --out bare", "bare/a.npy: has no NumPy header, so the size of its ids is unknown; give --id-bytes 2"),
        ("good.jsonl --id-bytes 4", "--id-bytes 4: is for shards of other programs; give --index and --tokenizer"),
        ("", "INPUT: needed; give the files of the corpus, or --index"),
    ],
)  # fmt: skip
def test_invalid_inputs_are_rejected(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wrong(tmp_path)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    before = files_of(tmp_path / "store")
    assert run("--tokenizer", "bytes", "--out", "out", *arguments.split()) == 2
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert not list(tmp_path.glob("out/*"))
    assert files_of(tmp_path / "store") == before


FOREIGN = {
    "megatron": ([], lambda folder, documents: write_megatron(folder / "a.bin", documents, np.uint16)),
    "nanogpt": (["--document-end", "<|im_end|>"], lambda folder, documents: ids_of(documents).tofile(folder / "a.bin")),
    "llm.c": (["--document-end", "257"], lambda folder, documents: write_llmc(folder / "a.bin", documents)),
    "numpy": (["--document-end", "257"], lambda folder, documents: np.save(folder / "a.npy", ids_of(documents))),
    "olmo": (["--document-end", "257", "--id-bytes", "2"],
             lambda folder, documents: ids_of(documents).tofile(folder / "a.npy")),
    "datatrove": ([], lambda folder, documents: write_datatrove(folder / "a.ds", documents, 2)),
}  # fmt: skip


def ids_of(documents: list[list[int]]) -> np.ndarray:
    return np.asarray(flat(documents), np.uint16)


@pytest.mark.parametrize("program", FOREIGN)
def test_command_writes_the_manifest_of_shards_of_other_programs(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents, (options, write) = documents_of(5, 30), FOREIGN[program]
    write(tmp_path, documents)
    assert run("--out", tmp_path, "--index", "--tokenizer", "bytes", *options) == 0
    shown = capsys.readouterr().out
    assert f"1 shards, {len(documents)} documents, {len(flat(documents)):,} tokens" in shown
    manifest = read_manifest(str(tmp_path))
    shard = ShardFiles(manifest).open(0)
    ids = shard.ids(0, len(flat(documents)))
    assert ids.tolist() == flat(documents)
    assert shard.ends(0, ids) == np.cumsum([len(each) for each in documents]).tolist()
    assert run("--out", tmp_path, "--index") == 2
    assert f"--tokenizer: needed, as {tmp_path} has shards of other programs" in capsys.readouterr().err
    if "--document-end" in options:
        assert run("--out", tmp_path, "--index", "--tokenizer", "bytes", *options[2:]) == 0
        assert "1 shards store no document ends" in capsys.readouterr().out
        assert read_manifest(str(tmp_path)).documents == 1


def test_invalid_file_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_wrong(tmp_path)
    names = ("latin.txt", "line.jsonl", "empty.jsonl", "blank.jsonl", "good.jsonl")
    options = ["--tokenizer", "bytes", "--bad-rows", "drop", "--out", tmp_path / "out"]
    given = [*(tmp_path / name for name in names), *options]
    assert run(*given) == 2
    shown = capsys.readouterr()
    assert "3 bad rows left out" in shown.out
    assert "2 problems" in shown.err
    assert "latin.txt:1: is not UTF-8 text" in shown.err
    assert "empty.jsonl: has no rows" in shown.err
    names = ("blank.jsonl", "good.jsonl", "line.jsonl")
    assert sorted(files_of(tmp_path / "out")) == [f"{name}.safetensors" for name in names]
    assert run("--out", tmp_path / "out", "--index") == 0
    assert run(tmp_path / "good.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "refusing") == 0
    (tmp_path / "refusing" / "good.jsonl.safetensors").rename(tmp_path / "out" / "other.safetensors")
    assert run("--out", tmp_path / "out", "--index") == 2
    assert "blank.jsonl.safetensors was written with bad rows drop, not refuse as other" in capsys.readouterr().err


def test_command_does_not_import_torch(tmp_path: Path) -> None:
    write_wrong(tmp_path)
    code = (
        "import sys; from meshbook.programs import start_tool, tools\n"
        "for name in ('good.jsonl', 'none.jsonl', 'line.jsonl'):\n"
        "    try:\n"
        "        start_tool(tools()['tokenize'], [name, '--tokenizer', 'bytes', '--out', 'out'])\n"
        "    except SystemExit as ended:\n"
        "        print(ended.code)\n"
        "print(sys.modules['torch'], 'torch._C' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line for line in ended.stdout.splitlines() if "documents" not in line] == ["0", "2", "2", "None False"]
    assert [line.partition(":")[0].strip() for line in ended.stderr.splitlines()] == [
        "none.jsonl",
        "--bad-rows refuse",
        "line.jsonl",
    ]
    assert tools()["tokenize"].file.name == "tokenize_corpus.py"
