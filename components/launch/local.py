"""The local backend: start ranks on this machine, watch them, and leave none behind when the run is over.

A spawner of our own rather than torch.distributed.run: that imports torch in the launcher (seconds, and hundreds of
megabytes for the life of the run), turns every exit status into 1, dies of SIGUSR2 without forwarding it to its
ranks, and its port is free to be taken between choice and use.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from components.config.schema.recipes import RecipeConfig
from components.launch.backend import CheckedRun, Job, Recipe
from components.launch.machine import device_problems, killed_for_memory, usable_cores, usable_memory, visible_gpus
from components.launch.run_checks import MESH_KEYS, decides
from components.launch.run_directory.directory import RunDirectory
from components.protocol.exit_codes import EXIT_HUNG, EXIT_INTERRUPTED, EXIT_INVALID
from components.protocol.failures import (
    Failure,
    Kind,
    RankExit,
    describe_exit,
    first_failure,
    print_failure,
    read_reports,
)
from components.protocol.role import LAUNCHER_PID, WORKER, LocalRank, without_ranks
from components.protocol.run_files import PRIVATE, log_file, open_append
from components.protocol.signals import CTRL_C_ANSWER, collected_signals
from components.terminal import print_text

POLL = 0.05
"""Seconds between two looks at the ranks."""
REPORTS_EVERY = 1.0
"""Seconds between two looks for the report of a rank that failed and hangs in its own end."""
GRACE = 2.0
"""Seconds that the others have to fail by themselves and to report it, before they get SIGTERM."""
REFUSED_GRACE = 1.0
"""The same after a config error: there is nothing to save, so SIGKILL follows at once."""
STACKS_AFTER, STACKS_WITHIN = 1.0, 3.0
"""The same after a hang, until SIGUSR1 requests stacks; and from there to SIGKILL."""
KILL_AFTER = 5.0
"""Seconds from SIGTERM, which ranks take as save and stop, to SIGKILL."""


class LocalBackend:
    """Runs on this machine. There are no jobs: ranks end with their launcher, which gets the signals of the user."""

    runs_here = True

    def validate(
        self, cfg: RecipeConfig, processes: int, refused: Collection[str], *, quick: bool = False
    ) -> tuple[list[str], list[str]]:
        """Check that this machine has the GPUs, cores and memory."""
        if decides(refused, MESH_KEYS):
            return [], []
        return device_problems(cfg, processes, visible_gpus(os.environ), usable_memory()), []

    def show(self, recipe: Recipe, cfg: RecipeConfig, processes: int, notes: list[str]) -> None:
        """Print what would start."""
        place = cfg.run.dir or f"a new folder in outputs/{recipe.name}"
        print_text(
            f"cluster.dry_run=true: would start {processes} x {recipe.file}, mesh "
            f"{cfg.parallelism.resolve(processes)}, run directory {place}",
            *notes,
            sep="\n",
        )

    def submit(self, run: CheckedRun, run_here: Callable[[], int]) -> int:
        """Run a single rank in this process, where a debugger works; start several, and wait for their end."""
        if run.processes > 1:
            return _run_ranks(run)
        port, store = _loopback_socket()
        place = LocalRank(0, 1, port, store.detach(), run.directory.path, run.directory.attempt)
        for name in set(os.environ) - set(without_ranks(os.environ)):
            del os.environ[name]
        os.environ.update(place.variables())
        return run_here()

    def job(self, run_dir: Path, *, search: bool = False) -> str | None:
        """Return None."""
        return None

    def state(self, jobs: Iterable[str]) -> dict[str, Job]:
        """Return nothing: no job is local."""
        return {}

    def stop(self, job: str) -> bool:
        """Return False: no job is local."""
        return False

    def stop_command(self, job: str) -> str | None:
        """Return None: no job is local."""
        return None


def _run_ranks(run: CheckedRun) -> int:
    """Start the ranks, wait for all of them, report a failure, and return the exit status."""
    with collected_signals() as signals:
        ranks = _Ranks(run.directory)
        try:
            ranks.start(run.recipe, run.processes)
            ranks.watch(signals)
        finally:
            ranks.kill()
    return _conclude(ranks, run.directory)


class _Ranks:
    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []
        self.exits: dict[int, RankExit] = {}
        self.stops: list[int] = []
        """Signals that were passed on, in order."""
        self.aborted = False
        self.plan: deque[tuple[float, signal.Signals]] = deque()
        """What to send to the remaining ranks once the run is lost, each so many seconds after the one before."""
        self.next_signal = 0.0
        """When the first of `plan` is due; seconds of time.monotonic()."""
        self.asked_to_end = False
        self.next_look_for_reports = 0.0
        self.killed_for_memory_before = killed_for_memory()

    def start(self, recipe: Recipe, processes: int) -> None:
        """Start the ranks from a clean environment.

        Each is the leader of its own process group: a terminal's Ctrl-C then reaches the launcher alone, which
        passes it on once. As background groups they may write to the terminal (unless `stty tostop`), but not
        read: a read would stop them, so their input is empty. They are started by the main thread, to whose life
        PDEATHSIG ties them.
        """
        port, store = _loopback_socket()
        shared = without_ranks(os.environ) | {WORKER: "1", LAUNCHER_PID: str(os.getpid())}
        for name, value in _defaults(processes).items():
            shared.setdefault(name, value)
        with store:
            for rank in range(processes):
                store_fd = store.fileno() if rank == 0 else None
                place = LocalRank(rank, processes, port, store_fd, self.directory.path, self.directory.attempt)
                with self._output(rank) as output:
                    process = subprocess.Popen(
                        [sys.executable, str(recipe.file)],
                        env=shared | place.variables(),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=() if store_fd is None else (store_fd,),
                        process_group=0,
                    )
                self.processes.append(process)

    def watch(self, signals: deque[int]) -> None:
        """Return when every rank has ended."""
        while len(self.exits) < len(self.processes):
            while signals:
                self._pass_on(signals.popleft())
            self._collect()
            if self.plan and time.monotonic() >= self.next_signal:
                self.asked_to_end = True
                self._send(self.plan.popleft()[1])
                self._schedule()
            time.sleep(POLL)

    def kill(self) -> None:
        """Leave no process behind, nor one that a rank has started."""
        for process in self.processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @contextmanager
    def _output(self, rank: int) -> Iterator[IO[bytes] | None]:
        """Rank 0 keeps the terminal; a pipe in between would take it from progress bars."""
        if rank == 0:
            yield None
            return
        with open_append(log_file(self.directory.logs, rank), PRIVATE) as log:
            yield log

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGINT and signal.SIGINT in self.stops:
            self.aborted = True
            self._end_by((0.0, signal.SIGKILL))
            return
        if number == signal.SIGINT:
            print_text(f"\n{CTRL_C_ANSWER}", file=sys.stderr, flush=True)
        self.stops.append(number)
        self._send(signal.Signals(number))

    def _collect(self) -> None:
        for rank, process in enumerate(self.processes):
            status = process.poll() if rank not in self.exits else None
            if status is None:
                continue
            stopped = -status in self.stops or (status == EXIT_INTERRUPTED and signal.SIGINT in self.stops)
            self.exits[rank] = RankExit(rank, status, time.time(), asked=self.asked_to_end or stopped)
            if status != 0:
                self._lose()
        if time.monotonic() >= self.next_look_for_reports:
            self.next_look_for_reports = time.monotonic() + REPORTS_EVERY
            if read_reports(self.directory.logs):
                self._lose()

    def _lose(self) -> None:
        """The run is lost: plan the end of the ranks that are left."""
        if self.plan or self.asked_to_end:
            return
        reports = read_reports(self.directory.logs).values()
        if any(report.is_config for report in reports):
            self._end_by((REFUSED_GRACE, signal.SIGKILL))
        elif any(report.kind == Kind.hung for report in reports):
            after = STACKS_AFTER  # a rank that was stopped must continue for a moment to write its stacks
            self._end_by((after, signal.SIGUSR1), (0.0, signal.SIGCONT), (STACKS_WITHIN, signal.SIGKILL))
        else:
            self._end_by((GRACE, signal.SIGTERM), (KILL_AFTER, signal.SIGKILL))

    def _end_by(self, *steps: tuple[float, signal.Signals]) -> None:
        self.plan = deque(steps)
        self._schedule()

    def _schedule(self) -> None:
        """Count from the signal sent last, so that a launcher that was delayed still leaves the ranks their time."""
        if self.plan:
            self.next_signal = time.monotonic() + self.plan[0][0]

    def _send(self, number: signal.Signals) -> None:
        for rank, process in enumerate(self.processes):
            if rank in self.exits:
                continue
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)


def _conclude(ranks: _Ranks, directory: RunDirectory) -> int:
    """Report a bad end of the run, and return the exit status."""
    reports = read_reports(directory.logs)
    failure = first_failure(ranks.exits.values(), reports)
    if ranks.aborted:
        directory.conclude("interrupted", "killed by a second Ctrl-C")
        print_text(f"interrupted twice: every process was killed\nlogs: {directory.logs}", file=sys.stderr)
        return EXIT_INTERRUPTED
    if failure is None:
        return _stopped(ranks, directory)
    report = failure.report
    if report is not None and report.is_config:
        if report.kind != Kind.in_use:
            directory.discard(report.message)
        print_failure(failure, directory.logs)
        return EXIT_INVALID
    directory.conclude(_status(ranks, failure), failure.error)  # first: the output may have no reader any more
    print_failure(failure, directory.logs)
    return EXIT_HUNG if report is not None and report.kind == Kind.hung else 1


def _status(ranks: _Ranks, failure: Failure) -> str:
    if failure.report is not None:
        return failure.report.status
    killed = ranks.exits[failure.rank].status == -signal.SIGKILL
    return "oom" if killed and killed_for_memory() > ranks.killed_for_memory_before else "failed"


def _stopped(ranks: _Ranks, directory: RunDirectory) -> int:
    """The status of a run without a failure: 0, unless a signal ended ranks that could not take it yet."""
    if all(ended.status == 0 for ended in ranks.exits.values()):
        return 0
    interrupted = signal.SIGINT in ranks.stops
    names = " and ".join(describe_exit(-number).removeprefix("was ended by ") for number in dict.fromkeys(ranks.stops))
    why = f"stopped by {names} before it could save"
    directory.conclude("interrupted" if interrupted else "failed", why)
    print_text(f"{why}\nlogs: {directory.logs}", file=sys.stderr)
    return EXIT_INTERRUPTED if interrupted else 1


def _loopback_socket() -> tuple[int, socket.socket]:
    """Bind a free port of the loopback interface, so that no other process takes it before rank 0 serves the store.

    It does not listen yet. A rank 0 that takes no notice of the descriptor can still listen on the port itself.
    """
    store = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    store.bind(("127.0.0.1", 0))
    return store.getsockname()[1], store


def _defaults(processes: int) -> dict[str, str]:
    """Return the variables that ranks get unless the user has set them: threads per rank, and unbuffered logs."""
    threads = str(max(usable_cores() // processes, 1))
    return {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
