"""Limits and counters that Linux keeps of this process: memory, CPU time, out-of-memory kills, bytes moved."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class HousekeepingThread(threading.Thread):
    """Thread that writes periodically even in a hung run, such as the renewal of the lease."""


def killed_for_memory(root: Path = Path("/")) -> int:
    """Return how many processes the kernel's OOM killer has ended; only differences between calls are meaningful.

    Read the counter of this process's control group, whose limit applies to batch jobs and containers, or else that of
    the machine. 0 if neither exists.
    """
    for file in (*_cgroup_files(root, ("memory.events", "memory.oom_control")), root / "proc/vmstat"):
        try:
            counts = dict(line.split() for line in file.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if counts.get("oom_kill", "").isdecimal():
            return int(counts["oom_kill"])
    return 0


def usable_memory(root: Path = Path("/")) -> int:
    """Return the memory limit of this process and its children in bytes: physical memory or the cgroup limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in _cgroup_files(root, ("memory.max", "memory.limit_in_bytes")):
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # another cgroup version, or no limit ("max")
            continue
    return min(limits)


def bytes_moved() -> tuple[int, int]:
    """Return the bytes that this process has transferred from and to disks, and through system calls.

    Bytes of live housekeeping threads are excluded. Both numbers are 0 on systems other than Linux.
    """
    excluded = _housekeeping_bytes()
    while True:
        total = _read_io(Path("/proc/self/io"))
        before, excluded = excluded, _housekeeping_bytes()
        if excluded == before:  # otherwise a housekeeping thread wrote in between: read again
            return total[0] - excluded[0], total[1] - excluded[1]


def _cgroup_files(root: Path, names: tuple[str, ...]) -> list[Path]:
    """Return candidate paths of cgroup files, v2 and v1: those of this process's group, then those of its ancestors.

    A limit of any ancestor applies: Slurm limits the job and its steps, systemd each user. The last candidates are at
    the root of the mount, which is the only group that a container contains.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount, folders = root / "sys/fs/cgroup", []
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if "memory" in controllers.split(","):
            folders += _and_ancestors(mount / "memory", path)
        elif not controllers:
            folders += _and_ancestors(mount, path)
    return [folder / name for folder in folders for name in names]


def _and_ancestors(mount: Path, path: str) -> list[Path]:
    """Return the folder of a control group and those of its ancestors, up to the root of the mount."""
    folder = mount / path.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(mount)]


def _housekeeping_bytes() -> tuple[int, int]:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, HousekeepingThread)]
    counts = [_read_io(Path(f"/proc/self/task/{thread.native_id}/io")) for thread in threads]
    return sum(disk for disk, _ in counts), sum(calls for _, calls in counts)


def _read_io(file: Path) -> tuple[int, int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0, 0
    counts = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return counts["read_bytes"] + counts["write_bytes"], counts["rchar"] + counts["wchar"]


class CpuLimitError(RuntimeError):
    """Code exceeded its CPU time limit."""


@contextmanager
def limited(seconds: float, size: int) -> Iterator[None]:
    """Limit the body to CPU time and memory beyond those of this process: raise CpuLimitError and MemoryError in it.

    The limit is on CPU time rather than wall time, so that a busy or suspended machine does not trigger it. That on
    memory is one on the address space (Linux only), which other threads share; to set it takes 20 us. Signal handlers
    run in the main thread only; in any other thread the body runs without limits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, (soft, hard) = signal.signal(signal.SIGVTALRM, _raise), resource.getrlimit(resource.RLIMIT_AS)
    # The timer repeats because code such as Jinja's constant folding swallows exceptions and tries again.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        if sys.platform == "linux":
            with open("/proc/self/statm", "rb", buffering=0) as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            most = [limit for limit in (soft, hard, used + size) if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min(most), hard))
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        finally:  # also if the signal arrives here
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _raise(number: int, frame: FrameType | None) -> None:
    raise CpuLimitError("the CPU time limit was reached")
