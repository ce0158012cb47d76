"""Tensors of a Hugging Face model's safetensors files, read block by block."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from components.config.errors import ConfigError
from components.config.model_files import ModelFiles
from components.models.hub import explain_loading_error

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsTensors:
    """The tensors of safetensors files under their names on disk."""

    def __init__(self, paths: list[Path]) -> None:
        """Reads the headers only. Raises ConfigError naming a file that is missing or damaged."""
        self._path_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            shapes = _read_shapes(path)
            self._path_of |= dict.fromkeys(shapes, path)
            self._shapes |= shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes under the names on disk."""
        return self._shapes

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block of a tensor in its stored type; only its bytes are read."""
        from safetensors import safe_open

        # Opened anew for each block: as long as a file is mapped, every page read counts as this rank's memory.
        with safe_open(self._path_of[name], framework="pt") as file:
            return file.get_slice(name)[index].clone() if index else file.get_tensor(name).clone()


def find_safetensors(files: ModelFiles, revision: str | None) -> list[Path]:
    """Return the model's weight files, from its folder or downloaded from the hub.

    Raises:
        ConfigError: There are none, or they cannot be reached.
    """
    single = _find(files, SINGLE_FILE, revision)
    if single is not None:
        return [single]
    index = _find(files, INDEX_FILE, revision)
    if index is None:
        raise ConfigError(
            f"model.path={files.name_or_folder}: no {SINGLE_FILE} and no {INDEX_FILE}; convert its weights to "
            "safetensors, or set model.init=random to start from scratch"
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index}: not an index of safetensors files: {error!r}") from error
    paths = [_find(files, name, revision) for name in names]
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    if missing:
        raise ConfigError(f"model.path={files.name_or_folder}: {INDEX_FILE} names {', '.join(missing)}: no such file")
    return [path for path in paths if path is not None]


def _find(files: ModelFiles, name: str, revision: str | None) -> Path | None:
    if files.is_local:
        path = Path(files.name_or_folder) / name
        return path if path.is_file() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(files.name_or_folder, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise explain_loading_error(error, files, "model.path", "weights") from error
    return Path(found) if found else None


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error
