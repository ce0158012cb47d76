"""States of Slurm's jobs, in the words of the table."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable

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
    "LAUNCH_FAILED": "failed",
    "RECONFIG_FAIL": "failed",
}
GONE = "gone"
"""Slurm answers, and knows no such job: it ended long ago."""
UNKNOWN = "unknown"
"""Nobody can be asked."""

_TIMEOUT = 30.0
"""Seconds that a controller may take to answer."""


def job_states(jobs: Iterable[str]) -> dict[str, str]:
    """Return for each job what the table calls it: submitted, running, a word of `ENDED`, `GONE` or `UNKNOWN`.

    Asked are squeue (all jobs at once), for those that it does not list any more scontrol, then sacct; each of them
    may be missing or fail.
    """
    wanted = [job for job in jobs if job.isdigit()]
    listed = _answer("squeue", "-h", "-t", "all", "-j", ",".join(wanted), "-o", "%A %T") if wanted else None
    states = dict(line.split()[:2] for line in (listed or "").splitlines() if len(line.split()) > 1)
    return {job: in_words(states.get(job) or _ask_further(job)) for job in wanted}


def in_words(state: str) -> str:
    """Return what the table calls one of Slurm's states, such as `CANCELLED by 1000`."""
    name = state.split()[0].rstrip("+") if state.strip() else UNKNOWN
    if name in (GONE, UNKNOWN):
        return name
    if name in SUBMITTED:
        return "submitted"
    return "running" if name in RUNNING else ENDED.get(name, "failed")


def settle(result: str | None, job: str) -> str:
    """Return the state of a run by the status in its result.json (None: there is none) and that of its job.

    A result other than ok may be of an attempt that Slurm has put back into the queue. A run that was told to stop
    has saved and does not know why it was told; one that was killed for memory could not write down why.
    """
    if result == "ok":
        return "ok"
    if job in ("submitted", "running"):
        return job
    if result is None:
        return {UNKNOWN: "submitted", GONE: "failed", "ended": "failed"}.get(job, job)
    if result == "cancelled" and job not in (UNKNOWN, GONE, "ended"):
        return job  # the batch script knows that it was ended, Slurm knows why
    told_to_stop = result in ("preempted", "interrupted") and job in ("timeout", "cancelled")
    return job if told_to_stop or (result == "failed" and job == "oom") else result


def _ask_further(job: str) -> str:
    shown = _answer("scontrol", "-o", "show", "job", job)
    if found := re.search(r"\bJobState=(\w+)", shown or ""):
        return found[1]
    kept = _answer("sacct", "-n", "-X", "-P", "-j", job, "-o", "State")  # -P: no words cut to the column's width
    if kept and kept.strip():
        return kept.strip().splitlines()[-1]
    return GONE if " is UP" in (_answer("scontrol", "ping") or "") else UNKNOWN


def _answer(*command: str) -> str | None:
    """Return what a command says; None where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
