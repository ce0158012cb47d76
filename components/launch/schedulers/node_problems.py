"""Checks that run on every node, or in every pod, before the ranks start."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from components.launch.machine import visible_gpus
from components.protocol.run_files import LOGS

NEEDED_SHARED_MEMORY = 64 * 2**20
"""Minimum free bytes of /dev/shm, which data workers and NCCL use."""


def node_problems(run_dir: Path, gpus: int) -> list[str]:
    """Return the problems of this node or pod for a run that needs that many GPUs on it."""
    return [*_folder_problems(run_dir), *_gpu_problems(gpus), *_memory_problems()]


def _folder_problems(run_dir: Path) -> list[str]:
    if not run_dir.is_dir():
        return [f"cannot access the run directory {run_dir}; put run.dir on a file system that all nodes share"]
    try:
        with tempfile.TemporaryFile(dir=run_dir / LOGS) as file:
            file.write(b"written")
    except OSError as error:
        return [f"cannot write to the run directory {run_dir}: {error.strerror}"]
    return []


def _gpu_problems(gpus: int) -> list[str]:
    if not gpus:
        return []
    seen = visible_gpus(os.environ)
    if seen < gpus:
        return [f"has {seen} visible GPUs, but cluster.procs_per_node={gpus} requires one per process"]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return ["nvidia-smi did not respond within 60 s: a GPU may hang"]
    return [f"nvidia-smi failed: {listed.stderr.strip() or listed.stdout.strip()}"] if listed.returncode else []


def _memory_problems() -> list[str]:
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < NEEDED_SHARED_MEMORY:
        return [f"/dev/shm has less than {NEEDED_SHARED_MEMORY // 2**20} MiB free"]
    return []
