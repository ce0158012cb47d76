"""A checkpoint's weights, whichever mesh wrote them, read block by block in one process that never holds them all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from components.checkpoint.base_fingerprint import check_frozen, fingerprint_of
from components.checkpoint.folders import FOLDER, FROZEN, PUBLISHED, STATE, TEMPORARY, candidates
from components.checkpoint.load import SHOWN, verify
from components.checkpoint.manifest import MANIFEST, Manifest, ManifestError
from components.checkpoint.tensors import MODEL
from components.config.errors import ConfigError

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block of a tensor that one rank wrote."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[_Piece]


def choose_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `path` is, or the newest one of the run directory that it is.

    Raises:
        ConfigError: There is none, or one of the run directory's cannot be read: which is the newest is not known.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; give a run directory, or a checkpoint: RUN_DIR/checkpoints/step_N")
    if TEMPORARY in path.name:
        raise ConfigError(f"{path}: a save that did not come to its end; give a complete checkpoint")
    if (path / MANIFEST).exists() or PUBLISHED.fullmatch(path.name):
        return path
    if not (path / FOLDER).is_dir():
        raise ConfigError(f"{path}: neither a checkpoint ({MANIFEST}) nor a run directory ({FOLDER}/)")
    serials: dict[Path, int] = {}
    problems = []
    for candidate in candidates(path / FOLDER):
        try:
            serials[candidate] = Manifest.read(candidate).serial
        except ManifestError as error:
            problems.append(f"{candidate}: not a whole checkpoint: {error}; give the path of another one")
    if problems:
        raise ConfigError(problems)
    if not serials:
        raise ConfigError(f"{path}: no complete checkpoint in {FOLDER}/")
    return max(serials, key=lambda candidate: serials[candidate])


class StoredWeights:
    """Parameters and buffers of a checkpoint under the model's names."""

    def __init__(self, path: Path) -> None:
        """Verify every bit of the checkpoint, and read the heads of its files. Raises ConfigError naming files."""
        if problems := verify(path):
            raise ConfigError(f"{path}: not a whole checkpoint: {'; '.join(problems)}")
        self.manifest = Manifest.read(path)
        state = json.loads((path / STATE).read_text())
        self.extra: dict[str, Any] = state["extra"]
        self._frozen: str | None = state.get(FROZEN)
        self._path = path
        self._tensors = _read_heads(path)

    def check(self, expected: Mapping[str, torch.Tensor]) -> None:
        """Compare with the tensors that a model has, by names and shapes. Raises ConfigError."""
        held = self._tensors
        problems = [
            f"checkpoint {self._path} {what}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
            for what, names in (
                ("lacks tensors of this model", [name for name in expected if name not in held]),
                ("holds tensors that this model does not have", [name for name in held if name not in expected]),
            )
            if names
        ]
        for name in held.keys() & expected.keys():
            there, here = held[name].shape, tuple(expected[name].shape) or (1,)
            stored = sum(math.prod(piece.sizes) for piece in held[name].pieces)
            if there != here:
                problems.append(f"checkpoint {self._path}: {name} is {there} there and {here} in this model")
            elif stored != math.prod(here):
                problems.append(f"checkpoint {self._path}: {name} has {stored} of its {math.prod(here)} values")
        if problems:
            raise ConfigError(sorted(problems)[:SHOWN])

    def check_frozen(self, frozen: Mapping[str, torch.Tensor], read: Callable[[str, Index], torch.Tensor]) -> None:
        """Compare the parameters that it was trained beside with what `read` reads of them now. Raises ConfigError."""
        check_frozen(self._path, self._frozen, fingerprint_of(frozen, read))

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Return a block of a tensor, as stored; only its bytes are read. Raises OSError."""

        tensor = self._tensors[name]
        wanted = index or (slice(0, 1),)  # a scalar is stored as one value in one dim
        block = torch.empty([each.stop - each.start for each in wanted], dtype=tensor.dtype)
        for piece in tensor.pieces:
            common = [
                (max(each.start, offset), min(each.stop, offset + size))
                for each, offset, size in zip(wanted, piece.offsets, piece.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in common):
                continue
            there = tuple(
                slice(start - offset, stop - offset)
                for (start, stop), offset in zip(common, piece.offsets, strict=True)
            )
            here = tuple(
                slice(start - each.start, stop - each.start) for (start, stop), each in zip(common, wanted, strict=True)
            )
            # Opened anew for each block: as long as a file is mapped, every page read counts as memory.
            try:
                with safe_open(piece.file, framework="pt") as file:
                    block[here] = file.get_slice(MODEL + name)[there]
            except (OSError, SafetensorError) as error:
                raise OSError(f"{piece.file}: cannot be read any more ({error})") from error
        return block if index else block[0]


def _read_heads(path: Path) -> dict[str, _Tensor]:
    metadata = dcp.HuggingFaceStorageReader(str(path)).read_metadata()
    files: dict[MetadataIndex, Any] = metadata.storage_data
    tensors = {}
    for stored, described in metadata.state_dict_metadata.items():
        if not stored.startswith(MODEL) or not isinstance(described, TensorStorageMetadata):
            continue
        pieces = [
            _Piece(files[MetadataIndex(stored, chunk.offsets)].relative_path, tuple(chunk.offsets), tuple(chunk.sizes))
            for chunk in described.chunks
        ]
        tensors[stored.removeprefix(MODEL)] = _Tensor(tuple(described.size), described.properties.dtype, pieces)
    return tensors
