"""Run a recipe's main on one rank, and write its failure report."""

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
from components.config.mesh_rules import fit_micro_batches
from components.config.schema.recipes import RecipeConfig
from components.launch.machine import set_deterministic_variables
from components.launch.recipe import Recipe
from components.launch.run_directory import RunDirectory, reported_by_path
from components.launch.run_directory_lease import LeaseLost, end_process, take_lease
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
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
from components.protocol.processes import (
    ATTEMPT,
    DUMP_STACKS,
    DUMP_STACKS_WITHOUT_GIL,
    LAUNCHER_PID,
    RUN_DIR,
    STOP_SIGNALS,
    STORE_FILE,
    current_rank,
    rank_and_size,
    record_stop_signals,
)
from components.protocol.run_files import (
    CANCELLED,
    PRIVATE,
    REQUEUE,
    attempt_logs,
    create_marker,
    current_config,
    log_file,
    open_append,
    read_result,
    record_result,
)
from components.terminal import keep_running, print_text, printable

_FLIGHT_RECORDER = "flight_recorder_rank_"
"""Prefix of the files in an attempt's logs to which NCCL dumps a rank's most recent collectives."""

_PR_SET_PDEATHSIG = 1


def _record_collectives(logs: Path) -> None:
    """Enable torch's flight recorder, with NCCL dumps of recent collectives to the attempt's logs on a timeout.

    Call before torch is imported, which reads these variables once. Variables set by the user take precedence.
    """
    settings = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(logs / _FLIGHT_RECORDER),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _dump_stacks_on_request() -> None:
    """Write the stacks of all threads to stderr on DUMP_STACKS, also while the main thread is in C++ code.

    A thread waits for the signal and holds the GIL while it writes, so that no other thread can change its stack: a
    signal handler that reads the stacks of running threads may crash. Only if no thread can take the GIL,
    DUMP_STACKS_WITHOUT_GIL has such a handler write them. Call before other threads start, which inherit the signal
    mask.
    """
    signal.signal(DUMP_STACKS_WITHOUT_GIL, signal.SIG_IGN)
    faulthandler.register(DUMP_STACKS_WITHOUT_GIL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {DUMP_STACKS})

    def dump() -> None:
        while True:
            signal.sigwait({DUMP_STACKS})
            faulthandler.dump_traceback()
            faulthandler.unregister(DUMP_STACKS_WITHOUT_GIL)  # it is ignored again

    threading.Thread(target=dump, name="dump_stacks", daemon=True).start()


def run_worker(recipe: Recipe) -> int:
    """Run main on a rank started by the local launcher or the batch script, and return the exit status.

    Failures are written to the attempt's logs, not to the terminal: the parent of the ranks reports the first one.
    """
    by_launcher = LAUNCHER_PID in os.environ
    if by_launcher:
        die_with(int(os.environ[LAUNCHER_PID]))
    else:
        record_stop_signals()
    (rank, world_size), run_dir = rank_and_size(os.environ), Path(os.environ[RUN_DIR])
    logs = attempt_logs(run_dir, int(os.environ[ATTEMPT]))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _redirect_output(log_file(logs, rank))  # torchrun's agent has one output for all its ranks
    keep_running(None if by_launcher and rank == 0 else "utf-8")  # the output of other ranks is a log
    if not by_launcher:
        os.environ[STORE_FILE] = str(logs / "store.json")
    _record_collectives(logs)
    _dump_stacks_on_request()

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            return
        write_report(logs, rank, error.with_traceback(_from_main(recipe, trace)))
        with suppress(OSError), open_append(log_file(logs, rank), PRIVATE) as log:  # the disk may be full
            log.write(printable("".join(traceback.format_exception(error))).encode())

    sys.excepthook = record
    try:
        # An attempt may have fewer ranks than the run was submitted for, and so other micro-batches.
        cfg = fit_micro_batches(read_frozen(current_config(run_dir), recipe.schema), world_size)
        restrict_new_files(cfg)
        set_deterministic_variables(cfg.run, os.environ)
        with _lease_held(run_dir, logs, rank):
            recipe.main(cfg)
    except ConfigError as error:
        write_report(logs, rank, error)
        return EXIT_INVALID
    for number in STOP_SIGNALS:  # the run has finished: a late signal would only spoil the exit status
        signal.signal(number, signal.SIG_IGN)
    result = read_result(run_dir) if rank == 0 and not by_launcher else {}
    if result.get("status") == "preempted":
        if (logs / CANCELLED).exists():  # recorded here, as the batch script may be killed before it can
            record_result(run_dir, {**result, "status": "cancelled"})
        else:
            create_marker(run_dir / REQUEUE)
    return 0


def run_here(recipe: Recipe, cfg: RecipeConfig, directory: RunDirectory) -> int:
    """Run main in this process, as the only rank or as a rank of the user's launcher; return the exit status.

    Other exceptions of main than config errors, Ctrl-C and those whose message says all are recorded and re-raised, for
    a debugger and the traceback.
    """
    os.environ |= {RUN_DIR: str(directory.path), ATTEMPT: str(directory.attempt)}
    _record_collectives(directory.logs)
    rank = current_rank(os.environ)
    try:
        set_deterministic_variables(cfg.run, os.environ)
        with _lease_held(directory.path, directory.logs, rank):
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
        status = _record_failure(directory, rank, error)
        if status is None:
            raise
        return status
    return 0


def _record_failure(directory: RunDirectory, rank: int, error: Exception) -> int | None:
    """Record an exception of main; return the exit status if its message says all, None if its traceback is needed."""
    kind, name = kind_of(error), type(error).__name__
    if kind == Kind.lost_peer and _was_rejected(directory.logs):
        print_text(f"rank {rank}: another rank rejected the config and prints the reason", file=sys.stderr)
        return EXIT_INVALID
    write_report(directory.logs, rank, error)
    if kind == Kind.corrupted:  # every rank raises it, and the traceback shows nothing
        if first_to_report(directory.logs):
            directory.conclude(str(kind), str(error))
            print_text(f"{error}\nlogs: {directory.logs}", file=sys.stderr, flush=True)
        return kind.exit_status
    left = [report for report in read_reports(directory.logs).values() if report.kind == Kind.left]
    if kind == Kind.lost_peer and left:
        reason = f"rank {left[0].rank}: {left[0].message}"
        print_text(reason, file=sys.stderr, flush=True)
        directory.conclude("failed", reason)
    reason = f"rank {rank}: {name}: {error}"
    directory.conclude(failure_status(kind, name, str(error)), reason)
    if kind != Kind.stated:
        return None
    print_text(f"{reason}\nlogs: {directory.logs}", file=sys.stderr, flush=True)
    return kind.exit_status


def end_rank(status: int) -> NoReturn:
    """Exit with `status` after joining threads, running exit functions and flushing output.

    The interpreter is not finalized: a daemon thread that returns from C++ code (a store operation, a collective)
    during finalization aborts the process with SIGABRT, and a successful run would count as failed.
    """
    # Private functions of CPython: the parts of Py_FinalizeEx that matter here, in its order.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a pipe without a reader
            stream.flush()
    os._exit(status)


def restrict_new_files(cfg: RecipeConfig) -> None:
    """Create files with owner-only permissions from now on if run.private is set; otherwise keep the user's umask."""
    if cfg.run.private:
        os.umask(0o077)


@contextmanager
def _lease_held(run_dir: Path, logs: Path, rank: int) -> Iterator[None]:
    """Hold the lease on the run directory, on rank 0. Raises RunDirectoryInUse if another run holds it."""
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
    """Return the traceback without the launcher's frames above main."""
    entry = trace
    while entry is not None and entry.tb_frame.f_code is not recipe.main.__code__:
        entry = entry.tb_next
    return entry or trace


def _redirect_output(log: Path) -> None:
    """Redirect stdout and stderr of this process, including output of C libraries, to a file."""
    with open_append(log, PRIVATE) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _was_rejected(logs: Path) -> bool:
    """Return whether another rank rejected the config: it wrote a report, or removed the new run directory."""
    return not logs.is_dir() or any(report.is_config for report in read_reports(logs).values())


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal when the thread that started this process ends; exit if `parent` has ended already.

    Linux only. Elsewhere, ranks of a killed launcher keep running until their next collective fails.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
