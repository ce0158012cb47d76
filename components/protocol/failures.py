"""Which rank failed first, and how that is told: as the last words of the run."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from components.config.errors import ConfigError
from components.protocol.role import ATTEMPT, RUN_DIR, WORKER
from components.protocol.run_files import LOGS, PRIVATE, RESULT, open_append, read_regular, replace_json
from components.terminal import print_text, printable

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
LOST_PEER_TYPES = ("DistNetworkError", "DistBackendError", "DistStoreError", "PeerFailure")
"""How a rank tells that another one is gone: a consequence, not the cause."""
STOOD_STILL = "StepTimeout"
"""What ends a run that makes no progress; its message names the rank that is missing, whoever reports it."""
IN_USE = "RunDirectoryInUse"
"""What rank 0 raises while another run trains in its run directory: nothing in it may be changed."""

LAST_LINES = 15


class Kind(StrEnum):
    """config: a person's mistake, told without a traceback; exception: anything else that was raised."""

    config = "config"
    exception = "exception"


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of its own failure, in logs/attempt_N/rank_K.error.json."""

    rank: int
    kind: Kind
    type: str
    message: str
    traceback: str
    time: float
    """Seconds since the epoch."""
    node: str = ""
    """Slurm's name of the node it ran on; empty outside Slurm."""

    @property
    def lost_peer(self) -> bool:
        """Whether the rank failed because another one was gone."""
        return is_lost_peer(self.type, self.message)

    @property
    def in_use(self) -> bool:
        """Whether the rank refused to train, because another run holds the run directory."""
        return self.type == IN_USE

    @property
    def stood_still(self) -> bool:
        """Whether the rank ended itself because the run made no progress."""
        return self.type == STOOD_STILL


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank's process ended."""

    rank: int
    status: int
    """As in subprocess: the negative number of a signal."""
    time: float
    """Seconds since the epoch when the launcher saw it."""
    asked: bool
    """Whether the launcher had told it to end before."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a run."""

    rank: int
    what: str
    """How it ended, such as `exited with status 1`."""
    report: Report | None

    @property
    def error(self) -> str:
        """What result.json says of it."""
        if self.report is None:
            return f"rank {self.rank}: {self.what}"
        if self.report.stood_still:
            return self.report.message
        return f"rank {self.rank}: {self.report.type}: {self.report.message}"


def error_file(logs: Path, rank: int) -> Path:
    """Return where a rank reports its failure."""
    return logs / f"rank_{rank}.error.json"


def log_file(logs: Path, rank: int) -> Path:
    """Return where a rank's output goes; rank 0's own goes to the terminal."""
    return logs / f"rank_{rank}.log"


def write_report(logs: Path, rank: int, error: BaseException) -> None:
    """Write the report of a rank that failed with `error`; say it here where the disk takes no report."""
    is_config = isinstance(error, ConfigError)
    report = Report(
        rank=rank,
        kind=Kind.config if is_config else Kind.exception,
        type=type(error).__name__,
        message=format_problems(error.problems) if isinstance(error, ConfigError) else str(error),
        traceback="" if is_config else "".join(traceback.format_exception(error)),
        time=time.time(),
        node=os.environ.get("SLURMD_NODENAME", ""),
    )
    target = error_file(logs, rank)
    try:
        with suppress(FileNotFoundError):  # a refused run: another rank has said so, and the directory is gone
            replace_json(target, asdict(report), PRIVATE)
    except OSError as refused:
        told = f"rank {rank}: {report.type}: {report.message}\n{target} could not be written: {refused}"
        with suppress(OSError):  # the output may go to the same disk
            print_text(told, file=sys.stderr, flush=True)


def read_reports(logs: Path) -> dict[int, Report]:
    """Return the reports of the ranks that have written one, by rank."""
    reports = {}
    for file in logs.glob("rank_*.error.json"):
        try:
            values = json.loads(read_regular(file))
            reports[values["rank"]] = Report(**{**values, "kind": Kind(values["kind"])})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            print_text(f"{file}: cannot be read: {error!r}", file=sys.stderr, flush=True)
    return reports


def first_failure(exits: Iterable[Exit], reports: dict[int, Report]) -> Failure | None:
    """Return the failure that the others followed from, or None where no rank failed by itself.

    A process that was killed (SIGKILL: out of memory, or a person) is the cause whatever others say of it. Then
    comes what was raised or died first; a rank that merely lost a peer comes last.
    """
    found = []
    for ended in exits:
        report = reports.get(ended.rank)
        if ended.status == 0 or (ended.asked and report is None):
            continue
        killed = ended.status == -signal.SIGKILL and not ended.asked
        order = 0 if killed else 2 if report and report.lost_peer else 1
        when = report.time if report else ended.time
        found.append((order, when, Failure(ended.rank, describe(ended.status), report)))
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def describe(status: int) -> str:
    """Return how a process ended, in words."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in {member.value for member in signal.Signals} else str(-status)
    hint = " (out of memory, or killed by a person)" if -status == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def format_problems(problems: list[str]) -> str:
    """Return one sentence as it is, several under a heading."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} problems with this run:", *problems])


def tell_problems(problems: list[str]) -> None:
    """Print what a person got wrong."""
    print_text(format_problems(problems), file=sys.stderr, flush=True)


def tell_failure(failure: Failure, logs: Path) -> None:
    """Print the traceback or the last lines of the rank that failed first, its name, and where the logs are."""
    report = failure.report
    if report is not None and report.kind == Kind.config:
        print_text(report.message, file=sys.stderr, flush=True)
        return
    if report is not None and report.stood_still:
        print_text(f"{report.message}\nlogs: {logs}", file=sys.stderr, flush=True)
        return
    told = report.traceback if report else _tail(log_file(logs, failure.rank))
    said = f": {report.type}: {report.message}" if report else ""
    where = f" on {report.node}" if report and report.node else ""
    lines = [*([told.rstrip()] if told else []), f"rank {failure.rank}{where} {failure.what}{said}", f"logs: {logs}"]
    print_text("\n".join(lines), file=sys.stderr, flush=True)


def _tail(log: Path) -> str:
    if not log.is_file():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([f"last lines of {log.name}:", *lines]) if lines else ""


def is_lost_peer(error_type: str, message: str) -> bool:
    """Return whether an exception of this type, with this message, means that another rank is gone."""
    return error_type in LOST_PEER_TYPES or any(sign in message for sign in LOST_PEER)


def attempt_logs(run_dir: Path, attempt: int) -> Path:
    """Return the folder of the logs of an attempt."""
    return run_dir / LOGS / f"attempt_{attempt}"


def first_to_report(logs: Path) -> bool:
    """Return whether this rank is the first to report how the run ended: ranks of the user's launcher all try to."""
    try:
        (logs / "reported").touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):
        return False
    return True


def report_hang(error: BaseException) -> None:
    """Record that a run makes no progress; the calling thread ends this rank afterwards, since main cannot raise.

    The stacks of all threads are written to the rank's log, and `error` to its report. Without a launcher of ours,
    `error` is also printed and written to result.json.
    """
    run_dir, rank = Path(os.environ[RUN_DIR]), int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    logs = attempt_logs(run_dir, int(os.environ[ATTEMPT]))
    with suppress(OSError), open_append(log_file(logs, rank), PRIVATE) as log:
        log.write(printable(f"{error}\n").encode())
        faulthandler.dump_traceback(log)
    write_report(logs, rank, error)
    if WORKER not in os.environ and first_to_report(logs):
        print_text(f"{error}\nlogs: {logs}", file=sys.stderr, flush=True)
        if not (run_dir / RESULT).exists():
            replace_json(run_dir / RESULT, {"status": "hung", "error": str(error)})
