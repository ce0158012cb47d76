"""Checks of token stores before launch: one message with the key, exit status 2, and torch is not imported."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from components.data.token_store.manifest import (
    _HASH_OF_BYTES,
    Vocabulary,
    hash_of_tokenizer,
    shard_problems,
    write_manifest,
)
from components.models.tokenizer import byte_tokenizer
from tests.config.commands import REPOSITORY, Commands, Ended
from tests.config.test_wrong_configurations import assert_rejected
from tests.unit.token_shards import documents_of, store_of

PRETRAIN = REPOSITORY / "recipes" / "pretrain.py"


def store(folder: Path, tokenizer_hash: str = _HASH_OF_BYTES, ids: int = 256) -> Path:
    """Write a store of two shards below `folder` and return its folder."""
    shards = [documents_of(seed, 80, ids=ids) for seed in (1, 2)]
    write_manifest(store_of(folder / "store", shards, vocabulary=Vocabulary("some/model", tokenizer_hash)))
    return folder / "store"


def run(commands: Commands, folder: Path, *arguments: str) -> Ended:
    given = ("data=tokens", "data.path=store", "model=tiny", "training.seq_len=64", "training.global_batch_size=8")
    return commands.run(PRETRAIN, [*given, *arguments], folder)


def test_missing_and_changed_shards_are_reported(commands: Commands, tmp_path: Path) -> None:
    folder = store(tmp_path)
    (folder / "0.safetensors").unlink()
    ended = run(commands, tmp_path)
    assert_rejected(ended, ["data.path=store: 1 of 2 shards cannot be read, such as", "0.safetensors"], tmp_path)
    folder = store(tmp_path)
    os.truncate(folder / "1.safetensors", 100)
    ended = run(commands, tmp_path)
    assert_rejected(ended, ["data.path=store: 1 of 2 shards were changed", "100 bytes, the manifest"], tmp_path)
    mixture = ("data=mixture", "+data@data.sources.web=tokens", "data.sources.web.path=store", "data.pack=true")
    ended = commands.run(PRETRAIN, [*mixture, "model=tiny"], tmp_path)
    assert_rejected(ended, ["data.sources.web.path=store: 1 of 2 shards were changed"], tmp_path)


def test_other_tokenizer_is_reported(commands: Commands, tmp_path: Path) -> None:
    store(tmp_path, "0")
    parts = ["data.path=store: was written with the tokenizer some/model", "set model.tokenizer=some/model"]
    assert_rejected(run(commands, tmp_path), parts, tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "same")
    stored = json.loads((tmp_path / "same" / "tokenizer.json").read_text())
    ids = stored["model"]["vocab"]
    assert hash_of_tokenizer(tokenizer) == _HASH_OF_BYTES
    ids["a"], ids["b"] = ids["b"], ids["a"]
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(stored))
    store(tmp_path)
    assert_rejected(run(commands, tmp_path, "model.tokenizer=./other"), parts, tmp_path)
    ended = run(commands, tmp_path, "model.tokenizer=./same", "cluster.dry_run=true")
    assert "was written with" not in ended.errors


@pytest.mark.parametrize(
    ("argument", "messages"),
    [
        ("data.eval_split=test", ["data.eval_split=test: a token store has no splits; set data.eval_path"]),
        ("data.overlong=drop", ["data.overlong=drop: rows are cut out of the store"]),
        ("data.block_rows=0", ["data.block_rows=0"]),
        ("data.eval_fraction=0", ["data.eval_fraction=0.0: nothing is held out"]),
        ("data.eval_path=none", ["data.eval_path=none: there is no manifest.json"]),
        ("data.path=damaged", ["is damaged or not a manifest"]),
        ("data.path=other", ["is a 'x' of version 1; this version of Meshbook reads"]),
        ("model.vocab=260", ["data.path=store: holds the id 299 (", "0.safetensors), but the vocabulary has 260"]),
    ],
)
def test_settings_that_do_not_fit_the_store_are_reported(
    commands: Commands, tmp_path: Path, argument: str, messages: list[str]
) -> None:
    store(tmp_path, ids=300 if argument.startswith("model") else 256)
    for name, content in (("damaged", "{"), ("other", '{"format": "x", "version": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(content)
    assert_rejected(run(commands, tmp_path, argument), messages, tmp_path)


def test_manifest_of_another_order_has_another_hash(tmp_path: Path) -> None:
    manifest = store_of(tmp_path / "store", [documents_of(seed, 80) for seed in (1, 2)])
    other = replace(manifest, shards=list(reversed(manifest.shards)))
    assert manifest.hash != other.hash


def test_sizes_of_shards_come_from_one_listing_per_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files that the listing lacks, or whose links lead nowhere, take a request of their own."""
    folder, other = tmp_path / "store", tmp_path / "other"
    manifest = store_of(folder, [documents_of(seed, 80) for seed in (1, 2, 3, 4)])
    other.mkdir()
    (folder / "3.safetensors").rename(other / "3.safetensors")
    *inside, last = manifest.shards
    manifest = replace(manifest, shards=[*inside, replace(last, path=str(other / "3.safetensors"))])
    asked, stat = list[str](), os.stat

    def counted(path: str, **options: bool) -> os.stat_result:
        asked.append(str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", counted)
    assert shard_problems(manifest, "data.path=store") == []
    assert asked == []
    (folder / "0.safetensors").unlink()
    (folder / "1.safetensors").unlink()
    (folder / "1.safetensors").symlink_to("nowhere")
    assert shard_problems(manifest, "data.path=store") == [
        f"data.path=store: 2 of 4 shards cannot be read, such as {folder}/0.safetensors (No such file or directory); "
        "restore them, or write the manifest again"
    ]
    assert asked == [f"{folder}/0.safetensors", f"{folder}/1.safetensors"]
