"""The weights of a checkpoint, read block by block in one process; any mesh may have written them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from components.checkpoint.load import SHOWN, compare_names, verify
from components.checkpoint.manifest import BASE_FINGERPRINT, CheckpointError, Manifest, ManifestError
from components.checkpoint.stored_tensors import check_base_weights, find_checkpoint_tensors, fingerprint_by_blocks
from components.checkpoint.tensors import AVERAGE, MODEL
from components.models.weights.shards import Index
from components.protocol.errors import ConfigError
from components.protocol.run_files import (
    CHECKPOINT_MANIFEST,
    CHECKPOINT_STATE,
    CHECKPOINTS,
    TEMPORARY,
    checkpoint_folders,
    checkpoint_step,
)
from components.protocol.safe_json import load_json


def choose_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest checkpoint if it is a run directory.

    Raises:
        ConfigError: There is no checkpoint, or one of the run directory has no valid manifest: it might be the newest.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; give a run directory, or a checkpoint: RUN_DIR/checkpoints/step_N")
    if TEMPORARY in path.name:
        raise ConfigError(f"{path}: an unfinished save; give a complete checkpoint: RUN_DIR/checkpoints/step_N")
    if (path / CHECKPOINT_MANIFEST).exists() or checkpoint_step(path.name) is not None:
        return path
    if not (path / CHECKPOINTS).is_dir():
        raise ConfigError(
            f"{path}: neither a checkpoint (no {CHECKPOINT_MANIFEST}) nor a run directory (no {CHECKPOINTS}/); give "
            "one of them"
        )
    serials: dict[Path, int] = {}
    problems = []
    for candidate in checkpoint_folders(path / CHECKPOINTS):
        try:
            serials[candidate] = Manifest.read(candidate).serial
        except ManifestError as error:
            problems.append(f"{candidate}: not a complete checkpoint: {error}; give the path of another one")
    if problems:
        raise ConfigError(problems)
    if not serials:
        raise ConfigError(f"{path}: no complete checkpoint in {CHECKPOINTS}/; give a run directory that has one")
    return max(serials, key=lambda candidate: serials[candidate])


class StoredWeights:
    """Parameters and buffers of a checkpoint, by their names in the model."""

    def __init__(self, path: Path, *, averaged: bool = False) -> None:
        """Verify every file of the checkpoint and read the safetensors headers. Raises ConfigError.

        Args:
            averaged: Read the moving average of the trained weights in place of the weights.
        """
        try:
            problems = verify(path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        if problems:
            raise ConfigError(f"{path}: not a complete checkpoint: {'; '.join(problems)}")
        self.manifest = Manifest.read(path)
        state = load_json(path / CHECKPOINT_STATE)
        self.extra: dict[str, Any] = state["extra"]
        self._base_fingerprint: str | None = state.get(BASE_FINGERPRINT)
        self._path = path
        self._stored = find_checkpoint_tensors(path, self.manifest)
        self._names = self._with_prefix(MODEL)
        if averaged:
            average = self._with_prefix(AVERAGE)
            if not average:
                raise ConfigError(f"{path}: holds no moving average of the weights: its run had no training.ema_decay")
            self._names |= average

    def check(self, expected: Mapping[str, torch.Tensor]) -> None:
        """Compare the stored names and shapes with the tensors of a model. Raises ConfigError."""
        saved = {name: self._stored.by_name[stored] for name, stored in self._names.items()}
        problems = compare_names(self._path, expected, saved)
        for name in saved.keys() & expected.keys():
            saved_shape, shape = saved[name].shape, tuple(expected[name].shape) or (1,)
            stored = saved[name].numel
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
        stored = self._names[name]
        wanted = index or (slice(0, 1),)  # a scalar is stored with shape (1,)
        dtype = self._stored.by_name[stored].dtype
        values = torch.empty([each.stop - each.start for each in wanted], dtype=dtype)
        # Opens the files again for each block: while one is mapped, all pages read so far count as resident memory.
        self._stored.fill([(stored, wanted, values)])
        return values if index else values[0]

    def _with_prefix(self, prefix: str) -> dict[str, str]:
        """Return the stored names that have a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): name for name in self._stored.by_name if name.startswith(prefix)}
