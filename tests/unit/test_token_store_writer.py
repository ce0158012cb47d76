"""Shards of every format against numpy and megatron-core, and files that are damaged or not supported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from components.data.token_store.manifest import (
    DENSEST_WINDOWS,
    ShardEntry,
    ShardFormat,
    _checksum,
    read_manifest,
    shard_problems,
    write_manifest,
)
from components.data.token_store.shards import Shard, ShardFiles
from components.data.token_store.writer import _densest_windows, _scan_shard, layout_of, read_entry, write_shard
from components.protocol.errors import ConfigError
from components.storage import tensor_files
from tests.unit.token_shards import (
    EOS,
    documents_of,
    flat,
    manifest_of,
    scanned,
    write_datatrove,
    write_llmc,
    write_megatron,
)

DOCUMENTS = documents_of(1, 700)
FORMATS = (
    *("ours2", "ours3", "ours4", "megatron_int16", "megatron_int32", "megatron_uint16", "megatron_pieces"),
    *("nanogpt", "llmc", "npy_uint16", "npy_int32", "olmo", "datatrove2", "datatrove4"),
)


def write(folder: Path, format: str, documents: list[list[int]] = DOCUMENTS) -> tuple[Path, int | None]:
    """Write a shard and return its path, and the bytes of an id if its format does not store them."""
    ids, id_bytes = flat(documents), None
    if format.startswith("ours"):
        path = folder / "shard.safetensors"
        write_shard(path, [documents[:100], [], documents[100:]], int(format[-1]), {"a": 1})
    elif format.startswith("megatron"):
        path = folder / "shard.bin"
        dtype = {"int16": np.int16, "int32": np.int32}.get(format.partition("_")[2], np.uint16)
        write_megatron(path, documents, dtype, pieces=3 if format.endswith("pieces") else 1)
    elif format == "nanogpt":
        path = folder / "shard.bin"
        np.asarray(ids, np.uint16).tofile(path)
    elif format == "llmc":
        path = folder / "shard.bin"
        write_llmc(path, documents)
    elif format.startswith("npy"):
        path = folder / "shard.npy"
        np.save(path, np.asarray(ids, format.partition("_")[2]))
    elif format == "olmo":
        path, id_bytes = folder / "shard.npy", 4
        np.asarray(ids, np.uint32).tofile(path)
    else:
        path = folder / "shard.ds"
        write_datatrove(path, documents, int(format[-1]))
    return path, id_bytes


@pytest.mark.parametrize("format", FORMATS)
def test_ids_and_document_ends_equal_numpy(format: str, tmp_path: Path) -> None:
    path, id_bytes = write(tmp_path, format)
    entry = scanned(path, id_bytes)
    ids = np.asarray(flat(DOCUMENTS))
    ends = np.cumsum([len(document) for document in DOCUMENTS])
    assert (entry.tokens, entry.documents, entry.max_id) == (len(ids), len(DOCUMENTS), ids.max())
    shard = Shard(entry, path, EOS)
    random = np.random.default_rng(0)
    for start, length in [
        (0, len(ids)),
        *zip(random.integers(0, len(ids), 60), random.integers(0, 300, 60), strict=True),
    ]:
        stop = min(start + length, len(ids))
        part = shard.ids(int(start), int(stop))
        assert part.dtype == np.int64
        assert np.array_equal(part, ids[start:stop])
        assert shard.ends(int(start), part) == ends[(ends > start) & (ends <= stop)].tolist()


def test_three_byte_ids_hold_large_vocabularies(tmp_path: Path) -> None:
    documents = [[0, 128_255, 255, 256, 65_535, 65_536, (1 << 24) - 1], [7]]
    write_shard(tmp_path / "a.safetensors", [documents], 3, {})
    entry = scanned(tmp_path / "a.safetensors")
    assert Shard(entry, tmp_path / "a.safetensors", None).ids(0, 8).tolist() == flat(documents)
    stored = load_file(tmp_path / "a.safetensors")
    assert stored["ids"].shape == (8, 3)
    assert stored["ends"].tolist() == [7, 8]
    with pytest.raises(ValueError, match="the id 65,536 does not fit into 2 bytes"):
        write_shard(tmp_path / "b.safetensors", [[[65_536]]], 2, {})
    assert not (tmp_path / "b.safetensors").exists()


def test_header_of_a_written_shard_equals_a_scan_of_it(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "ours2")
    write_datatrove(tmp_path / "shard.ds", DOCUMENTS, 2)
    found = read_entry(path)
    assert found is not None
    entry, settings = found
    other = scanned(tmp_path / "shard.ds")
    assert settings == {"a": 1}
    for name in ("tokens", "documents", "max_id", "hash", "densest"):
        assert getattr(entry, name) == getattr(other, name)
    assert read_entry(tmp_path / "none.safetensors") is None


def test_densest_windows_are_the_largest_counts_of_any_window() -> None:
    random = np.random.default_rng(3)
    ends = np.unique(random.integers(1, 3000, 400))
    counted = [max(((ends >= start) & (ends < start + length)).sum() for start in range(3000)) for length in (16, 256)]
    assert [_densest_windows(ends)[DENSEST_WINDOWS.index(length)] for length in (16, 256)] == counted
    assert _densest_windows(ends)[-1] == len(ends)


def test_hash_depends_on_ids_and_document_ends(tmp_path: Path) -> None:
    hashes = set()
    for number, documents in enumerate(([[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]])):
        write_shard(tmp_path / f"{number}.safetensors", [documents], 2, {})
        hashes.add(scanned(tmp_path / f"{number}.safetensors").hash)
    assert len(hashes) == 3


def cut(path: Path) -> Path:
    os.truncate(path, path.stat().st_size - 4)
    return path


ARRAYS = {"float_npy": np.zeros(4, np.float32), "npy_2d": np.zeros((2, 2), np.int32), "npy_int64": np.zeros(4, int)}


def damage(folder: Path, kind: str) -> tuple[Path, int | None]:
    """Write a shard that is damaged or not supported."""
    if kind == "odd":
        np.arange(3, dtype=np.uint8).tofile(folder / "odd.bin")
        return folder / "odd.bin", None
    if kind == "bare_npy":
        return write(folder, "olmo")[0], None
    if kind in ARRAYS:
        np.save(folder / "a.npy", ARRAYS[kind])
        return folder / "a.npy", None
    if kind in ("cut_npy", "cut_llmc"):
        return cut(write(folder, {"cut_npy": "npy_int32", "cut_llmc": "llmc"}[kind])[0]), None
    if kind in ("loss_mask", "ds_without_metadata", "ends_beyond"):
        path, _ = write(folder, "datatrove2")
        if kind == "loss_mask":
            Path(f"{path}.loss").write_bytes(b"\0")
        elif kind == "ds_without_metadata":
            Path(f"{path}.metadata").unlink()
        else:
            np.asarray([10**9], "<u8").tofile(f"{path}.index")
        return path, None
    path, id_bytes = write(folder, "megatron_int32")
    index = path.with_suffix(".idx").read_bytes()
    changed = {
        "magic": b"X" + index[1:], "int64_ids": index[:17] + b"\x05" + index[18:], "cut_index": index[:-8],
        "cut_bin": index, "empty_index": b"",
    }[kind]  # fmt: skip
    path.with_suffix(".idx").write_bytes(changed)
    return cut(path) if kind == "cut_bin" else path, id_bytes


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("odd", "3 bytes, not a multiple of the 2 bytes of an id"),
        ("bare_npy", "no NumPy header.*give id_bytes"),
        ("float_npy", "dtype float32; must be one-dimensional, of integers with 2 or 4 bytes"),
        ("npy_2d", r"shape \(2, 2\)"),
        ("npy_int64", "dtype int64"),
        ("cut_npy", "its header declares"),
        ("cut_llmc", "shard.bin: has .* bytes, its header declares"),
        ("loss_mask", "loss mask"),
        ("ds_without_metadata", "shard.ds.metadata.*give id_bytes"),
        ("ends_beyond", "document ends are not ascending, or not within"),
        ("magic", "is not a Megatron index of version 1"),
        ("int64_ids", r"dtype code 5; supported are int16 \(3\)"),
        ("cut_index", "shard.idx: has .* bytes, its header declares"),
        ("cut_bin", "shard.bin: has .* tokens, shard.idx declares"),
        ("empty_index", "truncated"),
    ],
)
def test_damaged_and_unsupported_shards_are_rejected(kind: str, message: str, tmp_path: Path) -> None:
    path, id_bytes = damage(tmp_path, kind)
    with pytest.raises((ValueError, OSError), match=message):
        scanned(path, id_bytes)


def test_shard_that_changed_after_the_manifest_is_reported_when_it_is_opened(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "nanogpt")
    files = ShardFiles(manifest_of([scanned(path)], tmp_path))
    os.truncate(path, 10)
    with pytest.raises(ConfigError, match="token shard damaged: it has 10 bytes, the manifest .*; restore the file"):
        files.open(0)


@pytest.mark.parametrize("format", FORMATS)
def test_every_flipped_bit_is_reported_before_a_token_of_its_block_is_used(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except in bytes that no row is made of, such as the lengths of Megatron's sequences."""
    monkeypatch.setattr(tensor_files, "_HASHED_BYTES", 4096)
    path, id_bytes = write(tmp_path, format)
    entry, random = scanned(path, id_bytes), np.random.default_rng(0)
    expected = read_all(Shard(entry, path, EOS))
    for file in (each for each in tmp_path.iterdir() if each.suffix not in (".metadata", ".json")):
        content = file.read_bytes()
        for place in random.integers(0, len(content), 40):
            damaged = bytearray(content)
            damaged[place] ^= 1 << int(random.integers(0, 8))
            file.write_bytes(damaged)
            message = damage_of(entry, path, expected, (int(place) - entry.offset) // 4096 * 4096 // entry.id_bytes)
            harmless = file.suffix == ".idx" or place < entry.offset
            assert message.endswith("; restore the file, or write the manifest again") or (harmless and not message)
        file.write_bytes(content)


def damage_of(entry: ShardEntry, path: Path, expected: tuple[list[int], list[int]], before: int) -> str:
    """Return the message about a damaged shard, whose first ids can be used; "": it has the ids and ends expected."""
    try:
        shard = Shard(entry, path, EOS)
        if before > 0:
            assert shard.ids(0, before).tolist() == expected[0][:before]
        assert read_all(shard) == expected
    except ConfigError as error:
        return str(error)
    return ""


def read_all(shard: Shard) -> tuple[list[int], list[int]]:
    ids = shard.ids(0, shard._entry.tokens)
    return ids.tolist(), shard.ends(0, ids)


ENDS = {
    "descending": lambda ends: ends[::-1],
    "negative": lambda ends: ends * 0 - 5,
    "huge": lambda ends: ends * 0 + 2**62,
    "ascending only at both ends": lambda ends: np.concatenate([ends[:1], ends[-2:0:-1], ends[-1:]]),
}


@pytest.mark.parametrize("ends", ENDS)
def test_ends_and_ids_are_checked_in_shards_whose_hashes_fit(ends: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path, "ours2")
    entry = scanned(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for changed in ({"ids": tensors["ids"] * 0 + 60_000}, {"ends": ENDS[ends](tensors["ends"]).copy()}):
        save_file({**tensors, **changed}, path, metadata)
        with pytest.raises(ConfigError, match=r"token shard damaged: (it holds the id 60,000|.* documen?t?s? ends?)"):
            read_all(Shard(replace(entry, hashes=hashes_of(path)), path, EOS))


def hashes_of(path: Path) -> str:
    """Return the hashes of all tensors of a shard in Meshbook's format."""
    hashes = tensor_files.BlockHashes()
    content = path.read_bytes()
    hashes.update(content[8 + int.from_bytes(content[:8], "little") :])
    return hashes.hexdigest()


@pytest.mark.parametrize("format", FORMATS)
def test_shards_and_manifests_without_hashes_are_refused(format: str, tmp_path: Path) -> None:
    path, id_bytes = write(tmp_path, format)
    entry = scanned(path, id_bytes)
    assert sum(read_all(Shard(entry, path, EOS))[0])
    with pytest.raises(ConfigError, match=r"token shard damaged: .* and 0 hashes of them; restore the file, or write"):
        Shard(replace(entry, hashes=""), path, EOS)
    file = write_manifest(manifest_of([entry], tmp_path))
    values = json.loads(file.read_text())
    del values["checksum"]
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="is damaged or was edited: it does not match its checksum; docs/data.md"):
        check_store(tmp_path)


def test_a_shard_whose_header_has_no_hashes_is_refused(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "ours2")
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    (key,) = (name for name, text in metadata.items() if "hashes" in text)
    numbers = json.loads(metadata[key])
    del numbers["hashes"]
    save_file(load_file(path), path, {**metadata, key: json.dumps(numbers)})
    with pytest.raises(ValueError, match=r"is not a shard in Meshbook's format \(KeyError\('hashes'\)\)"):
        read_entry(path)


MANIFESTS: dict[str, dict[str, Any]] = {
    "path no text": {"path": 5},
    "path with NUL": {"path": "a\0b"},
    "path empty": {"path": ""},
    "bool": {"offset": True},
    "three ids of 7 bytes": {"id_bytes": 7},
    "float": {"tokens": 1.5},
    "more ids than bytes": {"tokens": 10**9},
    "huge": {"densest": [10**30] * len(DENSEST_WINDOWS)},
    "hashes no text": {"hashes": [1]},
    "no hashes": {"hashes": ""},
    "device": {"path": "/dev/zero", "bytes": 0, "offset": 0, "tokens": 0},
    "pipe": {"path": "pipe", "bytes": 0, "offset": 0, "tokens": 0},
}


@pytest.mark.parametrize("checksum_fits", [True, False])
@pytest.mark.parametrize("damage", MANIFESTS)
def test_damaged_manifests_are_refused(damage: str, checksum_fits: bool, tmp_path: Path) -> None:
    path, _ = write(tmp_path, "ours2")
    os.mkfifo(tmp_path / "pipe")
    file = write_manifest(manifest_of([scanned(path)], tmp_path))
    values = json.loads(file.read_text())
    values["shards"][0] |= MANIFESTS[damage]
    if checksum_fits:
        values["checksum"] = _checksum({name: each for name, each in values.items() if name != "checksum"})
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"is damaged or|is damaged:|not a regular file"):
        check_store(tmp_path)


def check_store(folder: Path) -> None:
    if problems := shard_problems(read_manifest(str(folder)), "data.path=x"):
        raise ConfigError(problems)


def test_only_a_limited_number_of_shards_is_open(tmp_path: Path) -> None:
    entries = []
    for number in range(300):
        path = tmp_path / f"{number}.bin"
        np.asarray([number], np.uint16).tofile(path)
        entries.append(scanned(path))
    files = ShardFiles(manifest_of(entries, tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    assert [int(files.open(number).ids(0, 1)[0]) for number in range(300)] == list(range(300))
    assert len(os.listdir("/proc/self/fd")) - before <= 128


def test_layout_of_a_megatron_shard_is_that_of_its_index(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "megatron_int32")
    assert layout_of(path, 2) == (ShardFormat.megatron, 0, 4, len(flat(DOCUMENTS)))


MEGATRON = Path(sys.prefix) / "megatron"
"""Folder of the package, apart from site-packages: accelerate imports it wherever it finds it."""
WRITE_AND_READ = """
import sys
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

for name, dtype, largest in (("uint16", np.uint16, 50_000), ("int32", np.int32, 200_000)):
    random, prefix = np.random.default_rng(0), f"{sys.argv[1]}/{name}"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in random.integers(1, 4, 200):
        for length in random.integers(1, 80, sequences):
            builder.add_item(torch.from_numpy(random.integers(0, largest, length)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    read = IndexedDataset(prefix)
    np.savez(f"{prefix}.npz", ids=np.concatenate([read[index] for index in range(len(read))]),
             ends=np.cumsum(read.sequence_lengths)[read.document_indices[1:] - 1])
"""


@pytest.mark.skipif(not MEGATRON.exists(), reason="needs megatron-core, which .ci/run installs")
def test_ids_and_documents_equal_those_of_megatron(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(MEGATRON), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", WRITE_AND_READ, str(tmp_path)], env=environment, check=True, timeout=120)
    for name in ("uint16", "int32"):
        path, read = tmp_path / f"{name}.bin", np.load(tmp_path / f"{name}.npz")
        entry = _scan_shard(path, **layout_of(path)._asdict(), document_end=None)
        shard = Shard(entry, path, None)
        ids = shard.ids(0, entry.tokens)
        assert np.array_equal(ids, read["ids"])
        assert shard.ends(0, ids) == read["ends"].tolist()
        assert (entry.documents, entry.max_id) == (200, read["ids"].max())
