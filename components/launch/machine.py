"""Cores, GPUs and memory of this machine, and how many processes a run starts on it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from components.config.schema.cluster import Device
from components.config.schema.parallelism import AXES
from components.config.schema.recipes import RecipeConfig

RANKS_PER_CORE = 4
"""Ranks of a local run that share a CPU core; more only wait for one another."""
RANK_BYTES = 256 * 2**20
"""Memory that a rank shares with no other once it has imported torch and transformers, before it has a model."""


def processes_of(cfg: RecipeConfig, gpus: int) -> int:
    """Return the number of ranks that are to be started, on this machine or by a cluster.

    cluster.nodes x cluster.procs_per_node if that is a number, as it must be on a cluster; else one per visible GPU;
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


def device_problems(cfg: RecipeConfig, processes: int, gpus: int, memory: int | None = None) -> list[str]:
    """Return why this machine cannot run that many processes of a local run, as sentences.

    Args:
        cfg: The run.
        processes: Ranks that are to be started here.
        gpus: Visible GPUs.
        memory: Bytes that this process and its children may use; None: unknown.
    """
    if cfg.cluster.device == Device.cuda and not gpus:
        return ["cluster.device=cuda: no GPU is visible here; set cluster.device=cpu, or see CUDA_VISIBLE_DEVICES"]
    if cfg.cluster.device != Device.cpu and gpus:
        return _too_many_for_gpus(cfg, processes, gpus) if processes > gpus else []
    return [] if cfg.cluster.oversubscribe else _too_many_for_cpus(cfg, processes, memory)


def _too_many_for_gpus(cfg: RecipeConfig, processes: int, gpus: int) -> list[str]:
    return [
        f"cluster.procs_per_node={cfg.cluster.procs_per_node}: {processes} processes, but {gpus} visible GPUs; "
        "each process needs its own; lower it, or set cluster.device=cpu"
    ]


def _too_many_for_cpus(cfg: RecipeConfig, processes: int, memory: int | None) -> list[str]:
    cores = usable_cores()
    if processes > RANKS_PER_CORE * cores:
        limit = f"at most {RANKS_PER_CORE} per core are started, {RANKS_PER_CORE * cores} on {cores} usable cores"
    elif memory is not None and processes * RANK_BYTES > memory:
        needed = f"{processes * RANK_BYTES / 2**30:.1f} GiB"
        limit = f"they take {needed} before they have a model, more than the {memory / 2**30:.1f} GiB there are"
    else:
        return []
    if cfg.cluster.procs_per_node != "auto":
        key, lower = f"cluster.procs_per_node={cfg.cluster.procs_per_node}", "lower it"
    else:
        largest = max(AXES, key=cfg.parallelism.degree)
        key = f"parallelism.{largest}={cfg.parallelism.degree(largest)}"
        lower = "lower it or another axis"
    return [f"{key}: {processes} processes on this machine; {limit}; {lower}, or set cluster.oversubscribe=true"]


def killed_for_memory(root: Path = Path("/")) -> int:
    """Return how many processes beside this one the kernel has killed so far because memory ran out.

    Counted in this process' control group (its limit is what a job of a cluster or a container runs into), else on
    the whole machine; 0 where nothing counts. Only a difference between two calls means something.
    """
    for file in (*_own_files(root, ("memory.events", "memory.oom_control")), root / "proc/vmstat"):
        try:
            counts = dict(line.split() for line in file.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if counts.get("oom_kill", "").isdigit():
            return int(counts["oom_kill"])
    return 0


def usable_memory(root: Path = Path("/")) -> int:
    """Return how many bytes this process and its children may use: the machine's, or its control group's limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in _own_files(root, ("memory.max", "memory.limit_in_bytes")):
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # not this version of control groups, or no limit ("max")
            continue
    return min(limits)


def _own_files(root: Path, names: tuple[str, ...]) -> list[Path]:
    """Where the control group's files may be; inside a container they lie at the mount's root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount, places = root / "sys/fs/cgroup", []
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if "memory" in controllers.split(","):
            places += [mount / "memory" / path.lstrip("/"), mount / "memory"]
        elif not controllers:
            places += [mount / path.lstrip("/"), mount]
    return [place / name for place in places for name in names]
