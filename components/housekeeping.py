"""Threads that go on while the run stands still, and whose reads and writes do not count as its progress."""

from __future__ import annotations

import threading
from pathlib import Path


class HousekeepingThread(threading.Thread):
    """A thread that writes at intervals whatever the run does, such as the one that renews the lease."""


def bytes_moved() -> tuple[int, int]:
    """Return the bytes that this process has moved from and to disks, and through system calls; zeros off Linux.

    What its living housekeeping threads moved is left out.
    """
    own = _housekeeping()
    while True:
        total = _read_io(Path("/proc/self/io"))
        before, own = own, _housekeeping()
        if own == before:  # else one of them wrote between the readings
            return total[0] - own[0], total[1] - own[1]


def _housekeeping() -> tuple[int, int]:
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
