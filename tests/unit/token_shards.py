"""Writers of shards in the formats of other programs, from their descriptions, and of stores of them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from components.data.token_store.manifest import DENSEST_WINDOWS, Manifest, ShardEntry, ShardFormat, Vocabulary
from components.data.token_store.writer import _scan_shard, layout_of, read_entry, write_shard

EOS = 257
"""End-of-text token of the byte tokenizer."""


def documents_of(seed: int, count: int, largest: int = 60, ids: int = 256) -> list[list[int]]:
    """Return random documents, each of which ends with EOS."""
    random = np.random.default_rng(seed)
    return [[*random.integers(0, ids, int(length)).tolist(), EOS] for length in random.integers(0, largest, count)]


def flat(documents: list[list[int]]) -> list[int]:
    return [id for document in documents for id in document]


def write_megatron(path: Path, documents: list[list[int]], dtype: type, pieces: int = 1) -> None:
    """Write path (.bin) and its .idx; each document consists of up to `pieces` sequences."""
    lengths, index = list[int](), [0]
    for document in documents:
        cuts = [len(document) * piece // pieces for piece in range(pieces + 1)]
        lengths += [stop - start for start, stop in zip(cuts, cuts[1:], strict=False)]
        index.append(len(lengths))
    path.write_bytes(np.asarray(flat(documents), dtype).tobytes())
    item = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * item
    code = {np.int16: 3, np.int32: 4, np.uint16: 8}[dtype]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(index))
    arrays = (np.asarray(lengths, "<i4"), pointers.astype("<i8"), np.asarray(index, "<i8"))
    path.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))


def write_datatrove(path: Path, documents: list[list[int]], id_bytes: int) -> None:
    """Write path (.ds), its index and its metadata."""
    path.write_bytes(np.asarray(flat(documents), f"<u{id_bytes}").tobytes())
    np.cumsum([len(document) for document in documents]).astype("<u8").tofile(f"{path}.index")
    Path(f"{path}.metadata").write_text(f"some/tokenizer|{id_bytes}\n{len(flat(documents))}\n1 K")


def write_llmc(path: Path, documents: list[list[int]]) -> None:
    ids = flat(documents)
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + np.asarray(ids, "<u2").tobytes())


def scanned(path: Path, id_bytes: int | None = None, document_end: int | None = EOS) -> ShardEntry:
    """Return the manifest entry of a shard."""
    if path.suffix == ".safetensors":
        found = read_entry(path)
        assert found is not None
        return found[0]
    layout = layout_of(path, id_bytes)
    return _scan_shard(path, **layout._asdict(), document_end=document_end)


def store_of(folder: Path, shards: list[list[list[int]]], id_bytes: int = 2, **values: object) -> Manifest:
    """Write a store in Meshbook's format, one shard per list of documents, and return its manifest (not written)."""
    folder.mkdir(exist_ok=True)
    entries = []
    for number, documents in enumerate(shards):
        write_shard(folder / f"{number}.safetensors", [documents], id_bytes, {})
        entries.append(scanned(folder / f"{number}.safetensors"))
    return manifest_of(entries, folder, **values)


def manifest_of(
    entries: list[ShardEntry], folder: Path, vocabulary: Vocabulary | None = None, document_end: int | None = EOS
) -> Manifest:
    return Manifest(entries, vocabulary, document_end, folder)


def sparse_store(folder: Path, shards: int, rows: int, seq_len: int) -> Manifest:
    """Return a store of sparse files, each with `rows` rows of `seq_len` tokens of two bytes that are all 0.

    The hashes of the ids, a text of 16 digits per MiB, are left out: a reader must not compare them.
    """
    folder.mkdir(exist_ok=True)
    tokens = rows * seq_len + 1
    entries = []
    for number in range(shards):
        file = folder / f"{number}.bin"
        with file.open("wb") as content:
            content.truncate(2 * tokens)
        entries.append(
            ShardEntry(
                path=file.name, format=ShardFormat.raw, bytes=2 * tokens, offset=0, id_bytes=2, tokens=tokens,
                documents=1, max_id=0, hash=f"{number:032x}", densest=[0] * len(DENSEST_WINDOWS),
                hashes="0" * 16, index_hashes="",
            )
        )  # fmt: skip
    return Manifest(entries, None, None, folder)
