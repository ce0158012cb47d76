"""States of Slurm's jobs, and what a sweep's table calls them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from components.config.errors import ConfigError
from components.launch.slurm.commands import ask

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
"""States that do not change any more; of one that is in no list the table says failed, and it may go on."""
GONE = "gone"
"""Slurm answers, and knows no such job: it ended long ago."""
UNKNOWN = "unknown"
"""Nobody can be asked."""


def job_states(jobs: Iterable[str]) -> dict[str, str]:
    """Return the state of each job, such as RUNNING, or `GONE` or `UNKNOWN`.

    Asked are squeue (all jobs at once), for those that it does not list any more scontrol, then sacct; each of them
    may be missing or fail. Of a controller that is down scontrol is not asked for every job: each answer takes long.
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
        tag: The comment of that submission alone. Empty where the comment is the user's: then the job is the one of
            this batch script that has not ended.
        script: The batch script of the run.

    Raises ConfigError where squeue cannot be asked.
    """
    states = ("-t", "all") if tag else ()
    answer = ask(["squeue", "-h", "--me", *states, "-o", "%A %k" if tag else "%A %o"])
    if answer.status:
        raise ConfigError(f"cluster.kind=slurm: squeue fails: {answer.errors}")
    listed = [line.partition(" ") for line in answer.output.splitlines()]
    found = [job for job, _, said in listed if said.strip() == (tag or str(script))]
    return max(found, key=int, default=None)


def in_words(state: str) -> str:
    """Return what the table calls a state: submitted, running, a word of `ENDED`, `GONE` or `UNKNOWN`."""
    if state in (GONE, UNKNOWN):
        return state
    if state in SUBMITTED:
        return "submitted"
    return "running" if state in RUNNING else ENDED.get(state, "failed")


def _ask_further(job: str, is_up: bool) -> str:
    shown = _answer("scontrol", "-o", "show", "job", job) if is_up else None
    if found := re.search(r"\bJobState=(\w+)", shown or ""):
        return found[1]
    kept = _answer("sacct", "-n", "-X", "-P", "-j", job, "-o", "State")  # -P: no words cut to the column's width
    if kept:
        return kept.splitlines()[-1].split()[0].rstrip("+")  # CANCELLED by 1000
    return GONE if is_up else UNKNOWN


def _answer(*command: str) -> str | None:
    """Return what a command says; None where it is missing, fails or is not answered."""
    try:
        answer = ask(command)
    except (ConfigError, OSError):
        return None
    return answer.output if answer.status == 0 else None
