"""`cluster`: which processes a run gets."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from components.config.schema.checks import at_least, raise_all


class ClusterKind(StrEnum):
    """local: this machine, now; slurm: submitted with sbatch."""

    local = "local"
    slurm = "slurm"


class Device(StrEnum):
    """auto: CUDA where there is one, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Launcher(StrEnum):
    """How the processes of a Slurm job start."""

    srun = "srun"
    torchrun = "torchrun"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Nodes, processes and devices."""

    kind: ClusterKind = ClusterKind.local
    """local or slurm."""
    nodes: int = 1
    """Machines of the run."""
    procs_per_node: str = "auto"
    """Processes per node: a number, or auto: the visible GPUs, on CPU the product of the stated mesh degrees."""
    device: Device = Device.auto
    """auto, cpu or cuda."""
    launcher: Launcher = Launcher.srun
    """srun or torchrun, under Slurm."""
    partition: str | None = None
    """Slurm partition; null: the cluster's default."""
    dry_run: bool = False
    """Check everything, show what would start, and start nothing."""
    startup_timeout_minutes: float = 10.0
    """How long a process waits for the others to appear."""
    collective_timeout_minutes: float = 30.0
    """How long a process waits for the others in one collective; afterwards the run ends."""

    def __post_init__(self) -> None:
        problems = [
            *at_least("cluster.nodes", self.nodes, 1),
            *at_least("cluster.startup_timeout_minutes", self.startup_timeout_minutes, 0.01),
            *at_least("cluster.collective_timeout_minutes", self.collective_timeout_minutes, 0.01),
        ]
        if self.procs_per_node != "auto" and not (self.procs_per_node.isdigit() and int(self.procs_per_node) > 0):
            problems.append(
                f"cluster.procs_per_node={self.procs_per_node}: must be auto or a number of processes, 1 or more"
            )
        if self.kind == ClusterKind.slurm:
            problems.append("cluster.kind=slurm: submitting to Slurm is not built yet; set cluster=local")
        elif self.nodes > 1:
            problems.append(f"cluster.nodes={self.nodes}: a local run has one node; set cluster.nodes=1")
        raise_all(problems)

    @property
    def startup_timeout(self) -> timedelta:
        """How long a process waits for the others to appear."""
        return timedelta(minutes=self.startup_timeout_minutes)

    @property
    def collective_timeout(self) -> timedelta:
        """How long a process waits for the others in one collective."""
        return timedelta(minutes=self.collective_timeout_minutes)
