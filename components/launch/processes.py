"""How many processes a run has, and what they find here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from components.config.schema.cluster import Device
from components.config.schema.parallelism import AXES
from components.config.schema.recipes import RecipeConfig


def processes_of(cfg: RecipeConfig, gpus: int) -> int:
    """Return the number of ranks that are to be started, here or by Slurm.

    cluster.nodes x cluster.procs_per_node where that is a number, as it must be for Slurm; else one per visible GPU;
    without GPUs, or with cluster.device=cpu, the product of the stated mesh degrees, where -1 counts as 1.
    """
    if cfg.cluster.procs_per_node != "auto":
        return cfg.cluster.nodes * int(cfg.cluster.procs_per_node)
    if gpus and cfg.cluster.device != Device.cpu:
        return gpus
    return math.prod(max(cfg.parallelism.degree(axis), 1) for axis in AXES)


def usable_cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return how many CUDA devices a process with these variables sees, without asking CUDA.

    CUDA_VISIBLE_DEVICES decides where it is set: its entries up to the first -1, as CUDA reads it. Otherwise the
    device files count, or what the driver lists.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        entries = [entry.strip() for entry in listed.split(",")]
        ends = [index for index, entry in enumerate(entries) if entry in ("", "-1", "NoDevFiles")]
        return ends[0] if ends else len(entries)
    files = sum(1 for _ in (root / "dev").glob("nvidia[0-9]*"))
    return files or sum(1 for _ in (root / "proc/driver/nvidia/gpus").glob("*"))


def device_problems(cfg: RecipeConfig, processes: int, gpus: int) -> list[str]:
    """Return what the visible GPUs do not allow, as sentences."""
    if cfg.cluster.device == Device.cuda and not gpus:
        return ["cluster.device=cuda: no GPU is visible here; set cluster.device=cpu, or see CUDA_VISIBLE_DEVICES"]
    if cfg.cluster.device != Device.cpu and 0 < gpus < processes:
        return [
            f"cluster.procs_per_node={cfg.cluster.procs_per_node}: {processes} processes, but {gpus} visible GPUs; "
            "each process needs its own; lower it, or set cluster.device=cpu"
        ]
    return []
