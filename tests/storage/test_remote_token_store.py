"""Token stores in an object store: the rows of a store on disk, at most once per part, below a limit, with faults."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from components.config.schema.data import TokensDataConfig
from components.data.batches import _PREFETCHED_STEPS, BatchPlan, TrainBatches
from components.data.loading import build_dataset
from components.data.token_store import rows as remote_shards
from components.data.token_store.manifest import (
    _HASH_OF_BYTES,
    Vocabulary,
    read_manifest,
    shard_problems,
    write_manifest,
)
from components.data.token_store.rows import TokenRows
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError
from components.storage import tensor_files
from tests.storage.conftest import S3
from tests.unit.token_shards import documents_of, scanned, store_of, write_datatrove, write_megatron

SEQ = 64
URL = "s3://bucket/store"


def store(folder: Path, documents: int = 300) -> Path:
    """Write a store of shards in three formats, one with a loss mask, and return its folder."""
    manifest = store_of(folder / "store", [documents_of(seed, documents) for seed in (1, 2)])
    write_megatron(manifest.folder / "m.bin", documents_of(3, documents), np.uint16)
    write_datatrove(manifest.folder / "d.ds", documents_of(4, documents), 4)
    tokens = sum(map(len, documents_of(4, documents)))
    (np.random.default_rng(7).random(tokens) < 0.5).tofile(manifest.folder / "d.ds.loss")
    shards = [*manifest.shards, *(scanned(manifest.folder / name) for name in ("m.bin", "d.ds"))]
    vocabulary = Vocabulary("bytes", _HASH_OF_BYTES)
    write_manifest(replace(manifest, shards=shards, vocabulary=vocabulary))
    return manifest.folder


def upload(s3: S3, folder: Path) -> None:
    for file in folder.iterdir():
        s3.put(f"store/{file.name}", file.read_bytes())


def rows_of(path: str, cache: Path, **values: object) -> TokenRows:
    cfg = TokensDataConfig(path=path, cache=str(cache), block_rows=4, window_blocks=4, **values)  # type: ignore[arg-type]
    rows = build_dataset(cfg, byte_tokenizer(), seq_len=SEQ, split="train")
    assert isinstance(rows, TokenRows)
    return rows


def batches_of(rows: TokenRows) -> TrainBatches:
    return TrainBatches(rows, BatchPlan(global_batch_size=8, micro_batch_size=4), seed=5, fingerprint=rows.fingerprint)


def bytes_below(folder: Path) -> int:
    """Return the bytes of the cached parts, while threads add and remove some."""
    total = 0
    for file in folder.rglob("*.part"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def test_batches_are_those_of_a_store_on_disk(faulty_s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 3 % of the requests spoiled, a cache that holds half of the store, and a resume in between."""
    monkeypatch.setattr(remote_shards, "_PART_BYTES", 1024)
    folder = store(tmp_path)
    upload(faulty_s3, folder)
    faulty_s3.faults(share=0.03)
    bytes_of_store = sum(file.stat().st_size for file in folder.iterdir())
    limit = bytes_of_store // 2
    remote = rows_of(URL, tmp_path / "cache", cache_gib=limit / 1024**3)
    local = rows_of(str(folder), tmp_path / "unused")
    assert len(remote) == len(local) > 400
    assert remote.fingerprint == local.fingerprint
    steps = 40
    first = batches_of(remote)
    for batch, expected in zip(first.upcoming(steps // 2), batches_of(local).upcoming(steps // 2), strict=True):
        assert [each.input_ids.tolist() for each in batch] == [each.input_ids.tolist() for each in expected]
        first.advance()
        assert bytes_below(tmp_path / "cache") <= limit
    resumed, reference = batches_of(rows_of(URL, tmp_path / "cache")), batches_of(local)
    resumed.load_state_dict(first.state_dict())
    reference.load_state_dict(first.state_dict())
    for batch, expected in zip(resumed.upcoming(steps // 2), reference.upcoming(steps // 2), strict=True):
        for each, other in zip(batch, expected, strict=True):
            assert torch.equal(each.input_ids, other.input_ids)
            assert torch.equal(each.targets, other.targets)
    assert sum(faulty_s3.faults().values()) > 0
    assert not (tmp_path / "unused").exists()


def test_rows_are_fetched_before_they_are_used(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_shards, "_PART_BYTES", 4096)
    monkeypatch.setattr(tensor_files, "_HASHED_BYTES", 4096)
    folder = store(tmp_path)
    upload(s3, folder)
    rows = rows_of(URL, tmp_path / "cache")
    upcoming = batches_of(rows).upcoming(100)
    next(upcoming)  # step 1; those up to PREFETCHED_STEPS are fetched in the background
    deadline, before = time.monotonic() + 60, -1
    while (count := len(list((tmp_path / "cache").rglob("*.part")))) != before and time.monotonic() < deadline:
        before = count
        time.sleep(1.0)
    for name in s3.names("store/"):
        s3.delete(name)  # what was not fetched is an error now
    for _ in range(_PREFETCHED_STEPS - 1):
        next(upcoming)
    with pytest.raises(FileNotFoundError):
        list(upcoming)


def test_missing_and_changed_shards_are_found_before_launch(s3: S3, tmp_path: Path) -> None:
    folder = store(tmp_path, documents=20)
    upload(s3, folder)
    assert shard_problems(read_manifest(URL), f"data.path={URL}") == []
    s3.delete("store/m.bin")
    s3.put("store/d.ds", b"short")
    problems = shard_problems(read_manifest(URL), f"data.path={URL}")
    assert problems == [
        f"data.path={URL}: 1 of 4 shards cannot be read, such as {URL}/m.bin (no such object); restore them, or write "
        "the manifest again",
        f"data.path={URL}: 1 of 4 shards were changed, such as {URL}/d.ds has 5 bytes, the manifest "
        f"{(folder / 'd.ds').stat().st_size:,}; restore them, or write the manifest again",
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    s3.put("store/manifest.json", json.dumps({**manifest, "document_end": 7}).encode())
    with pytest.raises(ConfigError, match="is damaged or was edited: it does not match its checksum"):
        read_manifest(URL)
    with pytest.raises(ConfigError, match="there is no manifest.json; give the folder of a token store"):
        read_manifest("s3://bucket/nothing")
    shutil.rmtree(folder)
