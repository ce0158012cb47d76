"""A copy of the code in the run directory: the job runs the code as submitted, regardless of later edits."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from components.project import COMPONENTS, PROJECT
from components.protocol.errors import ConfigError
from components.protocol.run_files import keep_only_folder

_LARGEST = 64 * 2**20
"""Maximum size of a snapshot in bytes; more is probably not only code."""

ROOT = COMPONENTS.parent
"""Folder of `components`: its copy is prepended to PYTHONPATH."""
_SUFFIXES = {".py", ".yaml", ".yml", ".json", ".toml", ".j2", ".txt", ".md", ".sh"}
_EXCLUDED = {"tests", "outputs", "__pycache__"}


def copied_recipe_path(recipe_file: Path, target: Path) -> Path:
    """Return the path of the recipe in a snapshot in `target`."""
    if recipe_file.is_relative_to(PROJECT):
        return target / recipe_file.relative_to(ROOT)
    return target / "recipe" / recipe_file.name


def copy_code(recipe_file: Path, target: Path) -> int:
    """Replace `target` by a copy of the project, and of the recipe's folder if it is outside; return the file count.

    In a git repository, copy tracked and new files, but not ignored ones. Elsewhere, and if the repository ignores the
    project or an outside recipe, copy code and text files: the whole project, but only the top level and the packages
    of the recipe's folder.

    Raises ConfigError if that is more than `_LARGEST` bytes.
    """
    copy, folder = copied_recipe_path(recipe_file, target), recipe_file.parent
    pairs = [(ROOT / name, target / name) for name in _project_files()]
    if not recipe_file.is_relative_to(PROJECT):
        names = _files(folder, include_all=False, recipe=recipe_file.name)
        pairs += [(folder / name, copy.parent / name) for name in names]
    pairs = list(dict.fromkeys([*pairs, (recipe_file, copy)]))
    size = sum(source.stat().st_size for source, _ in pairs)
    if size > _LARGEST:
        raise ConfigError(
            f"cluster.snapshot=true: the code at {PROJECT} and {folder} is {size / 2**20:.0f} MiB, more "
            f"than {_LARGEST // 2**20}; add files that are not code to .gitignore, or set cluster.snapshot=false"
        )
    # A file that no longer exists must not stay: Python prefers an old package to a new module of its name.
    fresh = target.with_name(f"{target.name}.new")
    keep_only_folder(fresh)
    shutil.rmtree(fresh, ignore_errors=True)
    for source, copied in pairs:
        new = fresh / copied.relative_to(target)
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, new)
    if target.exists():
        shutil.rmtree(target)
    fresh.rename(target)
    return len(pairs)


def _project_files() -> list[Path]:
    """Return the code files of Meshbook, relative to `ROOT`."""
    if PROJECT == ROOT:
        return _files(ROOT, include_all=True)
    installed = [file for folder in (COMPONENTS, PROJECT) for file in _walk(folder, include_all=True)]
    return [file.relative_to(ROOT) for file in installed]


def _files(folder: Path, *, include_all: bool, recipe: str | None = None) -> list[Path]:
    """Return the code files under `folder`, relative to it; `recipe` is one of them if it is an outside recipe."""
    listed = _git_files(folder)
    # A home directory may be a repository of dotfiles that ignores everything else: git then lists few files or none.
    if not listed or (recipe is not None and Path(recipe) not in listed):
        listed = [path.relative_to(folder) for path in _walk(folder, include_all=include_all)]
    return [name for name in listed if _is_code(name) and (folder / name).is_file()]


def _is_code(name: Path) -> bool:
    """Return whether to copy a file. Hidden files are excluded, since they may hold secrets (.env)."""
    return name.parts[0] not in _EXCLUDED and not any(part.startswith(".") for part in name.parts)


def _git_files(folder: Path) -> list[Path] | None:
    """Return the tracked and new files of a git repository; None without git or a repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]


def _walk(folder: Path, *, include_all: bool) -> list[Path]:
    """Return code and text files under `folder`; without `include_all`, only those at its top level and in packages."""
    found: list[Path] = []
    for path, folders, files in os.walk(folder):
        here = Path(path)
        folders[:] = sorted(
            name
            for name in folders
            if not (name.startswith(".") or name in _EXCLUDED or (here / name / "pyvenv.cfg").exists())
            and (include_all or (here / name / "__init__.py").exists())
        )
        found += [here / name for name in sorted(files) if Path(name).suffix in _SUFFIXES]
    return found
