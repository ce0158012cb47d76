"""Slurm jobs: the one of a run directory, their states, and cancelling them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from components.config.errors import ConfigError
from components.launch.backend import Job, JobState
from components.launch.slurm.commands import ask
from components.protocol.run_files import JOB_ID, SCRIPT, SUBMISSION, atomic_write, read_regular

SUBMITTED = {
    *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
}
RUNNING = {*("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")}
ENDED = {
    "COMPLETED": "ended",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "preempted",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
}
"""States that do not change any more. One in no list is reported as failed, and the job may go on."""
GONE = "gone"
"""Slurm answers, and lists no such job: it ended long ago."""
UNKNOWN = "unknown"
"""Slurm does not answer."""


def job_states(jobs: Iterable[str]) -> dict[str, str]:
    """Return the state of each job, such as RUNNING, or `GONE` or `UNKNOWN`.

    squeue is queried for all jobs at once; scontrol, then sacct, for those that it does not list any more. Each may be
    missing or fail. If the controller is down, scontrol is not queried for every job: each answer takes long.
    """
    wanted = [job for job in jobs if job.isdigit()]
    listed = _answer("squeue", "-h", "-t", "all", "-j", ",".join(wanted), "-o", "%A %T") if wanted else None
    states = dict(line.split()[:2] for line in (listed or "").splitlines() if len(line.split()) > 1)
    further = [job for job in wanted if job not in states]
    is_up = " is UP" in (_answer("scontrol", "ping") or "") if further else False
    return states | {job: _ask_further(job, is_up) for job in further}


def find_submission(tag: str, script: Path) -> str | None:
    """Return the number of the job that a submission became, or None where Slurm has no such job.

    Args:
        tag: The unique comment of the submission. Empty if the comment is the user's: then the job is the one of this
            batch script that has not ended.
        script: The batch script of the run.

    Raises ConfigError if squeue does not answer.
    """
    states = ("-t", "all") if tag else ()
    answer = ask(["squeue", "-h", "--me", *states, "-o", "%A %k" if tag else "%A %o"])
    if answer.status:
        raise ConfigError(f"cluster.kind=slurm: squeue fails: {answer.errors}")
    listed = [line.partition(" ") for line in answer.output.splitlines()]
    found = [job for job, _, text in listed if text.strip() == (tag or str(script))]
    return max(found, key=int, default=None)


def in_words(state: str) -> str:
    """Return the `JobState` of a state of Slurm's."""
    if state in (GONE, UNKNOWN):
        return state
    if state in SUBMITTED:
        return "submitted"
    return "running" if state in RUNNING else ENDED.get(state, "failed")


def describe_job(job: str, state: str) -> Job:
    """Return a job in a state of Slurm's."""
    doubt = "there is no squeue on PATH, or Slurm does not answer it" if state == UNKNOWN else ""
    return Job(job, "Slurm", JobState(in_words(state)), state, over=state == GONE or state in ENDED, doubt=doubt)


def stop_job(job: str) -> bool:
    """Cancel a job, and return whether Slurm accepted that. Raises ConfigError if it does not answer."""
    return ask(["scancel", job]).status == 0


def recorded_job(run_dir: Path) -> str | None:
    """Return the number of the job that was submitted for a directory; None if there was none."""
    try:
        return read_regular(run_dir / JOB_ID).decode(errors="replace").strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{run_dir / JOB_ID}: the number of the run's job cannot be read: {error.strerror}"
        ) from error


def adopt_submission(run_dir: Path) -> str | None:
    """Return the number of the directory's job, if needed that of a submission whose answer was lost.

    Raises ConfigError if there is such a submission and squeue does not answer.
    """
    file, job = run_dir / SUBMISSION, recorded_job(run_dir)
    if job is None and file.exists():
        job = find_submission(file.read_text().strip(), run_dir / SCRIPT)
        if job is not None:
            record_job(run_dir, job)
    return job


def record_job(run_dir: Path, job: str) -> None:
    """Record the number of the job that was submitted for a directory."""
    atomic_write(run_dir / JOB_ID, f"{job}\n")
    (run_dir / SUBMISSION).unlink(missing_ok=True)


def _ask_further(job: str, is_up: bool) -> str:
    shown = _answer("scontrol", "-o", "show", "job", job) if is_up else None
    if found := re.search(r"\bJobState=(\w+)", shown or ""):
        return found[1]
    kept = _answer("sacct", "-n", "-X", "-P", "-j", job, "-o", "State")  # -P: no words cut to the column's width
    if kept:
        return kept.splitlines()[-1].split()[0].rstrip("+")  # CANCELLED by 1000
    return GONE if is_up else UNKNOWN


def _answer(*command: str) -> str | None:
    """Return the output of a command; None if it is missing, fails or gets no answer."""
    try:
        answer = ask(command)
    except (ConfigError, OSError):
        return None
    return answer.output if answer.status == 0 else None
