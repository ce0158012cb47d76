"""Bytes read and written by this process, without those of housekeeping threads, as a measure of progress."""

from __future__ import annotations

import threading
from pathlib import Path


class HousekeepingThread(threading.Thread):
    """Thread that writes periodically even in a hung run, such as the renewal of the lease."""


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
