"""A copy of the code in the run directory: what was submitted is what runs, whatever is edited meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from components.config.errors import ConfigError

LARGEST = 64 * 2**20
"""Bytes of code that are still taken for code."""

PROJECT = Path(__file__).resolve().parents[3]
"""The folder of components/, recipes/ and conf/."""
_SUFFIXES = {".py", ".yaml", ".yml", ".json", ".toml", ".j2", ".txt", ".md", ".sh"}
_LEFT_OUT = {"tests", "outputs", "__pycache__"}


def place_of_copy(recipe_file: Path, target: Path) -> Path:
    """Return where a snapshot in `target` has the recipe."""
    if recipe_file.is_relative_to(PROJECT):
        return target / recipe_file.relative_to(PROJECT)
    return target / "recipe" / recipe_file.name


def copy_code(recipe_file: Path, target: Path) -> int:
    """Copy the project, and the recipe's own folder if it lies elsewhere, to `target`; return the number of files.

    Of a git repository: tracked and new files, none that git ignores. Elsewhere: files of code and text, of the
    recipe's folder only itself and the packages in it. Raises ConfigError where that is more than `LARGEST` bytes.
    """
    copy, folder = place_of_copy(recipe_file, target), recipe_file.parent
    pairs = [(PROJECT / name, target / name) for name in _files(PROJECT, whole=True)]
    if not recipe_file.is_relative_to(PROJECT):
        pairs += [(folder / name, copy.parent / name) for name in _files(folder, whole=False)]
    pairs = list(dict.fromkeys([*pairs, (recipe_file, copy)]))
    size = sum(source.stat().st_size for source, _ in pairs)
    if size > LARGEST:
        raise ConfigError(
            f"cluster.snapshot=true: the code at {PROJECT} and {folder} is {size / 2**20:.0f} MiB, more "
            f"than {LARGEST // 2**20}; have git ignore what is no code, or set cluster.snapshot=false"
        )
    for source, place in pairs:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place)
    return len(pairs)


def _files(folder: Path, *, whole: bool) -> list[Path]:
    """Return the code under `folder`, relative to it."""
    listed = _git_files(folder)
    if listed is None:
        listed = [path.relative_to(folder) for path in _walk(folder, whole)]
    return [name for name in listed if _is_code(name) and (folder / name).is_file()]


def _is_code(name: Path) -> bool:
    """Return whether to copy a file; hidden ones are left out, such as a .env with tokens."""
    return name.parts[0] not in _LEFT_OUT and not any(part.startswith(".") for part in name.parts)


def _git_files(folder: Path) -> list[Path] | None:
    """Tracked and new files of a git repository; None where there is none, or no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]


def _walk(folder: Path, whole: bool) -> list[Path]:
    found: list[Path] = []
    for path, folders, files in os.walk(folder):
        here = Path(path)
        folders[:] = sorted(
            name
            for name in folders
            if not (name.startswith(".") or name in _LEFT_OUT or (here / name / "pyvenv.cfg").exists())
            and (whole or (here / name / "__init__.py").exists())
        )
        found += [here / name for name in sorted(files) if Path(name).suffix in _SUFFIXES]
    return found
