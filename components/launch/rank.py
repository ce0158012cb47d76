"""Run the recipe's main on one rank, and record its failure."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from components.config.compose.frozen import read_frozen
from components.config.errors import ConfigError
from components.config.schema.recipes import RecipeConfig
from components.launch.backend import Recipe
from components.launch.run_directory.directory import RunDirectory
from components.launch.run_directory.filesystem import reported_by_path
from components.launch.run_directory.lease import LeaseLost, end_process, take_lease
from components.protocol.exit_codes import EXIT_INTERRUPTED, EXIT_INVALID
from components.protocol.failures import (
    Kind,
    RunDirectoryInUse,
    failure_status,
    first_to_report,
    kind_of,
    print_problems,
    read_reports,
    write_report,
)
from components.protocol.role import ATTEMPT, LAUNCHER_PID, RUN_DIR, STORE_FILE, current_rank, rank_and_size
from components.protocol.run_files import (
    CANCELLED,
    CONFIG,
    PRIVATE,
    REQUEUE,
    attempt_logs,
    create_marker,
    log_file,
    open_append,
    read_result,
    record_result,
)
from components.protocol.signals import STOP_SIGNALS, keep_stop_signals
from components.terminal import print_text, printable

FLIGHT_RECORDER = "flight_recorder_rank_"
"""Start of the names of files in an attempt's logs that hold a rank's last collectives."""

_PR_SET_PDEATHSIG = 1


def record_collectives(logs: Path) -> None:
    """Let torch keep the last collectives of this rank, and NCCL write them to the attempt's logs when one times out.

    Before torch is imported, which reads these variables once; what the environment sets stays.
    """
    settings = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(logs / FLIGHT_RECORDER),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def run_worker(recipe: Recipe) -> int:
    """Run main as a rank that our launcher or batch script started, and return the exit status.

    Failures go to the attempt's logs and not to the terminal: what started the ranks reports the first of them.
    """
    by_launcher = LAUNCHER_PID in os.environ
    if by_launcher:
        die_with(int(os.environ[LAUNCHER_PID]))
    else:
        keep_stop_signals()
    rank, run_dir = rank_and_size(os.environ)[0], Path(os.environ[RUN_DIR])
    logs = attempt_logs(run_dir, int(os.environ[ATTEMPT]))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _write_to(log_file(logs, rank))  # an agent has one output for all its ranks
    if not by_launcher:
        os.environ[STORE_FILE] = str(logs / "store.json")
    record_collectives(logs)
    faulthandler.register(signal.SIGUSR1)  # it writes the stacks of all threads, whatever they do, and harms nothing

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            return
        write_report(logs, rank, error.with_traceback(_from_main(recipe, trace)))
        with suppress(OSError), open_append(log_file(logs, rank), PRIVATE) as log:  # the disk may be full
            log.write(printable("".join(traceback.format_exception(error))).encode())

    sys.excepthook = record
    try:
        cfg = read_frozen(run_dir / CONFIG, recipe.schema)
        restrict_new_files(cfg)
        with _leased(run_dir, logs, rank):
            recipe.main(cfg)
    except ConfigError as error:
        write_report(logs, rank, error)
        return EXIT_INVALID
    for number in STOP_SIGNALS:  # the run is over: there is nothing left to stop, only an exit status to lose
        signal.signal(number, signal.SIG_IGN)
    result = read_result(run_dir) if rank == 0 and not by_launcher else {}
    if result.get("status") == "preempted":
        if (logs / CANCELLED).exists():  # the batch script may be killed before it can record that
            record_result(run_dir, {**result, "status": "cancelled"})
        else:
            create_marker(run_dir / REQUEUE)
    return 0


def run_here(recipe: Recipe, cfg: RecipeConfig, directory: RunDirectory) -> int:
    """Run main in this process, as the only rank or as one that the user's launcher started.

    Returns the exit status. What main raises is raised again, for a debugger and for Python to print.
    """
    os.environ |= {RUN_DIR: str(directory.path), ATTEMPT: str(directory.attempt)}
    record_collectives(directory.logs)
    rank = current_rank(os.environ)
    try:
        with _leased(directory.path, directory.logs, rank):
            recipe.main(cfg)
    except ConfigError as error:
        write_report(directory.logs, rank, error)
        if first_to_report(directory.logs):
            print_problems(error.problems)
            if not isinstance(error, RunDirectoryInUse):
                directory.discard(str(error))
        return EXIT_INVALID
    except KeyboardInterrupt:
        directory.conclude("interrupted", "stopped by SIGINT before it could save")
        print_text("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as error:
        if error.code not in (None, 0):
            directory.conclude("failed", f"rank {rank}: exited with status {error.code}")
        raise
    except Exception as error:
        kind, name = kind_of(error), type(error).__name__
        if kind == Kind.lost_peer and _was_refused(directory.logs):
            print_text(f"rank {rank}: the config was refused on another rank, which prints the reason", file=sys.stderr)
            return EXIT_INVALID
        write_report(directory.logs, rank, error)
        directory.conclude(failure_status(kind, name, str(error)), f"rank {rank}: {name}: {error}")
        raise
    return 0


def end_rank(status: int) -> NoReturn:
    """End this process with `status`, without finalizing the interpreter.

    A daemon thread that comes back from C++ code (an operation on the ranks' store, a collective) while Python is
    being finalized ends the process with SIGABRT, and a run that succeeded would count as failed. What finalization
    does for the user happens all the same: other threads are awaited, exit functions run, output is flushed.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit(status)


def restrict_new_files(cfg: RecipeConfig) -> None:
    """Let this process create files for its owner only, if the run is private; otherwise the user's umask decides."""
    if cfg.run.private:
        os.umask(0o077)


@contextmanager
def _leased(run_dir: Path, logs: Path, rank: int) -> Iterator[None]:
    """Hold the lease on the run directory on rank 0. Raises RunDirectoryInUse while another run trains in it."""
    if rank != 0:
        yield
        return

    def end(error: LeaseLost) -> None:
        write_report(logs, rank, error)
        end_process(error)

    with reported_by_path(run_dir):
        lease = take_lease(run_dir, end)
    try:
        yield
    finally:
        lease.release()


def _from_main(recipe: Recipe, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from main on, without the launcher's frames."""
    entry = trace
    while entry is not None and entry.tb_frame.f_code is not recipe.main.__code__:
        entry = entry.tb_next
    return entry or trace


def _write_to(log: Path) -> None:
    """Let all output of this process, of its libraries too, go to a file."""
    with open_append(log, PRIVATE) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _was_refused(logs: Path) -> bool:
    """Return whether the config was refused on another rank, which reported it, or removed a new run directory."""
    return not logs.is_dir() or any(report.is_config for report in read_reports(logs).values())


def die_with(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends; leave at once if it has already.

    Only Linux can do that. Elsewhere a rank outlives a launcher that is killed, until its next collective fails.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
