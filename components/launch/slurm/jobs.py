"""Slurm commands as child processes, and the states of jobs.

Commands run in an environment without the variables of a surrounding job.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from components.launch.backend import Job, JobState
from components.launch.job.scheduler import NoAnswer
from components.protocol.errors import ConfigError
from components.protocol.role import without_ranks

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
"""Final states. A state in none of these sets is reported as failed, without assuming that the job has ended."""
GONE = "gone"
"""Slurm reports that it has no such job: it ended long ago."""
UNKNOWN = "unknown"
"""Slurm does not respond."""
_TIMEOUT = 75.0
"""Timeout of a command in seconds."""
WITHOUT_CLUSTER = "set cluster=local, or only print the script here: cluster.dry_run=render"
"""Advice on a machine from which Slurm cannot be reached."""


def job_states(jobs: Iterable[str]) -> dict[str, str]:
    """Return the state of each job, such as RUNNING, or `GONE` or `UNKNOWN`.

    Query squeue once for all jobs; then scontrol and sacct for each job that squeue no longer lists. Each command may
    be missing or fail. If the controller is down, skip scontrol, since every call would wait for its timeout.
    """
    slurm_ids = [job for job in jobs if job.isdecimal()]
    listed = _answer("squeue", "-h", "-t", "all", "-j", ",".join(slurm_ids), "-o", "%A %T") if slurm_ids else None
    states = dict(line.split()[:2] for line in (listed or "").splitlines() if len(line.split()) > 1)
    unlisted = [job for job in slurm_ids if job not in states]
    is_up = " is UP" in (_answer("scontrol", "ping") or "") if unlisted else False
    return states | {job: _unlisted_state(job, is_up) for job in unlisted}


def to_job_state(state: str) -> str:
    """Return the `JobState` value of a Slurm state."""
    if state in (GONE, UNKNOWN):
        return state
    if state in SUBMITTED:
        return "submitted"
    return "running" if state in RUNNING else ENDED.get(state, "failed")


def describe_job(job: str, state: str) -> Job:
    """Return a job as a `Job`, from its Slurm state."""
    doubt = "there is no squeue on PATH, or Slurm does not respond" if state == UNKNOWN else ""
    return Job(job, "Slurm", JobState(to_job_state(state)), state, over=state == GONE or state in ENDED, doubt=doubt)


def _unlisted_state(job: str, is_up: bool) -> str:
    """Return the state of a job that squeue does not list, from scontrol if the controller is up, else from sacct."""
    shown = _result("scontrol", "-o", "show", "job", job) if is_up else None
    if shown and (found := re.search(r"\bJobState=(\w+)", shown.output)):
        return found[1]
    kept = _answer("sacct", "-n", "-X", "-P", "-j", job, "-o", "State")  # -P: states are not cut to the column's width
    if kept:
        return kept.splitlines()[-1].split()[0].rstrip("+")  # CANCELLED by 1000
    # A slow controller responds to ping, but not to queries: only its own word that it lists no such job is proof.
    return GONE if shown and "Invalid job id" in shown.errors else UNKNOWN


def _answer(*command: str) -> str | None:
    """Return the output of a command; None if it is missing, fails or times out."""
    result = _result(*command)
    return result.output if result and result.status == 0 else None


def _result(*command: str) -> CommandResult | None:
    """Return the result of a command; None if it is missing or times out."""
    try:
        return run_slurm(command)
    except (ConfigError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit status, stdout and stderr of a command."""

    status: int
    output: str
    errors: str


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of a surrounding job or step, which a job submitted from it would inherit."""
    return {
        name: value
        for name, value in without_ranks(environ).items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }


def run_slurm(command: Sequence[str], script: str = "") -> CommandResult:
    """Run a Slurm command with `script` as its stdin.

    Raises ConfigError if the command is not installed or SLURM_CONF is not a file (Slurm would retry for a minute), and
    NoAnswer if the controller does not respond in time.
    """
    conf = os.environ.get("SLURM_CONF")
    if conf and not os.path.isfile(conf):
        raise ConfigError(f"SLURM_CONF={conf}: no such file; unset it, or set it to the cluster's slurm.conf")
    try:
        done = subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            env=clean_environment(os.environ),
            restore_signals=False,  # a busy controller closes connections: SIGPIPE must not kill
            check=False,
        )
    except (FileNotFoundError, PermissionError) as error:  # the latter if a folder in PATH is not searchable
        raise ConfigError(
            f"cluster.kind=slurm: there is no {command[0]} on PATH; submit from a login node of the cluster, "
            f"{WITHOUT_CLUSTER}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(
            f"cluster.kind=slurm: {command[0]} did not respond within {_TIMEOUT:g} s; check the controller with sinfo"
        ) from error
    return CommandResult(done.returncode, done.stdout.strip(), done.stderr.strip())
