"""The end of an attempt: `python -m components.launch.slurm.conclude RUN_DIR ATTEMPT STATUS`.

Prints which rank failed first as the last entry of the job's log, writes result.json if no rank did, and exits with the
job's exit status. Afterwards the marker RUN_DIR/requeue exists if the job should be requeued, and RUN_DIR/restart if it
should start the ranks again. A batch script that can do the latter passes --restart-if-left TIME with the time left of
the job's limit in Slurm's notation: shortly before the limit the job is requeued instead.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from components.config.schema.slurm import seconds_of
from components.launch.scheduled_jobs import JobAttempt, attempts_of_job, cluster_of
from components.launch.slurm.attempt_start import (
    CRASHED,
    reason_not_after_corruption,
    reason_not_after_crash,
    reason_not_after_hang,
    reason_to_stop,
    record_failed_nodes,
)
from components.protocol.errors import EXIT_INVALID
from components.protocol.failures import (
    LEFT_EARLY,
    Failure,
    Kind,
    RankExit,
    first_failure,
    print_failure,
    read_reports,
)
from components.protocol.run_files import (
    CANCELLED,
    REQUEUE,
    RESTART,
    atomic_write,
    attempt_logs,
    create_marker,
    read_result,
    read_text,
    record_result,
    refuse_start,
)
from components.terminal import keep_running, open_output, print_text

_STOPPED_EARLY = 128 + signal.SIGUSR2
"""srun's exit status if a rank was killed by SIGUSR2, the stop request, before it had installed its handler."""
_KILLED_BELOW_AGENT = re.compile(r"exitcode\s*: -\d+")
"""torchrun's message about a rank that was ended by a signal."""
_START_MARGIN = 60
"""Seconds that a new start needs before the stop signal of the time limit."""


def conclude(
    run_dir: Path, attempt: int, status: int, *, cancelled: bool = False, restart_if_left: str | None = None
) -> int:
    """Print and record the outcome of an attempt, and return the exit status of the job.

    Args:
        run_dir: The run directory.
        attempt: Number of the attempt.
        status: Exit status of srun.
        cancelled: Whether the job was cancelled.
        restart_if_left: Time left of the job's limit, if the batch script can start the ranks again; text that is not
            a time (UNLIMITED) if there is no limit.
    """
    (run_dir / RESTART).unlink(missing_ok=True)
    logs, result = attempt_logs(run_dir, attempt), read_result(run_dir)
    reports = read_reports(logs)
    exits = [RankExit(rank, 1, report.time, terminated=False) for rank, report in reports.items()]
    failure = first_failure(exits, reports)
    cancelled = cancelled or (logs / CANCELLED).exists()
    if cancelled and result.get("status") != "ok" and (failure is None or _lost_peer(failure)):
        (run_dir / REQUEUE).unlink(missing_ok=True)
        record_result(run_dir, {**result, "status": "cancelled"})
        print_text("cancelled", flush=True)
        return status or 1
    crashed = _crashed(failure, logs, status) and not result
    if failure is not None:
        ended = _failed(run_dir, attempt, failure, status, cancelled=cancelled)
    else:
        ended = _stopped(run_dir, logs, status)
    if restart_if_left is not None and not cancelled:
        if crashed:
            _restart(run_dir, attempt, failure, restart_if_left)
            return ended
        if failure is None and _could_not_restart(run_dir, attempt):
            _requeue(run_dir, attempt, "the ranks could not be started again")
            return ended
    if failure is not None or not (run_dir / REQUEUE).exists():
        return ended
    if reason := reason_to_stop(run_dir, attempts_of_job(run_dir, attempt), os.environ):
        (run_dir / REQUEUE).unlink()
        print_text(f"stopped, but not requeued: {reason}; submit the same command again", flush=True)
        return ended or 1
    print_text("stopped: requeuing the job", flush=True)
    return ended


def _stopped(run_dir: Path, logs: Path, status: int) -> int:
    """Return the exit status of an attempt without a failed rank, and write result.json if no rank did."""
    result = read_result(run_dir)
    if result:
        print_text(result["status"], flush=True)
        # A run that stopped on request has not failed, although torchrun's agents exit with status 1; neither has one
        # that received the request while its processes were exiting.
        return 0 if result["status"] in ("preempted", "interrupted") or status == _STOPPED_EARLY else status
    if status == _STOPPED_EARLY or _agents_were_stopped(logs):
        record_result(run_dir, {"status": "preempted", "error": "stopped before training started"})
        create_marker(run_dir / REQUEUE)
        return 0
    if status:
        why = f"srun exited with status {status}, and no rank reported an error; see job.log and {logs}"
        record_result(run_dir, {"status": "failed", "error": why})
        print_text(why, flush=True)
    return status


def _agents_were_stopped(logs: Path) -> bool:
    """Return whether the stop request ended torchrun's agents, by their logs: their exit status is always 1."""
    line = f"got signal: {signal.SIGUSR2:d}"
    return any(line in read_text(log) for log in logs.glob("node_*.log"))


def _crashed(failure: Failure | None, logs: Path, status: int) -> bool:
    """Return whether a rank was killed by a signal, or had an error that need not occur again."""
    if failure is not None and failure.report is not None:
        return failure.report.may_be_transient
    by_agents = any(_KILLED_BELOW_AGENT.search(read_text(log)) for log in logs.glob("node_*.log"))
    return by_agents or (status > 128 and status != _STOPPED_EARLY)


def _restart(run_dir: Path, attempt: int, failure: Failure | None, time_left: str) -> None:
    """Request a new start of the ranks in this job, or a requeue if its time limit is near, or print why not."""
    if failure is not None and failure.report is not None and failure.report.is_gpu_error:
        record_failed_nodes(run_dir, attempt, [failure.report.node])
    attempts = attempts_of_job(run_dir, attempt)
    if _has_only_earlier_steps(attempts):
        _requeue(run_dir, attempt, "the ranks could not be started")
    elif reason := reason_not_after_crash(run_dir, attempts):
        print_text(f"the ranks are not started again: {reason}", flush=True)
    elif _ends_soon(run_dir, time_left):
        _requeue(run_dir, attempt, "the time limit is near")
    else:
        create_marker(run_dir / RESTART)
        print_text("starting the ranks again in this job", flush=True)


def _has_only_earlier_steps(attempts: Sequence[JobAttempt]) -> bool:
    """Return whether the last attempt took no step but an earlier one did: a node may be lost, which Slurm notices only
    minutes later."""
    return any(each.stepped for each in attempts) and not attempts[-1].stepped


def _could_not_restart(run_dir: Path, attempt: int) -> bool:
    """Return whether an attempt after a crash failed before its first step."""
    attempts = attempts_of_job(run_dir, attempt)[-2:]
    return len(attempts) == 2 and all(each.status in CRASHED for each in attempts) and not attempts[1].stepped


def _requeue(run_dir: Path, attempt: int, why: str) -> None:
    """Request a requeue of the job, or print why not."""
    if reason := reason_to_stop(run_dir, attempts_of_job(run_dir, attempt), os.environ):
        print_text(f"{why}, and the job is not requeued: {reason}", flush=True)
    else:
        create_marker(run_dir / REQUEUE)
        print_text(f"{why}: requeuing the job", flush=True)


def _ends_soon(run_dir: Path, time_left: str) -> bool:
    """Return whether the stop signal of the time limit comes before the ranks could train again; it might be missed."""
    left, cluster = seconds_of(time_left), cluster_of(run_dir)
    return left is not None and cluster is not None and left < cluster.signal_lead_seconds + _START_MARGIN


def _lost_peer(failure: Failure | None) -> bool:
    return failure is not None and failure.report is not None and failure.report.kind == Kind.lost_peer


def _failed(run_dir: Path, attempt: int, failure: Failure, status: int, *, cancelled: bool) -> int:
    """Print and record the failure of an attempt, and return the exit status of the job.

    A hung run, and one in which a rank computes wrong numbers, are requeued without the faulty nodes.
    """
    report, logs = failure.report, attempt_logs(run_dir, attempt)
    if _lost_peer(failure):
        ranks, reports = range(sum(1 for _ in logs.glob("rank_*.log"))), read_reports(logs)
        silent = ", ".join([str(rank) for rank in ranks if rank not in reports][:8])
        which = f" rank {silent} reported nothing: killed, or exited with status 0{LEFT_EARLY};" if silent else ""
        see = "see srun's messages above for the rank that ended first"
        print_text(f"every failed rank reports only a lost peer;{which} {see}", flush=True)
    if report is not None and report.kind == Kind.in_use:
        print_failure(failure, logs)
        return EXIT_INVALID
    (run_dir / REQUEUE).unlink(missing_ok=True)
    if report is not None and report.kind == Kind.config:
        print_failure(failure, logs)
        if not refuse_start(run_dir, attempt):
            record_result(run_dir, {"status": "invalid", "error": report.message})
        return EXIT_INVALID
    record_result(run_dir, {"status": report.status if report else "failed", "error": failure.error})
    if report is None or not report.kind.names_ranks:
        print_failure(failure, logs)
        return status or 1
    refusal = {Kind.hung: reason_not_after_hang, Kind.corrupted: reason_not_after_corruption}[report.kind]
    reason = refusal(run_dir, attempts_of_job(run_dir, attempt), os.environ)
    what = {Kind.hung: "the run hung", Kind.corrupted: "a rank computed wrong numbers"}[report.kind]
    if reason is None and not cancelled:
        atomic_write(run_dir / REQUEUE, "".join(f"{node}\n" for node in report.faulty_hosts))
        print_text(f"{what}: requeuing the job", flush=True)
    elif not cancelled:
        print_text(f"{what}, and the job is not requeued: {reason}", flush=True)
    print_failure(failure, logs)
    return report.kind.exit_status


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("status", type=int)
    parser.add_argument("--restart-if-left", metavar="TIME")
    parser.add_argument("--cancelled", action="store_true")
    given = parser.parse_args()
    return conclude(
        given.run_dir, given.attempt, given.status, restart_if_left=given.restart_if_left, cancelled=given.cancelled
    )


if __name__ == "__main__":
    open_output()
    keep_running()
    sys.exit(_main())
