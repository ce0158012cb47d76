"""Error reports of failed ranks, the choice of the root cause among them, and its printing at the end of the output.

The report of a hung rank contains the location of its main thread, and a thread that is inside a collective must be
found before exit. Python has no public interface for either: `sys._getframe` and `sys._current_frames` are CPython's.
No other module inspects frames.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from types import CodeType, FrameType

from components.protocol.errors import EXIT_CORRUPTED, EXIT_HUNG, EXIT_INVALID, ConfigError
from components.protocol.processes import ATTEMPT, RUN_DIR, WORKER, current_rank, scheduler_node
from components.protocol.run_files import (
    PRIVATE,
    RESULT,
    atomic_write_json,
    attempt_logs,
    log_file,
    open_append,
    record_result,
)
from components.protocol.safe_parsing import load_json
from components.protocol.secrets import masked
from components.terminal import fit, print_text, printable

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
"""Parts of the messages of ranks that lost a peer: a consequence, not the root cause."""
_TORCH_LOST_PEER = ("DistNetworkError", "DistBackendError", "DistStoreError")
"""torch's exceptions for a lost peer, by name, since this package does not import torch."""
_RAISED_BY_ALLOCATORS = {"RuntimeError", "OSError", "AcceleratorError", "DistBackendError"}
_ALLOCATOR_MESSAGES = (
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory: you tried to allocate",
    "cannot allocate memory",  # ENOMEM, of mmap and fork
    "out of memory",  # CUDA outside torch's allocator, NCCL
    "std::bad_alloc",
)
_LAST_LINES = 15
LEFT_EARLY = " before the end of the run"


class RunDirectoryInUse(ConfigError):
    """Use of a run directory in which another run trains; nothing in it may be changed."""


class _FaultyHost(RuntimeError):
    """Failure of a run because of one or several hosts; the message names the ranks, whichever rank reports it.

    Args:
        message: Text for the user.
        hosts: Hosts of the ranks at fault, if they are known.
    """

    def __init__(self, message: str, hosts: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.hosts = tuple(hosts)


class HungRun(_FaultyHost):
    """Run without progress; the hosts are those of the ranks that it waits for."""


class CorruptRank(_FaultyHost):
    """Run in which a rank computes wrong numbers without an error; raised on every rank."""


class StatedFailure(Exception):
    """Failure whose message says what happened and to which file or key; its traceback is in the rank's report only."""


class LostPeer(RuntimeError):
    """Failure or exit of another rank: a consequence, not the root cause."""


class LeftEarly(RuntimeError):
    """Exit of a rank with status 0 in the middle of a run, such as by `sys.exit()`: no failure if all ranks do it."""


class Kind(StrEnum):
    """Kind of a failure. config and in_use are errors of the user's input, printed without a traceback.

    hung and corrupted name the ranks at fault in their message, so neither a traceback nor the reporting rank is shown;
    stated ones are shown with the rank, without a traceback.
    """

    config = "config"
    in_use = "in_use"
    hung = "hung"
    corrupted = "corrupted"
    lost_peer = "lost_peer"
    left = "left"
    stated = "stated"
    exception = "exception"

    @property
    def names_ranks(self) -> bool:
        """Whether the message names the ranks at fault and their hosts (`_FaultyHost`)."""
        return self in (Kind.hung, Kind.corrupted)

    @property
    def exit_status(self) -> int:
        """Exit status of a run that ended by this kind of failure."""
        special = {
            Kind.config: EXIT_INVALID,
            Kind.in_use: EXIT_INVALID,
            Kind.hung: EXIT_HUNG,
            Kind.corrupted: EXIT_CORRUPTED,
        }
        return special.get(self, 1)


def kind_of(error: BaseException) -> Kind:
    """Return the kind of failure of an exception."""
    if isinstance(error, RunDirectoryInUse):
        return Kind.in_use
    if isinstance(error, ConfigError):
        return Kind.config
    if isinstance(error, HungRun):
        return Kind.hung
    if isinstance(error, CorruptRank):
        return Kind.corrupted
    if isinstance(error, LeftEarly):
        return Kind.left
    lost = isinstance(error, LostPeer) or type(error).__name__ in _TORCH_LOST_PEER
    if lost or any(text in str(error) for text in LOST_PEER):
        return Kind.lost_peer
    return Kind.stated if isinstance(error, StatedFailure) else Kind.exception


def is_out_of_memory(error_type: str, message: str) -> bool:
    """Return whether an exception of this type with this message is an out-of-memory error.

    MemoryError, torch's OutOfMemoryError and numpy's _ArrayMemoryError are recognized by name; torch's CPU allocator
    raises a plain RuntimeError.
    """
    if error_type.endswith("MemoryError"):
        return True
    lowered = message.lower()
    return error_type in _RAISED_BY_ALLOCATORS and any(text in lowered for text in _ALLOCATOR_MESSAGES)


def failure_status(kind: Kind, error_type: str, message: str) -> str:
    """Return the status in result.json for a run ended by an exception of this kind, type and message."""
    if kind.names_ranks:
        return str(kind)
    return "oom" if is_out_of_memory(error_type, message) else "failed"


@dataclass(frozen=True, slots=True)
class RankReport:
    """Error report of one rank, in logs/attempt_N/rank_K.error.json."""

    rank: int
    kind: Kind
    type: str
    message: str
    traceback: str
    time: float
    """Seconds since the epoch."""
    node: str = ""
    """The scheduler's name of the rank's node; empty outside a job."""
    faulty_hosts: list[str] = field(default_factory=list)
    """Hosts of the ranks that a hung run waits for, or that compute wrong numbers; a requeued job is moved away from
    them."""

    @property
    def is_config(self) -> bool:
        """Whether it is an error of the user's input, which has no traceback."""
        return self.kind in (Kind.config, Kind.in_use)

    @property
    def may_be_transient(self) -> bool:
        """Whether it need not occur again from the last checkpoint: a lost peer, or an error of a GPU."""
        return self.kind == Kind.lost_peer or self.is_gpu_error or "NCCL error" in self.message

    @property
    def is_gpu_error(self) -> bool:
        """Whether the rank's GPU failed, other than by running out of memory or by an assertion of a kernel."""
        of_gpu = self.type == "AcceleratorError" or "CUDA error" in self.message
        of_program = is_out_of_memory(self.type, self.message) or "device-side assert" in self.message
        return self.kind == Kind.exception and of_gpu and not of_program

    @property
    def status(self) -> str:
        """Status in result.json for a run ended by this failure."""
        return failure_status(self.kind, self.type, self.message)


@dataclass(frozen=True, slots=True)
class RankExit:
    """Exit of a rank's process."""

    rank: int
    status: int
    """Exit status as in subprocess: negative for a signal."""
    time: float
    """Seconds since the epoch at which the launcher detected it."""
    terminated: bool
    """Whether the launcher had sent it a signal to end."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Root cause of a failed run: the first failure."""

    rank: int
    what: str
    """How the process ended, such as `exited with status 1`."""
    report: RankReport | None

    @property
    def error(self) -> str:
        """Text of `error` in result.json."""
        if self.report is None:
            return f"rank {self.rank}: {self.what}"
        if self.report.kind.names_ranks:
            return self.report.message
        return f"rank {self.rank}: {self.report.type}: {self.report.message}"


def error_file(logs: Path, rank: int) -> Path:
    """Return the path of a rank's error report."""
    return logs / f"rank_{rank}.error.json"


def write_report(logs: Path, rank: int, error: BaseException) -> None:
    """Write the report of a rank that failed with `error`; print it if it cannot be written."""
    report = RankReport(
        rank=rank,
        kind=kind_of(error),
        type=type(error).__name__,
        message=masked(_format_problems(error.problems) if isinstance(error, ConfigError) else str(error)),
        traceback="" if isinstance(error, ConfigError) else masked("".join(traceback.format_exception(error))),
        time=time.time(),
        node=scheduler_node(os.environ),
        faulty_hosts=[*error.hosts] if isinstance(error, _FaultyHost) else [],
    )
    target = error_file(logs, rank)
    try:
        with suppress(FileNotFoundError):  # the config was rejected: another rank reported it and removed the directory
            atomic_write_json(target, asdict(report), PRIVATE)
    except OSError as refused:
        text = f"rank {rank}: {report.type}: {report.message}\n{target} could not be written: {refused}"
        with suppress(OSError):  # stderr may be on the same disk
            print_text(text, file=sys.stderr, flush=True)


def read_reports(logs: Path) -> dict[int, RankReport]:
    """Return the error reports by rank; print the files that cannot be read."""
    reports = {}
    for file in logs.glob("rank_*.error.json"):
        try:
            values = load_json(file)
            reports[values["rank"]] = RankReport(**{**values, "kind": Kind(values["kind"])})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            print_text(f"{file}: cannot be read: {error!r}", file=sys.stderr, flush=True)
    return reports


def first_failure(exits: Iterable[RankExit], reports: dict[int, RankReport]) -> Failure | None:
    """Return the root cause among the exits and reports of all ranks, or None if no rank failed by itself.

    A process killed by SIGKILL (out of memory, or by a person) is the root cause, whatever other ranks report. If none
    was, the earliest failure is. If ranks only lost a peer, it is a rank that exited with status 0 without a request,
    such as by `sys.exit()` in a recipe; ranks that lost a peer come last.
    """
    candidates = []
    for ended in exits:
        report = reports.get(ended.rank)
        if ended.terminated and report is None:
            continue
        killed = ended.status == -signal.SIGKILL and not ended.terminated
        left = ended.status == 0 or (report is not None and report.kind == Kind.left)
        order = 0 if killed else 2 if left else 3 if report and report.kind == Kind.lost_peer else 1
        when = report.time if report else ended.time
        what = f"{describe_exit(0)}{LEFT_EARLY}" if left else describe_exit(ended.status)
        what = "failed" if ended.terminated and not left else what
        candidates.append((order, when, Failure(ended.rank, what, report)))
    if all(order == 2 for order, *_ in candidates):
        return None
    return min(candidates, key=lambda entry: entry[:2])[2]


def describe_exit(status: int) -> str:
    """Return how a process with this exit status ended, such as `exited with status 1`."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in {member.value for member in signal.Signals} else str(-status)
    hint = " (out of memory, or killed by a person)" if -status == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def _format_problems(problems: list[str]) -> str:
    """Return a single problem unchanged, several under a heading with their number."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} problems with this run:", *problems])


def print_problems(problems: list[str]) -> None:
    """Print config errors to stderr, in lines of whole words if it is a terminal."""
    lines = _format_problems(problems).split("\n")
    print_text(*(fit(line) if sys.stderr.isatty() else line for line in lines), sep="\n", file=sys.stderr, flush=True)


def print_failure(failure: Failure, logs: Path, *, is_shown: bool = False) -> None:
    """Print the traceback or last log lines of the rank that failed first, the rank, and the folder of the logs.

    Args:
        is_shown: The output of the rank was on this console, so that its last lines are not repeated.
    """
    report = failure.report
    if report is not None and report.is_config:
        print_text(report.message, file=sys.stderr, flush=True)
        return
    if report is not None and report.kind.names_ranks:
        print_text(f"{report.message}\nlogs: {logs}", file=sys.stderr, flush=True)
        return
    tail = "" if report or is_shown else _tail(log_file(logs, failure.rank))
    body = report.traceback if report and report.kind != Kind.stated else tail
    raised = f": {report.type}: {report.message}" if report else ""
    where = f" on {report.node}" if report and report.node else ""
    lines = [*([body.rstrip()] if body else []), f"rank {failure.rank}{where} {failure.what}{raised}", f"logs: {logs}"]
    print_text("\n".join(lines), file=sys.stderr, flush=True)


def _tail(log: Path) -> str:
    if not log.is_file():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join([f"last lines of {log.name}:", *lines]) if lines else ""


def first_to_report(logs: Path) -> bool:
    """Return whether this rank is the first to report the end of the run.

    Under the user's own launcher every rank tries, and the one that creates the marker file wins.
    """
    try:
        (logs / "reported").touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):
        return False
    return True


def report_left(rank: int, step: int, error: SystemExit) -> None:
    """Record that a rank exits with status 0 in the middle of a run: other ranks may wait for it."""
    left = LeftEarly(f"main was left after step {step}, by sys.exit() or the like").with_traceback(error.__traceback__)
    write_report(attempt_logs(Path(os.environ[RUN_DIR]), int(os.environ[ATTEMPT])), rank, left)


def report_hang(error: BaseException) -> None:
    """Record that the run hangs; the calling thread then exits this rank, since the main thread cannot raise.

    The stacks of all threads go to the rank's log, and `error` to its report. Without Meshbook's launcher, `error` is
    also printed and written to result.json.
    """
    run_dir, rank = Path(os.environ[RUN_DIR]), current_rank(os.environ)
    logs = attempt_logs(run_dir, int(os.environ[ATTEMPT]))
    with suppress(OSError), open_append(log_file(logs, rank), PRIVATE) as log:
        log.write(printable(f"{error}\n").encode())
        faulthandler.dump_traceback(log)
    write_report(logs, rank, error)
    if WORKER not in os.environ and first_to_report(logs):
        print_text(f"{error}\nlogs: {logs}", file=sys.stderr, flush=True)
        if not (run_dir / RESULT).exists():
            record_result(run_dir, {"status": "hung", "error": str(error)})


def caller_code(levels: int) -> CodeType:
    """Return the code of the function `levels` above the one that calls this; 1 is its direct caller."""
    return sys._getframe(1 + levels).f_code


def thread_frames(thread: int | None) -> list[FrameType]:
    """Return the frames of a thread, the innermost first; empty once it has ended.

    Args:
        thread: `threading.Thread.ident`; None, as of a thread that was not started, gives no frames.
    """
    frame, frames = sys._current_frames().get(thread or 0), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def package_of(frame: FrameType) -> str:
    """Return the top-level package whose code a frame runs, empty for code without a module."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
