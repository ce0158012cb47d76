"""`cluster`: which processes a run gets, and how they are asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

from components.config.schema.checks import at_least, field_values, own_kind, raise_all, within
from components.config.schema.slurm import (
    NAMED_ELSEWHERE,
    NOT_A_SUBMISSION,
    SCRIPT_VARIABLES,
    ContainerConfig,
    GpuRequest,
    Launcher,
    RequeueConfig,
    seconds_of,
)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_NUMBER = re.compile(r"0*[1-9][0-9]{0,8}", re.ASCII)
_RESOURCE = re.compile(r"[\w.,:;&|*()\[\]+=@%/-]+")
LONGEST_TIMEOUT = 525_600.0
"""Minutes of a year: an upper bound of timeouts, so that they fit what torch and the OS take."""
_RESOURCE_KEYS = ("partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation", "mem")


class ClusterKind(StrEnum):
    """local: this machine, now; slurm: submitted with sbatch."""

    local = "local"
    slurm = "slurm"


class Device(StrEnum):
    """auto: CUDA where there is one, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Nodes, processes and devices; from `launcher` on, what only Slurm reads.

    Slurm's keys are legal for every kind: conf/local/user.yaml sets a partition for all runs, local ones included, and
    `cluster.kind=slurm` may be set over any option.
    """

    kind: ClusterKind
    """local or slurm; selects one of the subclasses below."""
    nodes: int = 1
    """Machines of the run."""
    procs_per_node: str = "auto"
    """Processes per node: a number, or (local only) auto: the visible GPUs, on CPU the product of the mesh degrees."""
    oversubscribe: bool = False
    """Allow a local run on CPUs more than four processes per core, or more than the free memory holds. A GPU is never
    shared: NCCL refuses two ranks on one."""
    device: Device = Device.auto
    """auto, cpu or cuda. Under Slurm auto asks for a GPU per process, cpu for none."""
    dry_run: bool = False
    """Check all that can be checked without writing a file, show what would start, and start nothing."""
    startup_timeout_minutes: float = 10.0
    """How long a process waits for the others to appear."""
    collective_timeout_minutes: float = 30.0
    """How long a process waits for the others in one collective; afterwards the run ends."""
    launcher: Launcher = Launcher.srun
    """srun or torchrun."""
    partition: str | None = None
    """Partition; null: the cluster's default."""
    account: str | None = None
    """Account that pays; null: yours."""
    qos: str | None = None
    """Quality of service; null: the account's."""
    time: str | None = None
    """Time limit in Slurm's notation, such as 24:00:00 or 2-12; null: the partition's."""
    constraint: str | None = None
    """Features that nodes must have."""
    exclude: str | None = None
    """Nodes not to use, such as n[3,7]."""
    nodelist: str | None = None
    """Nodes to use."""
    reservation: str | None = None
    """Reservation to run in."""
    mem: str | None = None
    """Memory per node, such as 200G; "0": all of it; null: the partition's."""
    exclusive: bool = False
    """Share the nodes with nobody."""
    cpus_per_proc: int | None = None
    """CPU cores per process; null: the partition's."""
    gpu_request: GpuRequest = GpuRequest.gpus_per_node
    """How GPUs are asked for: gpus_per_node, gres or none."""
    python: str | None = None
    """Python on the nodes; null: the one that submits (a shared file system), in a container `python`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run on the first node before everything else, such as `module load cuda`."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the job, over those of your shell, which it inherits. No secrets: export these in your shell."""
    network_env: dict[str, str] = field(default_factory=dict)
    """Variables that an option of the group `network` sets; cluster.env wins."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """An image in which the ranks run."""
    signal_lead_seconds: int = 300
    """How long before the time limit a run is told to save and stop: one step, one evaluation and one save."""
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    """When the job starts again by itself."""
    health_check: bool = True
    """Look at every node (Python, run directory, GPUs, disk) before the ranks start; a bad one is named."""
    snapshot: bool = True
    """Run a copy of the code, so that an edit after submission does not change a queued job."""
    sbatch_extra: dict[str, str] = field(default_factory=dict)
    """Further sbatch options, such as {mail-type: FAIL}; an empty value makes a flag."""
    srun_extra: list[str] = field(default_factory=list)
    """Further srun arguments, such as [--cpu-bind=cores]."""
    template: str | None = None
    """Path of your own script template; null: slurm/train.sbatch.j2."""

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> list[str]:
        problems = [
            *own_kind("cluster", self),
            *at_least("cluster.nodes", self.nodes, 1),
            *within("cluster.startup_timeout_minutes", self.startup_timeout_minutes, 0.01, LONGEST_TIMEOUT),
            *within("cluster.collective_timeout_minutes", self.collective_timeout_minutes, 0.01, LONGEST_TIMEOUT),
            *at_least("cluster.cpus_per_proc", self.cpus_per_proc, 1),
            *at_least("cluster.signal_lead_seconds", self.signal_lead_seconds, 1),
        ]
        if self.procs_per_node != "auto" and not _NUMBER.fullmatch(self.procs_per_node):
            problems.append(
                f"cluster.procs_per_node={self.procs_per_node}: must be auto or a number of processes, 1 or more"
            )
        return problems

    @property
    def startup_timeout(self) -> timedelta:
        """How long a process waits for the others to appear."""
        return timedelta(minutes=self.startup_timeout_minutes)

    @property
    def collective_timeout(self) -> timedelta:
        """How long a process waits for the others in one collective."""
        return timedelta(minutes=self.collective_timeout_minutes)


@dataclass(kw_only=True, slots=True)
class LocalClusterConfig(ClusterConfig):
    """This machine, now."""

    kind: ClusterKind = ClusterKind.local
    """local."""

    def _problems(self) -> list[str]:
        problems = ClusterConfig._problems(self)
        if self.nodes > 1:
            problems.append(
                f"cluster.nodes={self.nodes}: a local run has one node; set cluster.nodes=1, or submit with "
                "cluster=slurm_2node"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class SlurmClusterConfig(ClusterConfig):
    """A job that is submitted with sbatch."""

    kind: ClusterKind = ClusterKind.slurm
    """slurm."""

    def _problems(self) -> list[str]:
        problems = ClusterConfig._problems(self)
        if self.procs_per_node == "auto":
            problems.append(
                "cluster.procs_per_node=auto: the GPUs of a node are unknown here; set the number of processes per node"
            )
        values = field_values(self)
        for key in _RESOURCE_KEYS:
            value = values[key]
            if value is not None and not _RESOURCE.fullmatch(value):
                problems.append(f"cluster.{key}={value!r}: is no Slurm {key}: it has spaces or quotes; change it")
        return problems + self._time_problems() + self._variable_problems() + self._text_problems()

    def _time_problems(self) -> list[str]:
        if self.time is None:
            return []
        limit = seconds_of(self.time)
        if limit is None:
            return [f"cluster.time={self.time!r}: is no time limit; write minutes, H:M:S, D-H or D-H:M:S"]
        if self.signal_lead_seconds >= limit:
            return [
                f"cluster.signal_lead_seconds={self.signal_lead_seconds}: the job would be told to stop before it "
                f"starts: cluster.time={self.time} is {limit} s; lower the lead, or raise cluster.time"
            ]
        return []

    def _variable_problems(self) -> list[str]:
        problems = []
        for section, variables in (("env", self.env), ("network_env", self.network_env)):
            for name, value in variables.items():
                if not _VARIABLE.fullmatch(name):
                    problems.append(f"cluster.{section}.{name}: is no name of a variable; change it")
                if name in SCRIPT_VARIABLES:
                    problems.append(f"cluster.{section}.{name}: is the batch script's own; choose another name")
                if "\0" in value:
                    problems.append(f"cluster.{section}.{name}: holds a null character; change it")
        return problems

    def _text_problems(self) -> list[str]:
        problems = []
        for line in self.setup:
            if not _is_one_line(line):
                problems.append(f"cluster.setup={line!r}: must be one shell line each; write several as a list")
        for name, value in self.sbatch_extra.items():
            # sbatch takes any unambiguous beginning of a long option for the option.
            refused = next((why for option, why in NOT_A_SUBMISSION.items() if name and option.startswith(name)), None)
            if refused is not None:
                problems.append(f"cluster.sbatch_extra.{name}={value}: {refused}")
            elif name in NAMED_ELSEWHERE:
                problems.append(f"cluster.sbatch_extra.{name}={value}: is set by {NAMED_ELSEWHERE[name]}; leave it out")
            elif not _OPTION.fullmatch(name) or not _is_one_line(value):
                problems.append(f"cluster.sbatch_extra.{name}={value!r}: must be a long option of sbatch, on one line")
        for value in self.srun_extra:
            if not value.startswith("-") or not value.strip("-"):
                problems.append(f"cluster.srun_extra: {value!r} must begin with a dash; write --name=value as one")
        for value in (*self.srun_extra, *self.container.args, *self.container.mounts, self.container.image or ""):
            if not _is_one_line(value):
                problems.append(f"cluster: {value!r} must be on one line; change srun_extra or container")
        return problems


def _is_one_line(text: str) -> bool:
    return all(character == "\t" or character.isprintable() for character in text)
