"""The local backend: start and monitor ranks on this machine, and terminate all of them when the run ends.

Used instead of torch.distributed.run, which imports torch in the launcher (seconds, and hundreds of megabytes for the
duration of the run), turns every exit status into 1, is killed by SIGUSR2 without forwarding it to its ranks, and
leaves its port unbound between choosing and using it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from components.config.schema.recipes import RecipeConfig
from components.launch.backend import CheckedRun
from components.launch.machine import device_problems, usable_cores, visible_gpus
from components.launch.run_checks import MESH_KEYS, affects
from components.launch.run_directory import RunDirectory
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID
from components.protocol.failures import (
    Failure,
    Kind,
    RankExit,
    describe_exit,
    first_failure,
    print_failure,
    read_reports,
)
from components.protocol.processes import (
    CTRL_C_MESSAGE,
    DUMP_STACKS,
    DUMP_STACKS_WITHOUT_GIL,
    LAUNCHER_PID,
    WORKER,
    LocalRank,
    collected_signals,
    killed_for_memory,
    reserve_loopback_port,
    usable_memory,
    without_ranks,
)
from components.protocol.run_files import PRIVATE, log_file, open_append
from components.terminal import print_text

_POLL = 0.05
"""Polling interval for the ranks' processes, in seconds."""
_REPORTS_EVERY = 1.0
"""Polling interval for failure reports, in seconds: a rank that failed may hang before its process exits."""
_GRACE = 2.0
"""Seconds from the first failure to SIGTERM, in which the other ranks can fail by themselves and report it."""
_REFUSED_GRACE = 1.0
"""Seconds from a config error to SIGKILL, without SIGTERM: there is nothing to save."""
_STACKS_AFTER, _STACKS_WITHIN = 1.0, 1.5
"""Seconds from the report of a hang to the first request for stacks, and from each request to the next signal."""
_KILL_AFTER = 5.0
"""Seconds from SIGTERM, on which ranks save and stop, to SIGKILL."""


class LocalBackend:
    """Backend for this machine: ranks end with their launcher, which receives the user's signals."""

    runs_here = True

    def validate(
        self, cfg: RecipeConfig, processes: int, rejected: Collection[str], *, quick: bool = False
    ) -> tuple[list[str], list[str]]:
        """Check that this machine has enough GPUs, cores and memory."""
        if affects(rejected, MESH_KEYS):
            return [], []
        return device_problems(cfg, processes, visible_gpus(os.environ), usable_memory()), []

    def show(self, run: CheckedRun) -> None:
        """Print what would start."""
        cfg, processes = run.cfg, run.processes
        run_dir = cfg.run.dir or f"a new folder in outputs/{run.recipe.name}"
        print_text(
            f"cluster.dry_run={cfg.cluster.dry_run}: would start {processes} x {run.recipe.file}, mesh "
            f"{cfg.parallelism.resolve(processes)}, run directory {run_dir}",
            *run.notes,
            sep="\n",
        )

    def submit(self, run: CheckedRun, run_here: Callable[[], int]) -> int:
        """Run a single rank in this process, so that a debugger works; start several as processes and wait for them."""
        if run.processes > 1:
            return _run_ranks(run)
        store = reserve_loopback_port()
        port = store.getsockname()[1]
        local_rank = LocalRank(0, 1, port, store.detach(), run.directory.path, run.directory.attempt)
        for name in set(os.environ) - set(without_ranks(os.environ)):
            del os.environ[name]
        os.environ.update(allocator_defaults(os.environ) | local_rank.variables())
        return run_here()


def _run_ranks(run: CheckedRun) -> int:
    """Start the ranks, wait for all of them, report any failure, and return the exit status."""
    with collected_signals() as signals:
        ranks = RankProcesses(run.directory.logs)
        try:
            _start_ranks(ranks, run)
            ranks.watch(signals)
        finally:
            ranks.kill()
    return _conclude(ranks, run.directory)


class RankProcesses:
    """The rank processes on this machine or in this pod, their exits, and the signals sent to them."""

    def __init__(self, logs: Path, first: int = 0) -> None:
        self.logs = logs
        """Logs of the attempt."""
        self.first = first
        """Lowest rank of these processes."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self.exits: dict[int, RankExit] = {}
        self.stops: list[int] = []
        """Signals forwarded to the ranks, in order."""
        self.aborted = False
        self.plan: deque[tuple[float, signal.Signals]] = deque()
        """Signals to send to the remaining ranks after a failure, each with its delay in seconds after the previous."""
        self.next_signal = 0.0
        """Time of the first signal of `plan`, on the clock time.monotonic()."""
        self.end_requested = False
        self.next_report_check = 0.0
        self.killed_for_memory_before = killed_for_memory()

    def start(
        self, recipe: Path, environ: Mapping[str, str], output: IO[bytes] | None, store_fd: int | None = None
    ) -> None:
        """Start the next rank. Call from the main thread: PDEATHSIG ends a rank when the thread that started it ends.

        Each rank leads its own process group, so that a terminal's Ctrl-C reaches only the launcher, which forwards it
        once. Background process groups may write to the terminal (unless `stty tostop`), but reading would stop them,
        so their stdin is /dev/null.

        Args:
            recipe: The recipe's file.
            environ: All environment variables of the rank.
            output: File for stdout and stderr; None: those of this process.
            store_fd: Descriptor that the rank inherits.
        """
        process = subprocess.Popen(
            [sys.executable, str(recipe)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=() if store_fd is None else (store_fd,),
            process_group=0,
        )
        self.processes.append(process)

    def watch(self, signals: deque[int], poll: Callable[[], object] = lambda: None) -> None:
        """Forward signals and collect exits until every rank has ended, calling `poll` meanwhile."""
        while len(self.exits) < len(self.processes):
            while signals:
                self._forward(signals.popleft())
            self._collect()
            poll()
            if self.plan and time.monotonic() >= self.next_signal:
                self.end_requested = True
                self._send(self.plan.popleft()[1])
                self._schedule()
            time.sleep(_POLL)

    def kill(self) -> None:
        """Kill all remaining ranks and the processes that they started."""
        for process in self.processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def end(self) -> None:
        """End the ranks that are left, since the run cannot go on without others that were lost."""
        if not self.end_requested:
            self._set_plan((0.0, signal.SIGTERM), (_KILL_AFTER, signal.SIGKILL))

    def status_of(self, failure: Failure) -> str:
        """Return the status in result.json of a run that failed so."""
        if failure.report is not None:
            return failure.report.status
        killed = self.exits[failure.rank].status == -signal.SIGKILL
        return "oom" if killed and killed_for_memory() > self.killed_for_memory_before else "failed"

    def _forward(self, number: int) -> None:
        if number == signal.SIGINT and signal.SIGINT in self.stops:
            self.aborted = True
            self._set_plan((0.0, signal.SIGKILL))
            return
        if number == signal.SIGINT:
            print_text(f"\n{CTRL_C_MESSAGE}", file=sys.stderr, flush=True)
        self.stops.append(number)
        self._send(signal.Signals(number))

    def _collect(self) -> None:
        for rank, process in enumerate(self.processes, self.first):
            status = process.poll() if rank not in self.exits else None
            if status is None:
                continue
            stopped = -status in self.stops or (status == EXIT_INTERRUPTED and signal.SIGINT in self.stops)
            self.exits[rank] = RankExit(rank, status, time.time(), terminated=self.end_requested or stopped)
            if status != 0:
                self._plan_termination()
        if time.monotonic() >= self.next_report_check:
            self.next_report_check = time.monotonic() + _REPORTS_EVERY
            if any(report.kind != Kind.left for report in read_reports(self.logs).values()):
                self._plan_termination()

    def _plan_termination(self) -> None:
        """Plan the termination of the remaining ranks after a failure."""
        if self.plan or self.end_requested:
            return
        reports = read_reports(self.logs).values()
        if any(report.is_config for report in reports):
            self._set_plan((_REFUSED_GRACE, signal.SIGKILL))
        elif any(report.kind == Kind.hung for report in reports):
            self._set_plan(
                (_STACKS_AFTER, DUMP_STACKS),
                (0.0, signal.SIGCONT),  # a stopped rank must continue in order to write its stacks
                (_STACKS_WITHIN, DUMP_STACKS_WITHOUT_GIL),
                (_STACKS_WITHIN, signal.SIGKILL),
            )
        else:
            self._set_plan((_GRACE, signal.SIGTERM), (_KILL_AFTER, signal.SIGKILL))

    def _set_plan(self, *steps: tuple[float, signal.Signals]) -> None:
        self.plan = deque(steps)
        self._schedule()

    def _schedule(self) -> None:
        """Set the time of the next signal, relative to now: a delayed launcher then does not shorten a grace period."""
        if self.plan:
            self.next_signal = time.monotonic() + self.plan[0][0]

    def _send(self, number: signal.Signals) -> None:
        for rank, process in enumerate(self.processes, self.first):
            if rank in self.exits:
                continue
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)


def _start_ranks(ranks: RankProcesses, run: CheckedRun) -> None:
    """Start all ranks of a run, without inherited rank variables in their environment."""
    store = reserve_loopback_port()
    port = store.getsockname()[1]
    shared = without_ranks(os.environ) | {WORKER: "1", LAUNCHER_PID: str(os.getpid())}
    shared |= allocator_defaults(os.environ)
    for name, value in rank_defaults(run.processes).items():
        shared.setdefault(name, value)
    directory = run.directory
    with store:
        for rank in range(run.processes):
            store_fd = store.fileno() if rank == 0 else None
            local_rank = LocalRank(rank, run.processes, port, store_fd, directory.path, directory.attempt)
            with _output(directory.logs, rank) as output:
                ranks.start(run.recipe.file, shared | local_rank.variables(), output, store_fd)


@contextmanager
def _output(logs: Path, rank: int) -> Iterator[IO[bytes] | None]:
    """Open the log of a rank; None for rank 0, whose output is that of this process, which is kept in its log."""
    if rank == 0:
        yield None
        return
    with open_append(log_file(logs, rank), PRIVATE) as log:
        yield log


def _conclude(ranks: RankProcesses, directory: RunDirectory) -> int:
    """Report and record a failure, and return the exit status."""
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
    directory.conclude(ranks.status_of(failure), failure.error)  # before printing: stderr may be closed
    print_failure(failure, directory.logs, is_shown=failure.rank == 0)
    return report.kind.exit_status if report is not None else 1


def _stopped(ranks: RankProcesses, directory: RunDirectory) -> int:
    """Return the exit status of a run without a failure: 0 unless a signal ended ranks before they could handle it."""
    if all(ended.status == 0 for ended in ranks.exits.values()):
        return 0
    interrupted = signal.SIGINT in ranks.stops
    names = " and ".join(describe_exit(-number).removeprefix("was ended by ") for number in dict.fromkeys(ranks.stops))
    reason = f"stopped by {names} before it could save"
    directory.conclude("interrupted" if interrupted else "failed", reason)
    print_text(f"{reason}\nlogs: {directory.logs}", file=sys.stderr)
    return EXIT_INTERRUPTED if interrupted else 1


def rank_defaults(processes: int) -> dict[str, str]:
    """Return the ranks' default variables, which the user's override: CPU threads, unbuffered output, faulthandler."""
    threads = str(max(usable_cores() // processes, 1))
    return {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def allocator_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable of torch's allocator: as the user set it by its present or former name, else segments that
    grow. Unpacked rows have many lengths, for which segments of fixed size would leave gaps in the memory of a GPU."""
    value = environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return {"PYTORCH_ALLOC_CONF": value or "expandable_segments:True"}
