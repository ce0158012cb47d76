"""The launcher of a point, an ordinary one in a child process, and what it leaves in the point's record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from components.config.compose.sweep import override_of
from components.kernel_counters import killed_for_memory
from components.launch.rank import die_with
from components.launch.sweep.plan import Point, PointRecord, Sweep, write_record
from components.protocol.role import without_ranks
from components.protocol.run_files import PRIVATE, keep_only_folder, open_append

LAST_LINES = 15
"""Lines of a point's output kept in its record."""


class PointProcess:
    """The launcher of a point in a process group of its own, and the point's record, which it keeps up to date.

    Args:
        sweep: The sweep.
        point: The point to start.
        environment: Variables to set in addition to those of this process.
    """

    def __init__(self, sweep: Sweep, point: Point, environment: Mapping[str, str]) -> None:
        self._sweep, self._point = sweep, point
        self._killed_before = killed_for_memory()
        self.record = PointRecord(time.time())
        write_record(sweep, point, self.record)
        keep_only_folder(sweep.run_dir(point))
        with open_append(sweep.log(point), PRIVATE) as log:
            self._log_start = log.tell()
            sweep_process = os.getpid()
            self._process = subprocess.Popen(
                point_command(sweep, point),
                cwd=sweep.folder,
                env={**without_ranks(os.environ), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C then reaches only this process, which forwards it once
                preexec_fn=lambda: die_with(sweep_process),  # noqa: PLW1509 (other threads are idle ones of BLAS)
            )

    def has_ended(self) -> bool:
        """Return whether the launcher has exited; then its exit status and output are in the record."""
        if self._process.poll() is None:
            return False
        if self.record.status is None:
            self._conclude()
        return True

    def stop_early(self, reason: str) -> None:
        """Record the reason, and request the ordinary stop, which saves a checkpoint."""
        self.record = replace(self.record, stopped_early=reason)
        write_record(self._sweep, self._point, self.record)
        self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """Send a signal to the launcher, whose backend stops its ranks or job."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the launcher's process group; ranks are in other groups and end with their launcher."""
        if self._process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _conclude(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what the launcher may have left in its group
        self.record = replace(
            self.record,
            status=self._process.returncode,
            seconds=round(time.time() - self.record.started, 1),
            message=_tail(self._sweep.log(self._point), self._log_start),
            killed_for_memory=killed_for_memory() > self._killed_before,
        )
        write_record(self._sweep, self._point, self.record)


def point_command(sweep: Sweep, point: Point) -> list[str]:
    """Return the command that runs a point, as an argument list: no shell is involved."""
    run_dir = override_of("run.dir", str(sweep.run_dir(point)))
    return [sys.executable, str(sweep.file), *sweep.options, *point.overrides, run_dir]


def _tail(log: Path, start: int) -> str:
    """Return the last lines of a log from the offset `start`, without blank lines and the run directory line."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    kept = [line for line in lines if line.strip() and not line.startswith("run /")]
    return "\n".join(kept[-LAST_LINES:])
