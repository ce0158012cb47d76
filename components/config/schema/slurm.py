"""Parts of `cluster` that only affect Slurm jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from components.config.schema.checks import at_least, raise_all
from components.protocol.role import ATTEMPT, RUN_DIR, WORKER

NAMED_ELSEWHERE = {
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "time": "cluster.time",
    "constraint": "cluster.constraint",
    "exclude": "cluster.exclude",
    "nodelist": "cluster.nodelist",
    "reservation": "cluster.reservation",
    "mem": "cluster.mem",
    "exclusive": "cluster.exclusive",
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes",
    "ntasks-per-node": "cluster.procs_per_node",
    "gpus-per-node": "cluster.procs_per_node",
    "cpus-per-task": "cluster.cpus_per_proc",
    "job-name": "run.name",
    "signal": "cluster.signal_lead_seconds",
    "requeue": "cluster.requeue.max",
    "no-requeue": "cluster.requeue.node_failure",
    "output": "run.dir",
    "error": "run.dir",
    "chdir": "the folder of the command",
    "open-mode": "Meshbook, which appends to logs",
    "export": "cluster.env",
    "array": "-m (a sweep)",
}
"""sbatch options that Meshbook sets -> the key or setting that controls them."""

NOT_A_SUBMISSION = {
    "test-only": "would check the job and submit nothing; use cluster.dry_run=true",
    "wait": "would keep the command on the login node until the job ends; follow the job's log instead",
    "help": "would print sbatch's help and submit nothing; run sbatch --help",
    "usage": "would print sbatch's usage and submit nothing; run sbatch --usage",
    "version": "would print Slurm's version and submit nothing; run sbatch --version",
    "wrap": "would replace the batch script; use cluster.setup or cluster.template",
    "parsable": "is already passed to sbatch; leave it out",
}
"""sbatch options that would prevent the submission of the run -> why. Abbreviations are rejected too."""

SCRIPT_VARIABLES = {
    *("run_dir", "logs", "cancelled", "signals", "seen", "status", "threads", "python", "container", "job", "nodes"),
    *("where", "left", "excluded", "ended_job", "ended", "IFS"),
    *("MASTER_ADDR", "MASTER_PORT", WORKER, RUN_DIR, ATTEMPT),
    *("UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO"),
}
"""Variables that the batch script sets for itself or for the ranks, and read-only variables of bash."""

_TIME = re.compile(r"(?:(?P<days>[0-9]{1,9})-)?(?P<rest>[0-9]{1,9}(?::[0-9]{1,9}){0,2})")


class Launcher(StrEnum):
    """srun: one task per rank; torchrun: one agent per node, for clusters that require it."""

    srun = "srun"
    torchrun = "torchrun"


class GpuRequest(StrEnum):
    """sbatch options that request GPUs: --gpus-per-node, --gres=gpu:N, --gpus-per-task (each rank sees only its own
    GPU), or none."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"
    gpus_per_task = "gpus_per_task"
    none = "none"


class ContainerRuntime(StrEnum):
    """none; pyxis: srun --container-image; apptainer: apptainer exec."""

    none = "none"
    pyxis = "pyxis"
    apptainer = "apptainer"


@dataclass(kw_only=True, slots=True)
class RequeueConfig:
    """When a job is requeued; it resumes in the same run directory from the last checkpoint."""

    max: int = 20
    """Maximum number of times that a job is requeued, for example after it received a stop request (time limit,
    preemption) and saved; on Kubernetes every restart of the pods counts; 0: never."""
    node_failure: bool = True
    """Let Slurm requeue the job when a node fails, or when a preempted job exceeds its grace time (sbatch
    --requeue)."""
    without_progress: int = 3
    """Stop requeueing after this many consecutive attempts, at least 1, that ran steps but published no newer
    checkpoint."""
    before_first_step: int = 10
    """Stop requeueing after this many consecutive attempts, at least 1, that were stopped before their first step."""
    hang: int = 3
    """Maximum number of times that a run that hung (exit status 75) after its first step is requeued, on Slurm without
    the node of the rank that hung; 0: never."""
    crash: int = 20
    """Maximum number of times that a job starts its ranks again after one of them was killed, lost its connection or
    had a GPU error, on Slurm on the same nodes and without a requeue; 0: never."""
    corruption: int = 3
    """Maximum number of times that a run in which a rank computes wrong numbers (exit status 76, see
    checkpoint.check_replicas) is requeued without the nodes of the ranks that the comparison names; 0, and always on
    Kubernetes: never."""

    def __post_init__(self) -> None:
        raise_all(
            [
                *at_least("cluster.requeue.max", self.max, 0),
                *at_least("cluster.requeue.without_progress", self.without_progress, 1),
                *at_least("cluster.requeue.before_first_step", self.before_first_step, 1),
                *at_least("cluster.requeue.hang", self.hang, 0),
                *at_least("cluster.requeue.crash", self.crash, 0),
                *at_least("cluster.requeue.corruption", self.corruption, 0),
            ]
        )


@dataclass(kw_only=True, slots=True)
class ContainerConfig:
    """Container that the ranks run in. The run directory and the folder of the command are always mounted."""

    runtime: ContainerRuntime = ContainerRuntime.none
    """none, pyxis (srun --container-image) or apptainer (apptainer exec)."""
    image: str | None = None
    """Image in the notation of the runtime; required unless runtime is none."""
    mounts: list[str] = field(default_factory=list)
    """Additional folders to mount, each SOURCE or SOURCE:TARGET."""
    args: list[str] = field(default_factory=list)
    """Additional arguments: of srun for pyxis, of `apptainer exec` for apptainer."""

    def __post_init__(self) -> None:
        inside = self.runtime != ContainerRuntime.none
        problems = []
        if inside and not self.image:
            problems.append(f"cluster.container.runtime={self.runtime}: needs an image; set cluster.container.image")
        if not inside and (self.image or self.mounts or self.args):
            problems.append(
                "cluster.container.runtime=none: no container is used, but image, mounts or args are set; set "
                "cluster.container.runtime to pyxis or apptainer"
            )
        raise_all(problems)


def seconds_of(time: str) -> int | None:
    """Return a time in Slurm's notation (minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S) in seconds, or None if invalid."""
    found = _TIME.fullmatch(time)
    if found is None:
        return None
    parts = [int(part) for part in found["rest"].split(":")]
    if found["days"] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    hours, minutes, seconds = (0, *parts) if len(parts) == 2 else parts
    return (hours * 60 + minutes) * 60 + seconds
