"""The end of a batch script: `python -m components.launch.slurm.conclude RUN_DIR ATTEMPT STATUS [--cancelled]`.

Prints which rank failed first as the last entry of the job's log, writes result.json if no rank did, and exits with the
job's exit status. Afterwards the marker RUN_DIR/requeue exists if the job should be requeued.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from components.launch.schedulers.job_attempts import attempts_of_job
from components.launch.slurm.requeue import reason_not_after_corruption, reason_not_after_hang, reason_to_stop
from components.protocol.exit_codes import EXIT_INVALID
from components.protocol.failures import Failure, Kind, RankExit, first_failure, print_failure, read_reports
from components.protocol.run_files import (
    CANCELLED,
    REQUEUE,
    atomic_write,
    attempt_logs,
    create_marker,
    read_result,
    record_result,
)
from components.terminal import print_text

STOPPED_EARLY = 128 + signal.SIGUSR2
"""srun's exit status if a rank was killed by SIGUSR2, the stop request, before it had installed its handler."""


def conclude(run_dir: Path, attempt: int, status: int, *, cancelled: bool) -> int:
    """Print and record the outcome of an attempt, and return the exit status of the job."""
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
    if failure is not None:
        return _failed(run_dir, attempt, failure, status, cancelled=cancelled)
    ended = _stopped(run_dir, logs, status)
    if not (run_dir / REQUEUE).exists():
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
        return 0 if result["status"] in ("preempted", "interrupted") or status == STOPPED_EARLY else status
    if status == STOPPED_EARLY or _agents_were_stopped(logs):
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
    return any(line in log.read_text(errors="replace") for log in logs.glob("node_*.log"))


def _lost_peer(failure: Failure) -> bool:
    return failure.report is not None and failure.report.kind == Kind.lost_peer


def _failed(run_dir: Path, attempt: int, failure: Failure, status: int, *, cancelled: bool) -> int:
    """Print and record the failure of an attempt, and return the exit status of the job.

    A hung run, and one in which a rank computes wrong numbers, are requeued without the faulty nodes.
    """
    report, logs = failure.report, attempt_logs(run_dir, attempt)
    if _lost_peer(failure):
        print_text(
            "every failed rank reports only a lost peer; see srun's messages above for the rank that ended first",
            flush=True,
        )
    if report is not None and report.kind == Kind.in_use:
        print_failure(failure, logs)
        return EXIT_INVALID
    (run_dir / REQUEUE).unlink(missing_ok=True)
    if report is not None and report.kind == Kind.config:
        print_failure(failure, logs)
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


if __name__ == "__main__":
    cancelled_flag = len(sys.argv) > 4
    sys.exit(conclude(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), cancelled=cancelled_flag))
