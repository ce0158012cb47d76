"""Provenance of a start for environment.json: versions, git, command, host. No environment variables: secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.config.secrets import masked
from components.launch.machine import usable_cores

PACKAGES = ("meshbook", "torch", "transformers", "datasets", "hydra-core", "omegaconf", "safetensors", "gguf", "wandb")


def start_record(recipe: str, recipe_file: Path, processes: int, attempt: int) -> dict[str, Any]:
    """Return the versions, git state, command, host and devices of this start, without importing the packages."""
    return {
        "recipe": recipe,
        "recipe_file": str(recipe_file),
        "attempt": attempt,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *map(masked, sys.argv)]),
        "folder": os.getcwd(),
        "processes": processes,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": usable_cores(),
        "gpus": _gpu_names(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git": _git_state(recipe_file.parent),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu_names() -> list[str]:
    """Return the model names of all GPUs that the driver lists, including those hidden from the run."""
    names = []
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        models = [line.partition(":")[2].strip() for line in card.read_text().splitlines() if line.startswith("Model")]
        names += models[:1]
    return names


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and changed files of the recipe's git repository; None without git or a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no") or ""
    return {"commit": commit.strip(), "dirty": bool(changed.strip()), "changed": masked(changed).splitlines()}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
