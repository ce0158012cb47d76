"""Processes of a run: role, rank, node and batch job, from environment variables, and the signals that they receive.

Signals that request a save and a stop are recorded until the training loop handles them, or collected by a launcher.
Also the limits and counters that Linux keeps of a process (memory, CPU time, out-of-memory kills, bytes moved), and a
reserved port of the loopback interface, for the store of ranks that run on this machine.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

from components.protocol.errors import ConfigError

WORKER = "MESHBOOK_WORKER"
"""Set in ranks started by Meshbook's launcher or sbatch script."""
RUN_DIR = "MESHBOOK_RUN_DIR"
"""The run directory, absolute."""
ATTEMPT = "MESHBOOK_ATTEMPT"
"""Number of earlier starts of this run."""
STORE_FD = "MESHBOOK_STORE_FD"
"""Rank 0's descriptor of the loopback socket on which it serves the rendezvous store."""
STORE_FILE = "MESHBOOK_STORE_FILE"
"""File in which rank 0 of a batch job publishes address and secret of the rendezvous store."""
LAUNCHER_PID = "MESHBOOK_LAUNCHER_PID"
"""Process id of the launcher; ranks exit when it exits. On a launcher: of the process that called `meshbook.run`."""
JOB = "MESHBOOK_JOB"
"""Id of the job that a rank or pod belongs to, on Kubernetes or a scheduler of the user's own."""
EXPORTED = "MESHBOOK_EXPORTED"
"""JSON record of the rank variables that this process has set, with their previous values."""

_RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NUM_NODES", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEPID"),
    *("SLURM_TASKS_PER_NODE", "SLURM_GTIDS", "SLURM_TASK_PID"),
    *(WORKER, RUN_DIR, ATTEMPT, STORE_FD, STORE_FILE, LAUNCHER_PID, JOB, EXPORTED),
}
_RANK_PREFIXES = ("TORCHELASTIC_", "SLURM_STEP_", "PMI_", "PMIX_", "OMPI_")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
"""Signals that request a save and an exit with status 0: a preemption, a time limit or a closed terminal."""
_FORWARDED_SIGNALS = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that a launcher forwards to its processes. Ctrl-C also saves and stops; a second one aborts."""
DUMP_STACKS = signal.SIGUSR1
"""Requests the stacks of all threads of a rank; its launcher sends it when the run hangs."""
DUMP_STACKS_WITHOUT_GIL = signal.SIGQUIT
"""Sent after DUMP_STACKS; a rank that could not take the GIL, and so has not written its stacks, writes them now."""
CTRL_C_MESSAGE = "Ctrl-C: stopping after this step or the next; again to abort"
"""Printed at once on Ctrl-C, by the launcher or by a rank without one."""


class Role(StrEnum):
    """worker: a rank started by Meshbook; attached: one started by the user's torchrun or srun; launcher: no rank."""

    worker = "worker"
    attached = "attached"
    launcher = "launcher"


def detect_role(environ: Mapping[str, str]) -> Role:
    """Return the role of a process with these variables.

    A batch shell and `salloc` also set SLURM_PROCID=0 and SLURM_NTASKS, so only a step with several tasks has ranks.
    """
    numbered = bool(environ.get("RANK") and environ.get("WORLD_SIZE"))
    in_step = environ.get("SLURM_STEP_ID") or (whole_number(environ.get("SLURM_PROCID", "")) or 0) > 0
    tasks = environ.get(tasks_variable(environ), "")
    if (numbered or in_step) and environ.get(WORKER) and environ.get(RUN_DIR):
        return Role.worker
    if numbered or (in_step and (whole_number(tasks) or 0) > 1):
        return Role.attached
    return Role.launcher


def rank_and_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and world size from torchrun's variables, or else from Slurm's.

    Raises ConfigError if they are not numbers.
    """
    numbered = environ.get("RANK") and environ.get("WORLD_SIZE")
    names = ("RANK", "WORLD_SIZE") if numbered else ("SLURM_PROCID", tasks_variable(environ))
    rank, size = (whole_number(environ.get(name, "")) for name in names)
    if rank is None or size is None:
        name = names[0] if rank is None else names[1]
        raise ConfigError(f"{name}={environ.get(name, '')[:40]!r}: must be a whole number, as torchrun and srun set it")
    return rank, size


def current_rank(environ: Mapping[str, str]) -> int:
    """Return the rank of a process with these variables, 0 if none is set to a number."""
    return whole_number(environ.get("RANK") or environ.get("SLURM_PROCID") or "") or 0


def whole_number(text: str) -> int | None:
    """Return a count that is written in ASCII digits, as schedulers and torchrun do; None for any other text.

    `str.isdigit` accepts digits that `int` does not, and `int` others than these, but not very many of them.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def node_name(environ: Mapping[str, str]) -> str:
    """Return the scheduler's name of this node, else its host name."""
    return scheduler_node(environ) or socket.gethostname()


def scheduler_node(environ: Mapping[str, str]) -> str:
    """Return the scheduler's name of this node; empty outside a job."""
    return environ.get("SLURMD_NODENAME", "")


@dataclass(frozen=True, slots=True)
class _BatchJob:
    """Batch job of a process; the fields are empty outside one."""

    cluster: str
    id: str
    restart: int
    """Number of earlier requeues."""


def current_job(environ: Mapping[str, str]) -> _BatchJob:
    """Return the batch job of a process with these variables. Each attempt of a Kubernetes job counts as a requeue."""
    if job := environ.get(JOB):
        factory = job.partition("/")[0]
        if ":" in factory:  # module:Class of the user's own scheduler, which may start ranks again in a job
            return _BatchJob(cluster=factory, id=job, restart=0)
        return _BatchJob(cluster="Kubernetes", id=job, restart=whole_number(environ.get(ATTEMPT, "")) or 0)
    return _BatchJob(
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        id=environ.get("SLURM_JOB_ID", ""),
        restart=whole_number(environ.get("SLURM_RESTART_COUNT", "")) or 0,
    )


def tasks_variable(environ: Mapping[str, str]) -> str:
    """Return the variable with the step's number of tasks: SLURM_STEP_NUM_TASKS if set, else SLURM_NTASKS.

    They differ in the shell of `salloc` (LaunchParameters=use_interactive_step), a step of one task in which
    SLURM_NTASKS is the number of the job.
    """
    return "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of ranks, for a child process that is not a rank."""
    return {name: value for name, value in environ.items() if not reserved_for_ranks(name)}


def reserved_for_ranks(name: str) -> bool:
    """Return whether a variable describes a rank, so that a user must not set it for all ranks."""
    return name in _RANK_VARIABLES or name.startswith(_RANK_PREFIXES)


@dataclass(frozen=True, slots=True)
class LocalRank:
    """Rank of a run on this machine."""

    rank: int
    world_size: int
    port: int
    """Port on the loopback interface on which rank 0 serves the store."""
    store_fd: int | None
    """Descriptor of the socket bound to `port` on rank 0; None on other ranks."""
    run_dir: Path
    attempt: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the rank."""
        variables = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            RUN_DIR: str(self.run_dir),
            ATTEMPT: str(self.attempt),
        }
        return variables if self.store_fd is None else {**variables, STORE_FD: str(self.store_fd)}


class RecordedSignals:
    """Handler that records signals until the training loop installs its own handler and processes the recorded ones."""

    def __init__(self) -> None:
        self.arrived: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.arrived.append(number)


def set_handler(number: int, handler: Any) -> Any:
    """Set the handler of a signal and return the previous one; keep SIGHUP ignored under nohup."""
    previous = signal.getsignal(number)
    if number != signal.SIGHUP or previous != signal.SIG_IGN:
        signal.signal(number, handler)
    return previous


def record_stop_signals() -> None:
    """Record stop signals for the training loop instead of letting them end this process."""
    recorded = RecordedSignals()
    for number in STOP_SIGNALS:
        set_handler(number, recorded)


@contextmanager
def collected_signals() -> Iterator[deque[int]]:
    """Collect _FORWARDED_SIGNALS in the yielded deque instead of letting them end this process."""
    arrived: deque[int] = deque()

    def collect(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: set_handler(number, collect) for number in _FORWARDED_SIGNALS}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reserve_loopback_port() -> socket.socket:
    """Bind a free port of the loopback interface, so that no other process takes it before rank 0 serves the store.

    The socket does not listen, so rank 0 may listen on it or, while this process keeps it open, bind the port again.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


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
