"""Where the ids are in shards that other programs wrote: Megatron, nanoGPT, llm.c, OLMo (.npy), datatrove."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from components.data.token_store.manifest import ShardFormat
from components.data.token_store.shards import index_of, open_file, read_megatron_index
from components.protocol.safe_json import read_regular
from components.storage.stored_file import OpenFile

SUFFIXES = (".safetensors", ".bin", ".npy", ".ds")
"""Suffixes of shards. A .bin file with a .idx file next to it is Megatron's, any other nanoGPT's or llm.c's."""
_NPY_MAGIC = b"\x93NUMPY"
_LLMC_HEADER = 1024  # bytes: 256 int32, of which the first three are magic, version and number of tokens
_LLMC_ID_BYTES = {(20240520, 1): 2, (20240801, 7): 4}
_LARGEST_METADATA = 1 << 20  # bytes of the .metadata file of a .ds file
_GIVE_SIZE = "give id_bytes=2 for uint16 or 4 for uint32"


class ShardLayout(NamedTuple):
    """Format of a shard, and where its ids are."""

    format: ShardFormat
    offset: int
    """Byte of the first id."""
    id_bytes: int
    tokens: int


def layout_of(path: Path, id_bytes: int | None = None) -> ShardLayout:
    """Return the layout of a shard that another program wrote, from its suffix, its header and the files next to it.

    Args:
        id_bytes: Bytes of an id in files that do not store them; None: 2 for nanoGPT, unknown for others.

    Raises ValueError if the file is damaged or not supported, or OSError.
    """
    file = open_file(path)
    if path.suffix == ".bin" and path.with_suffix(".idx").exists():
        return _megatron(path, file)
    if path.suffix == ".ds":
        return _datatrove(path, file, id_bytes)
    if path.suffix == ".npy":
        if file.size >= len(_NPY_MAGIC) and file.read(len(_NPY_MAGIC), 0) == _NPY_MAGIC:
            return _npy(path, file)
        if id_bytes is None:  # OLMo's .npy files are the bare ids
            raise ValueError(f"{path}: has no NumPy header, so the size of its ids is unknown; {_GIVE_SIZE}")
    return _llmc(path, file) or _raw(path, file, ShardFormat.raw, id_bytes or 2)


def _megatron(path: Path, file: OpenFile) -> ShardLayout:
    index_path = index_of(ShardFormat.megatron, path)
    index_file = open_file(index_path)
    index = read_megatron_index(index_file, index_path)
    layout = _raw(path, file, ShardFormat.megatron, index.id_bytes)
    if index.sequences:
        length = struct.unpack("<i", index_file.read(4, index.pointers_at - 4))[0]
        pointer = struct.unpack("<q", index_file.read(8, index.documents_at - 8))[0]
        declared = pointer // index.id_bytes + length
        if declared != layout.tokens:
            raise ValueError(f"{path}: has {layout.tokens:,} tokens, {index_path.name} declares {declared:,}")
    return layout


def _datatrove(path: Path, file: OpenFile, id_bytes: int | None) -> ShardLayout:
    if path.with_name(f"{path.name}.loss").exists():
        raise ValueError(f"{path}: has a loss mask ({path.name}.loss), which token stores do not support")
    metadata = path.with_name(f"{path.name}.metadata")
    if metadata.exists():  # the first line is TOKENIZER|BYTES
        stated = read_regular(metadata, _LARGEST_METADATA).partition(b"\n")[0].rpartition(b"|")[2]
        id_bytes = int(stated) if stated in (b"2", b"4") else id_bytes
    if id_bytes is None:
        raise ValueError(f"{path}: has no {metadata.name}, so the size of its ids is unknown; {_GIVE_SIZE}")
    has_ends = index_of(ShardFormat.datatrove, path).exists()
    return _raw(path, file, ShardFormat.datatrove if has_ends else ShardFormat.raw, id_bytes)


def _npy(path: Path, file: OpenFile) -> ShardLayout:
    with path.open("rb") as content:
        version = np.lib.format.read_magic(content)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(content)
        offset = content.tell()
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.itemsize not in (2, 4) or dtype.byteorder == ">":
        raise ValueError(
            f"{path}: holds an array of shape {shape} and dtype {dtype}; must be one-dimensional, of integers with 2 "
            "or 4 bytes"
        )
    if file.size != offset + shape[0] * dtype.itemsize:
        raise ValueError(f"{path}: has {file.size:,} bytes, its header declares {offset + shape[0] * dtype.itemsize:,}")
    return ShardLayout(ShardFormat.raw, offset, dtype.itemsize, shape[0])


def _llmc(path: Path, file: OpenFile) -> ShardLayout | None:
    """Return the layout of a file with llm.c's header, or None if it has none. Raises ValueError if it is truncated."""
    if file.size < _LLMC_HEADER:
        return None
    magic, version, tokens = struct.unpack("<iii", file.read(12, 0))
    id_bytes = _LLMC_ID_BYTES.get((magic, version))
    if id_bytes is None:
        return None
    if file.size != (declared := _LLMC_HEADER + tokens * id_bytes):
        raise ValueError(f"{path}: has {file.size:,} bytes, its header declares {declared:,}")
    return ShardLayout(ShardFormat.raw, _LLMC_HEADER, id_bytes, tokens)


def _raw(path: Path, file: OpenFile, format: ShardFormat, id_bytes: int) -> ShardLayout:
    if file.size % id_bytes:
        raise ValueError(f"{path}: has {file.size:,} bytes, not a multiple of the {id_bytes} bytes of an id")
    return ShardLayout(format, 0, id_bytes, file.size // id_bytes)
