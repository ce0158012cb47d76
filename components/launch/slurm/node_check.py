"""Checks that run on every node before the ranks start: `python -m components.launch.slurm.node_check RUN_DIR GPUS`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from components.launch.machine import visible_gpus
from components.protocol.run_files import LOGS, REQUEUE, create_marker
from components.terminal import print_text

NEEDED_SHARED_MEMORY = 64 * 2**20
"""Minimum free bytes of /dev/shm, which data workers and NCCL use."""


def check_node() -> int:
    """Print one line per problem of this node; return 1 if there is any, else 0."""
    run_dir, gpus = Path(sys.argv[1]), int(sys.argv[2])
    # The stop request: there is nothing to save yet, so only leave the marker for the batch script.
    signal.signal(signal.SIGUSR2, lambda number, frame: create_marker(run_dir / REQUEUE))
    problems = node_problems(run_dir, gpus)
    for problem in problems:
        print_text(f"node {socket.gethostname()}: {problem}", file=sys.stderr, flush=True)
    return 1 if problems else 0


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


if __name__ == "__main__":
    sys.exit(check_node())
