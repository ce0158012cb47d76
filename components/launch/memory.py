"""How much memory there is, and whether it ran out: by what a rank raised, or by the kernel's count of processes killed
for it."""

from __future__ import annotations

import os
from pathlib import Path

_RAISED_BY_ALLOCATORS = {"RuntimeError", "OSError", "AcceleratorError", "DistBackendError"}
_SAID_BY_ALLOCATORS = (
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory: you tried to allocate",
    "cannot allocate memory",  # ENOMEM, of mmap and fork
    "out of memory",  # CUDA outside torch's allocator, NCCL
    "std::bad_alloc",
)


def is_out_of_memory(error_type: str, message: str) -> bool:
    """Whether an exception of this type, with this message, says that memory ran out.

    MemoryError, torch's OutOfMemoryError and numpy's _ArrayMemoryError say it by their names; the CPU allocator of
    torch raises a plain RuntimeError.
    """
    if error_type.endswith("MemoryError"):
        return True
    said = message.lower()
    return error_type in _RAISED_BY_ALLOCATORS and any(sign in said for sign in _SAID_BY_ALLOCATORS)


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
