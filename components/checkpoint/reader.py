"""The weights of a checkpoint, read block by block in one process; any mesh may have written them."""

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

from components.checkpoint.base_fingerprint import check_base_weights, fingerprint_by_blocks
from components.checkpoint.folders import BASE_FINGERPRINT, FOLDER, PUBLISHED, STATE, TEMPORARY, candidates
from components.checkpoint.load import SHOWN, compare_names, verify
from components.checkpoint.manifest import MANIFEST, Manifest, ManifestError
from components.checkpoint.tensors import AVERAGE, MODEL
from components.config.errors import ConfigError
from components.models.weights.shards import Index


@dataclass(frozen=True, slots=True)
class _StoredBlock:
    """A block of a tensor: its file, and its offset and size in each dim of the global tensor."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Stored name, global shape, dtype and blocks of a tensor."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: list[_StoredBlock]


def choose_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest checkpoint if it is a run directory.

    Raises:
        ConfigError: There is no checkpoint, or one of the run directory has no valid manifest: it might be the newest.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; give a run directory, or a checkpoint: RUN_DIR/checkpoints/step_N")
    if TEMPORARY in path.name:
        raise ConfigError(f"{path}: an unfinished save; give a complete checkpoint: RUN_DIR/checkpoints/step_N")
    if (path / MANIFEST).exists() or PUBLISHED.fullmatch(path.name):
        return path
    if not (path / FOLDER).is_dir():
        raise ConfigError(
            f"{path}: neither a checkpoint (no {MANIFEST}) nor a run directory (no {FOLDER}/); give one of them"
        )
    serials: dict[Path, int] = {}
    problems = []
    for candidate in candidates(path / FOLDER):
        try:
            serials[candidate] = Manifest.read(candidate).serial
        except ManifestError as error:
            problems.append(f"{candidate}: not a complete checkpoint: {error}; give the path of another one")
    if problems:
        raise ConfigError(problems)
    if not serials:
        raise ConfigError(f"{path}: no complete checkpoint in {FOLDER}/; give a run directory that has one")
    return max(serials, key=lambda candidate: serials[candidate])


class StoredWeights:
    """Parameters and buffers of a checkpoint, by their names in the model."""

    def __init__(self, path: Path, *, averaged: bool = False) -> None:
        """Verify every file of the checkpoint and read the safetensors headers. Raises ConfigError.

        Args:
            averaged: Read the moving average of the trained weights in place of the weights.
        """
        if problems := verify(path):
            raise ConfigError(f"{path}: not a complete checkpoint: {'; '.join(problems)}")
        self.manifest = Manifest.read(path)
        state = json.loads((path / STATE).read_text())
        self.extra: dict[str, Any] = state["extra"]
        self._base_fingerprint: str | None = state.get(BASE_FINGERPRINT)
        self._path = path
        self._tensors = _read_headers(path, MODEL)
        if averaged:
            average = _read_headers(path, AVERAGE)
            if not average:
                raise ConfigError(f"{path}: holds no moving average of the weights: its run had no training.ema_decay")
            self._tensors |= average

    def check(self, expected: Mapping[str, torch.Tensor]) -> None:
        """Compare the stored names and shapes with the tensors of a model. Raises ConfigError."""
        saved = self._tensors
        problems = compare_names(self._path, expected, saved)
        for name in saved.keys() & expected.keys():
            saved_shape, shape = saved[name].shape, tuple(expected[name].shape) or (1,)
            stored = sum(math.prod(block.sizes) for block in saved[name].blocks)
            if saved_shape != shape:
                problems.append(
                    f"checkpoint {self._path}: {name} is {saved_shape} in the checkpoint and {shape} in this model"
                )
            elif stored != math.prod(shape):
                problems.append(f"checkpoint {self._path}: {name} has {stored} of its {math.prod(shape)} values")
        if problems:
            raise ConfigError(sorted(problems)[:SHOWN])

    def check_base_weights(self, base: Mapping[str, torch.Tensor], read: Callable[[str, Index], torch.Tensor]) -> None:
        """Compare the stored fingerprint with that of the base weights that `read` loads. Raises ConfigError.

        Args:
            base: The base parameters; only names and shapes are used.
        """
        check_base_weights(self._path, self._base_fingerprint, fingerprint_by_blocks(base, read))

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Return the block `index` of a tensor in the stored dtype; nothing else is read. Raises OSError."""

        tensor = self._tensors[name]
        wanted = index or (slice(0, 1),)  # a scalar is stored with shape (1,)
        values = torch.empty([each.stop - each.start for each in wanted], dtype=tensor.dtype)
        for block in tensor.blocks:
            overlap = [
                (max(each.start, offset), min(each.stop, offset + size))
                for each, offset, size in zip(wanted, block.offsets, block.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in overlap):
                continue
            source = tuple(
                slice(start - offset, stop - offset)
                for (start, stop), offset in zip(overlap, block.offsets, strict=True)
            )
            target = tuple(
                slice(start - each.start, stop - each.start)
                for (start, stop), each in zip(overlap, wanted, strict=True)
            )
            # Open the file again for each block: while it is mapped, all pages read so far count as resident memory.
            try:
                with safe_open(block.file, framework="pt") as file:
                    values[target] = file.get_slice(tensor.key)[source]
            except (OSError, SafetensorError) as error:
                raise OSError(f"{block.file}: can no longer be read ({error})") from error
        return values if index else values[0]


def _read_headers(path: Path, prefix: str) -> dict[str, _StoredTensor]:
    """Return the stored tensors whose names have a prefix, by the rest of their names."""
    metadata = dcp.HuggingFaceStorageReader(str(path)).read_metadata()
    files: dict[MetadataIndex, Any] = metadata.storage_data
    tensors = {}
    for stored, described in metadata.state_dict_metadata.items():
        if not stored.startswith(prefix) or not isinstance(described, TensorStorageMetadata):
            continue
        blocks = [
            _StoredBlock(
                files[MetadataIndex(stored, chunk.offsets)].relative_path, tuple(chunk.offsets), tuple(chunk.sizes)
            )
            for chunk in described.chunks
        ]
        dtype = described.properties.dtype
        tensors[stored.removeprefix(prefix)] = _StoredTensor(stored, tuple(described.size), dtype, blocks)
    return tensors
