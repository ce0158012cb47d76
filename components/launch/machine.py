"""This machine: its CPU cores, GPUs and health, the ranks of a run, and the variables that run.deterministic sets.

Libraries read these variables once, when CUDA starts.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from components.config.schema.cluster import Device
from components.config.schema.parallelism import AXES
from components.config.schema.recipes import RecipeConfig
from components.config.schema.run import RunConfig
from components.protocol.errors import raise_all
from components.protocol.run_files import LOGS

RANKS_PER_CORE = 4
"""Maximum number of local ranks per CPU core; more ranks only compete for the cores."""
RANK_BYTES = 256 * 2**20
"""Private memory of a rank in bytes after importing torch and transformers, before a model is loaded."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Variable with the devices that CUDA shows to a process."""
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable with the sizes of cuBLAS's buffers, which determine the order of its sums."""
_WORKSPACES = (":4096:8", ":16:8")
"""Values under which cuBLAS is deterministic. The second takes less memory and is slower."""
_SWITCHES = ("TORCHINDUCTOR_DETERMINISTIC", "FLASH_ATTENTION_DETERMINISTIC")
"""Switches of torch's compiler, which otherwise selects kernels by their measured time, and of flash-attn."""
_NEEDED_SHARED_MEMORY = 64 * 2**20
"""Minimum free bytes of /dev/shm, which data workers and NCCL use."""


def processes_of(cfg: RecipeConfig, gpus: int) -> int:
    """Return the number of ranks to start, on this machine or on a cluster.

    The largest number of cluster.nodes times cluster.procs_per_node if the latter is a number, which clusters require.
    For "auto": one rank per visible GPU; without GPUs or with cluster.device=cpu, the product of the mesh degrees,
    counting -1 as 1.
    """
    if cfg.cluster.procs_per_node != "auto":
        return cfg.cluster.most_nodes * int(cfg.cluster.procs_per_node)
    if gpus and cfg.cluster.device != Device.cpu:
        return gpus
    return math.prod(max(cfg.parallelism.degree(axis), 1) for axis in AXES)


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return the number of CUDA devices visible to a process with these variables, without initializing CUDA.

    If CUDA_VISIBLE_DEVICES is set, count its entries. Otherwise count the device files, or the GPUs that the driver
    lists in /proc.
    """
    if (listed := environ.get(VISIBLE_DEVICES)) is not None:
        return len(_listed_devices(listed))
    files = sum(1 for _ in (root / "dev").glob("nvidia[0-9]*"))
    return files or sum(1 for _ in (root / "proc/driver/nvidia/gpus").glob("*"))


def _listed_devices(listed: str) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES that CUDA uses, without spaces.

    They are numbers, or UUIDs of GPUs or of MIG devices like the first one. CUDA ignores the first other entry and what
    follows it (Slurm writes NoDevFiles), and uses no device if one is repeated.
    """
    kind = next((kind for kind in ("GPU-", "MIG-") if listed.strip().startswith(kind)), "")
    entries: list[str] = []
    for entry in map(str.strip, listed.split(",")):
        if not (entry.startswith(kind) if kind else entry[:1].isdecimal()):
            break
        if entry in entries:
            return []
        entries.append(entry)
    return entries


def device_problems(cfg: RecipeConfig, processes: int, gpus: int, memory: int | None = None) -> list[str]:
    """Return the problems of starting that many local ranks on this machine.

    Args:
        cfg: Config of the run.
        processes: Number of ranks to start.
        gpus: Number of visible GPUs.
        memory: Bytes that this process and its children may use; None if unknown.
    """
    if cfg.cluster.device == Device.cuda and not gpus:
        return ["cluster.device=cuda: no GPU is visible; set cluster.device=cpu, or check CUDA_VISIBLE_DEVICES"]
    if cfg.cluster.device != Device.cpu and gpus:
        if processes > 1 and (listed := os.environ.get(VISIBLE_DEVICES, "")).startswith("MIG-"):
            return [
                f"{VISIBLE_DEVICES}={listed}: {processes} processes on MIG devices, of which CUDA shows a process only "
                "the first and NCCL connects none; set cluster.procs_per_node=1, or run on whole GPUs"
            ]
        if processes <= gpus:
            return []
        return [
            f"cluster.procs_per_node={cfg.cluster.procs_per_node}: {processes} processes, but {gpus} visible GPUs; "
            "each process needs its own GPU; lower it, or set cluster.device=cpu"
        ]
    return [] if cfg.cluster.oversubscribe else _too_many_for_cpus(cfg, processes, memory)


def _too_many_for_cpus(cfg: RecipeConfig, processes: int, memory: int | None) -> list[str]:
    cores = usable_cores()
    if processes > RANKS_PER_CORE * cores:
        limit = f"the limit is {RANKS_PER_CORE} per core, {RANKS_PER_CORE * cores} on {cores} usable cores"
    elif memory is not None and processes * RANK_BYTES > memory:
        needed = f"{processes * RANK_BYTES / 2**30:.1f} GiB"
        limit = f"they need {needed} before loading a model, but only {memory / 2**30:.1f} GiB are usable"
    else:
        return []
    if cfg.cluster.procs_per_node != "auto":
        key, lower = f"cluster.procs_per_node={cfg.cluster.procs_per_node}", "lower it"
    else:
        largest = max(AXES, key=cfg.parallelism.degree)
        key = f"parallelism.{largest}={cfg.parallelism.degree(largest)}"
        lower = "lower it or another axis"
    return [f"{key}: {processes} processes on this machine; {limit}; {lower}, or set cluster.oversubscribe=true"]


def determinism_problems(run: RunConfig, environ: Mapping[str, str]) -> list[str]:
    """Return the problems of run.deterministic with the user's environment variables."""
    if not run.deterministic:
        return []
    problems = []
    if (value := environ.get(_WORKSPACE, _WORKSPACES[0])) not in _WORKSPACES:
        problems.append(
            f"run.deterministic=true: cuBLAS is not deterministic with {_WORKSPACE}={value}; unset the variable, or "
            f"set it to {' or '.join(_WORKSPACES)}"
        )
    problems += [
        f"run.deterministic=true: contradicts {name}={environ[name]}; unset the variable, or set it to 1"
        for name in _SWITCHES
        if environ.get(name, "1") != "1"
    ]
    return problems


def set_deterministic_variables(run: RunConfig, environ: MutableMapping[str, str]) -> None:
    """Set the variables if run.deterministic is set. Call it on a rank before CUDA starts.

    Raises ConfigError if the environment contradicts the setting.
    """
    if not run.deterministic:
        return
    raise_all(determinism_problems(run, environ))
    environ.setdefault(_WORKSPACE, _WORKSPACES[0])
    for name in _SWITCHES:
        environ[name] = "1"


def node_problems(run_dir: Path, gpus: int) -> list[str]:
    """Return the problems of this node for a run that needs that many GPUs on it."""
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
    if shared.is_dir() and shutil.disk_usage(shared).free < _NEEDED_SHARED_MEMORY:
        return [f"/dev/shm has less than {_NEEDED_SHARED_MEMORY // 2**20} MiB free"]
    return []
