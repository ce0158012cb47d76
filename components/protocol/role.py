"""The role of this process, its rank, node and batch job, from its environment variables alone."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from components.config.errors import ConfigError

WORKER = "MESHBOOK_WORKER"
"""Set for the ranks that our launcher or our sbatch script starts."""
RUN_DIR = "MESHBOOK_RUN_DIR"
"""The run directory, absolute."""
ATTEMPT = "MESHBOOK_ATTEMPT"
"""How often this run was started before: 0 for the first start."""
STORE_FD = "MESHBOOK_STORE_FD"
"""Rank 0's descriptor of the loopback socket on which it serves the ranks' store."""
STORE_FILE = "MESHBOOK_STORE_FILE"
"""File through which rank 0 of a batch job hands over how to reach the ranks' store."""
LAUNCHER_PID = "MESHBOOK_LAUNCHER_PID"
"""The process that a rank must not outlive."""
EXPORTED = "MESHBOOK_EXPORTED"
"""JSON record of the rank variables that a process has set for others, and of their values before."""

_RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NUM_NODES", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEPID"),
    *("SLURM_TASKS_PER_NODE", "SLURM_GTIDS", "SLURM_TASK_PID"),
    *(WORKER, RUN_DIR, ATTEMPT, STORE_FD, STORE_FILE, LAUNCHER_PID, EXPORTED),
}
_RANK_PREFIXES = ("TORCHELASTIC_", "SLURM_STEP_", "PMI_", "PMIX_", "OMPI_")
SCHEDULER_PREFIXES = ("SLURM_", "PBS_")
"""Beginnings of the names of variables that a batch scheduler sets for a job."""


class Role(StrEnum):
    """worker: a rank that we started; attached: a rank that the user's torchrun or srun started; launcher: neither."""

    worker = "worker"
    attached = "attached"
    launcher = "launcher"


def detect_role(environ: Mapping[str, str]) -> Role:
    """Return the role of a process with these variables.

    A batch shell and `salloc` set SLURM_PROCID=0 and SLURM_NTASKS too: only a step with several tasks has ranks.
    """
    numbered = bool(environ.get("RANK") and environ.get("WORLD_SIZE"))
    in_step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_PROCID", "").lstrip("0").isdigit()
    tasks = environ.get(_tasks_name(environ), "")
    if (numbered or in_step) and environ.get(WORKER) and environ.get(RUN_DIR):
        return Role.worker
    if numbered or (in_step and tasks.isdigit() and int(tasks) > 1):
        return Role.attached
    return Role.launcher


def rank_and_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank and the number of ranks, by torchrun's variables or else by Slurm's.

    Raises ConfigError where they are no numbers.
    """
    numbered = environ.get("RANK") and environ.get("WORLD_SIZE")
    names = ("RANK", "WORLD_SIZE") if numbered else ("SLURM_PROCID", _tasks_name(environ))
    for name in names:
        if not environ.get(name, "").isdigit():
            raise ConfigError(f"{name}={environ.get(name, '')!r}: must be a whole number, as torchrun and srun set it")
    return int(environ[names[0]]), int(environ[names[1]])


def own_rank(environ: Mapping[str, str]) -> int:
    """Return the rank of a process with these variables, 0 if none is set."""
    return int(environ.get("RANK") or environ.get("SLURM_PROCID") or 0)


def node_name(environ: Mapping[str, str]) -> str:
    """Return the scheduler's name of this node, else its host name."""
    return scheduler_node(environ) or socket.gethostname()


def scheduler_node(environ: Mapping[str, str]) -> str:
    """Return the scheduler's name of this node; empty outside a job."""
    return environ.get("SLURMD_NODENAME", "")


@dataclass(frozen=True, slots=True)
class BatchJob:
    """The batch job that a process belongs to; empty outside one."""

    cluster: str
    id: str
    restart: int
    """How often it was requeued before."""


def own_job(environ: Mapping[str, str]) -> BatchJob:
    """Return the batch job of a process with these variables."""
    return BatchJob(
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        id=environ.get("SLURM_JOB_ID", ""),
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
    )


def _tasks_name(environ: Mapping[str, str]) -> str:
    """SLURM_NTASKS, but the step's own number where it is set: in the shell of `salloc` the other is the job's."""
    return "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that number ranks, which a child process would believe."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIXES)
    }


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One rank of a run on this machine."""

    rank: int
    world_size: int
    port: int
    """On the loopback interface, where rank 0 serves the store."""
    store_fd: int | None
    """Rank 0's descriptor of the socket bound to `port`; None on other ranks."""
    run_dir: Path
    attempt: int

    def variables(self) -> dict[str, str]:
        """Return the variables that torch and the components read."""
        variables = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            RUN_DIR: str(self.run_dir),
            ATTEMPT: str(self.attempt),
        }
        return variables if self.store_fd is None else {**variables, STORE_FD: str(self.store_fd)}
