"""A lease on a run directory: rank 0 of one run trains in it at a time, on whichever machine it runs.

A lock of the file system (`.lock`) is not enough: the launcher of a batch job ends long before its ranks, and file
systems that nodes share may have no locks, or locks that outlive a crashed node. The lease is the newest numbered file
in `RUN/.lease`. Creating a file with O_EXCL is atomic on such file systems too, so a number has one owner. The holder
rewrites its file every few seconds. A process that finds the file of another holder watches it by its own clock: if it
changes, the holder is alive and the directory is in use; if it does not for a minute, the holder is gone and the next
number may be taken. A holder that finds a higher number than its own was believed to be gone, and ends at once.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from components.housekeeping import HousekeepingThread
from components.launch.clusters import jobs_by_id, stop_command
from components.protocol.failures import RunDirectoryInUse
from components.protocol.role import current_job, node_name
from components.protocol.run_files import LEASE
from components.terminal import print_text

BEAT = 5.0
"""Seconds between two beats of a holder."""
SILENCE = 60.0
"""Seconds without a beat after which a holder is gone: longer than a process is kept from running."""
LOOK = 0.5
"""Seconds between two looks at another's lease."""


class LeaseLost(RuntimeError):
    """Another run took the run directory over: this one had stopped beating."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The owner of a lease, as its file describes it."""

    token: str
    host: str
    pid: int
    started: str
    """Of the process, on its machine's clock."""
    machine: str
    """Boot and PID namespace: processes of equal machines see one another's ids."""
    cluster: str = ""
    job: str = ""
    restart: int = 0
    """Batch job that the process belongs to, and how often it was requeued before."""
    beat: int = 0
    released: bool = False

    @classmethod
    def this(cls, environ: Mapping[str, str]) -> Holder:
        """Return the holder that this process is."""
        job = current_job(environ)
        return cls(
            token=secrets.token_hex(8),
            host=node_name(environ),
            pid=os.getpid(),
            started=_started(os.getpid()) or "",
            machine=_machine(),
            cluster=job.cluster,
            job=job.id,
            restart=job.restart,
        )

    def is_known_to_be_gone(self, me: Holder) -> bool:
        """Return whether it is certain, without watching, that this holder does not train any more."""
        if self.released:
            return True
        if self.job and (self.cluster, self.job) == (me.cluster, me.job) and self.restart < me.restart:
            return True  # no scheduler runs a job twice; should a process be left on a lost node, it ends itself
        if self.machine and self.machine == me.machine:
            return _started(self.pid) != self.started
        if not self.job or self.cluster != me.cluster:
            return False
        found = jobs_by_id([self.job]).get(self.job)
        return found is not None and found.over

    def __str__(self) -> str:
        process = f"process {self.pid} on host {self.host}"
        return f"job {self.job} ({process})" if self.job else process


class Lease:
    """The lease that this process holds on a run directory."""

    def __init__(self, file: Path, holder: Holder, lost: Callable[[LeaseLost], object]) -> None:
        self._file, self._holder, self._lost = file, holder, lost
        self._end = threading.Event()
        self._thread = HousekeepingThread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let the next run have the directory at once."""
        self._end.set()
        self._thread.join()
        with suppress(OSError):
            if _newest(self._file.parent) == int(self._file.name):
                self._write(replace(self._holder, released=True))

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            with suppress(OSError):  # a disk that is full or does not answer: the next beat tries again
                newest = _newest(self._file.parent)
                if newest != int(self._file.name):
                    taker = _read(self._file.parent / str(newest)) or "another run"
                    self._lost(LeaseLost(f"run.dir={self._file.parent.parent}: {taker} has taken the run over"))
                    return
                self._holder = replace(self._holder, beat=self._holder.beat + 1)
                self._write(self._holder)

    def _write(self, holder: Holder) -> None:
        descriptor = os.open(self._file, os.O_WRONLY | os.O_TRUNC)
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(asdict(holder)))


def end_process(error: LeaseLost) -> None:
    """Print why, and end this process at once."""
    print_text(error, file=sys.stderr, flush=True)
    os._exit(1)


def take_lease(run_dir: Path, lost: Callable[[LeaseLost], object] = end_process) -> Lease:
    """Return the lease on a run directory, once the holder before is gone.

    Args:
        lost: Called in a thread when another run has taken the directory over; must end this process.

    Raises:
        RunDirectoryInUse: Another process trains in it.
        OSError: The directory cannot be written.
    """
    folder, me = run_dir / LEASE, Holder.this(os.environ)
    folder.mkdir(exist_ok=True)
    while True:
        newest = _newest(folder)
        if newest is not None:
            _await_end(folder / str(newest), me)
        file = folder / str((newest or 0) + 1)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError:
            continue  # another start was faster: look at its lease
        with os.fdopen(descriptor, "w") as opened:
            opened.write(json.dumps(asdict(me)))
        if _newest(folder) == int(file.name):
            break
        file.unlink(missing_ok=True)  # taken by a start that was slower than the one after it
    for number in _numbers(folder):
        if number < int(file.name):
            (folder / str(number)).unlink(missing_ok=True)
    return Lease(file, me, lost)


def _await_end(file: Path, me: Holder) -> None:
    """Return once the owner of a lease is gone. Raises RunDirectoryInUse as soon as it beats."""
    first, began, reported = _text(file), time.monotonic(), False
    while (text := _text(file)) is not None:
        holder = _parse(text)
        if holder is not None and holder.is_known_to_be_gone(me):
            return
        if text != first and holder is not None:
            command = stop_command(holder.job) if holder.job else None
            end = f"end it with {command}" if command else "end it"
            raise RunDirectoryInUse(
                f"run.dir={file.parent.parent}: {holder} trains in it; wait for its end, {end}, or choose another "
                "run.dir"
            )
        silent = time.monotonic() - began
        if silent > SILENCE:
            return
        if not reported and silent > 2 * BEAT:
            reported = True
            print_text(
                f"run.dir={file.parent.parent}: its last run, {holder or 'of an unknown process'}, left no end and is "
                f"silent; it is taken over after {SILENCE:g} s",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(LOOK)


def _newest(folder: Path) -> int | None:
    return max(_numbers(folder), default=None)


def _numbers(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir(folder) if name.isdigit()]


def _text(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace")
    except FileNotFoundError:
        return None


def _read(file: Path) -> Holder | None:
    return _parse(_text(file) or "")


def _parse(text: str) -> Holder | None:
    """Return the holder in the text of a lease; None if it is incomplete."""
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return when a process of this machine started, in the kernel's ticks; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
