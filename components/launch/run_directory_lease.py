"""A lease on a run directory, held by rank 0 of the one run that trains in it, on any machine.

A file lock (`.lock`) is not enough: the launcher of a batch job ends long before its ranks, and shared file systems may
lack locks, or keep those of a crashed node. The lease is the file with the highest number in `RUN/.lease`. Creating a
file with O_EXCL is atomic on shared file systems too, so each number has one owner. The holder rewrites its file every
few seconds as a heartbeat. A process that finds the file of another holder monitors it by its own clock: if the file
changes, the directory is in use; if it does not change for a minute, the holder is gone and the process creates the
next number. A holder that finds a higher number than its own has lost the lease, and exits at once.
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

from components.launch.clusters import jobs_by_id, stop_command
from components.protocol.failures import RunDirectoryInUse
from components.protocol.processes import HousekeepingThread, current_job, node_name
from components.protocol.run_files import LEASE, keep_only_file, numbers_in, own_folder
from components.protocol.safe_parsing import parse_json, read_regular
from components.terminal import print_text

_BEAT = 5.0
"""Heartbeat interval of a holder, in seconds."""
_SILENCE = 60.0
"""Seconds without a heartbeat after which a holder counts as gone; longer than plausible pauses of a live process."""
_POLL = 0.5
"""Polling interval for another holder's lease, in seconds."""
_LARGEST = 1 << 16
"""Maximum size of a lease file in bytes."""


class LeaseLost(RuntimeError):
    """Another run has taken over the run directory, after this one missed its heartbeats."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lease, as recorded in the lease file."""

    token: str
    host: str
    pid: int
    started: str
    """Start time of the process, in clock ticks since boot."""
    machine: str
    """Boot id and PID namespace; process ids are comparable if they are equal."""
    cluster: str = ""
    job: str = ""
    restart: int = 0
    """Batch job of the process, and how often it had been requeued."""
    beat: int = 0
    released: bool = False

    @classmethod
    def this(cls, environ: Mapping[str, str]) -> Holder:
        """Return this process as a holder."""
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

    def has_certainly_ended(self, me: Holder) -> bool:
        """Return whether this holder has certainly ended, without waiting for missing heartbeats."""
        if self.released:
            return True
        if self.job and (self.cluster, self.job) == (me.cluster, me.job) and self.restart < me.restart:
            return True  # a job never runs twice at once; a process left on a lost node exits by itself
        if self.machine and self.machine == me.machine:
            return _started(self.pid) != self.started
        if not self.job or self.cluster != me.cluster:
            return False
        found = jobs_by_id([self.job]).get(self.job)
        return found is not None and found.over

    def __str__(self) -> str:
        process = f"process {self.pid} on host {self.host}"
        return f"job {self.job} ({process})" if self.job else process


class _Lease:
    """The lease that this process holds on a run directory."""

    def __init__(self, file: Path, holder: Holder, lost: Callable[[LeaseLost], object]) -> None:
        self._file, self._holder, self._lost = file, holder, lost
        self._end = threading.Event()
        self._thread = HousekeepingThread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the lease, so that the next run does not have to wait."""
        self._end.set()
        self._thread.join()
        with suppress(OSError):
            if _newest(self._file.parent) == int(self._file.name):
                self._write(replace(self._holder, released=True))

    def _beat(self) -> None:
        while not self._end.wait(_BEAT):
            with suppress(OSError):  # full or unresponsive disk: the next beat retries
                newest = _newest(self._file.parent)
                if newest is not None and newest != int(self._file.name):
                    taker = _parse(_text(self._file.with_name(str(newest))) or "") or "another run"
                    self._lost(LeaseLost(f"run.dir={self._file.parent.parent}: {taker} has taken over the run"))
                    return
                self._holder = replace(self._holder, beat=self._holder.beat + 1)
                self._write(self._holder)

    def _write(self, holder: Holder) -> None:
        # In place: on a full disk, a file that was truncated first would stay empty.
        descriptor = os.open(self._file, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(asdict(holder)))
            file.truncate()


def end_process(error: LeaseLost) -> None:
    """Print the error and exit at once."""
    print_text(error, file=sys.stderr, flush=True)
    os._exit(1)


def take_lease(run_dir: Path, lost: Callable[[LeaseLost], object] = end_process) -> _Lease:
    """Acquire the lease on a run directory, once its previous holder is gone.

    Args:
        lost: Called in a thread when another run has taken over the directory; must end this process.

    Raises:
        RunDirectoryInUse: The holder of the lease is alive.
        OSError: The directory cannot be written.
    """
    folder, me = own_folder(run_dir / LEASE), Holder.this(os.environ)
    while True:
        newest = _newest(folder)
        if newest is not None:
            keep_only_file(folder / str(newest))
            _await_end(folder / str(newest), me)
        file = folder / str((newest or 0) + 1)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError:
            continue  # another start was faster: check its lease
        try:
            with os.fdopen(descriptor, "w") as opened:
                opened.write(json.dumps(asdict(me)))
        except OSError:  # a full disk: an empty lease would make the next start wait for the heartbeats of nobody
            file.unlink(missing_ok=True)
            raise
        if _newest(folder) == int(file.name):
            break
        file.unlink(missing_ok=True)  # a later start already created a higher number: retry
    for number in numbers_in(folder):
        if number < int(file.name):
            keep_only_file(folder / str(number))
            (folder / str(number)).unlink(missing_ok=True)
    return _Lease(file, me, lost)


def is_held(run_dir: Path) -> bool:
    """Return whether a run seems to train in a run directory, without waiting for a heartbeat and without a lock."""
    folder = run_dir / LEASE
    try:
        file = folder / str(_newest(folder))
        holder, silent = _parse(_text(file) or ""), time.time() - file.stat().st_mtime
    except OSError:
        return False
    if holder is None or holder.released:
        return False
    if holder.machine and holder.machine == _machine():
        return _started(holder.pid) == holder.started
    return silent < _SILENCE


def _await_end(file: Path, me: Holder) -> None:
    """Wait until the holder of a lease is gone. Raises RunDirectoryInUse at its first heartbeat."""
    first, began, reported = _text(file), time.monotonic(), False
    while (text := _text(file)) is not None:
        holder = _parse(text)
        if holder is not None and holder.has_certainly_ended(me):
            return
        if text != first and holder is not None:
            command = stop_command(holder.job) if holder.job else None
            end = f"end it with {command}" if command else "end it"
            raise RunDirectoryInUse(
                f"run.dir={file.parent.parent}: {holder} is training in it; wait for it to finish, {end}, or choose "
                "another run.dir"
            )
        silent = time.monotonic() - began
        if silent > _SILENCE:
            return
        if not reported and silent > 2 * _BEAT:
            reported = True
            print_text(
                f"run.dir={file.parent.parent}: its last run, {holder or 'of an unknown process'}, did not release it "
                f"and sends no heartbeats; taking over after {_SILENCE:g} s",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_POLL)


def _newest(folder: Path) -> int | None:
    return max(numbers_in(folder), default=None)


def _text(file: Path) -> str | None:
    """Return the contents of a lease file; None if it is missing, or another thing that a start has set aside."""
    if file.is_symlink():
        return None
    try:
        return read_regular(file, _LARGEST).decode(errors="replace")
    except FileNotFoundError:
        return None


def _parse(text: str) -> Holder | None:
    """Parse the contents of a lease file; return None if they are incomplete or damaged."""
    try:
        holder = Holder(**parse_json(text))
    except (ValueError, TypeError):
        return None
    types = {name: type(value) for name, value in asdict(Holder("", "", 0, "", "")).items()}
    return holder if types == {name: type(value) for name, value in asdict(holder).items()} else None


def _machine() -> str:
    """Return the boot id and PID namespace of this process; "" if they cannot be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return the start time of a process on this machine, in clock ticks since boot; None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
