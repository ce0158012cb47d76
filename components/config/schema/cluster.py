"""`cluster`: nodes, processes, devices, timeouts, and the job on Slurm or Kubernetes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

from components.config.schema.schedulers import (
    NAMED_ELSEWHERE,
    NOT_A_SUBMISSION,
    SCRIPT_VARIABLES,
    ContainerConfig,
    ContainerRuntime,
    GpuRequest,
    KubernetesConfig,
    Launcher,
    RequeueConfig,
    pod_variable_problems,
    seconds_of,
)
from components.protocol.errors import IMPORT_PATH, at_least, field_values, own_kind, raise_all, within

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_NUMBER = re.compile(r"0*[1-9][0-9]{0,8}", re.ASCII)
_NODES = re.compile(r"[1-9][0-9]{0,5}(-[1-9][0-9]{0,5})?", re.ASCII)
_RESOURCE = re.compile(r"[\w.,:;&|*()\[\]+=@%/-]+")
_LONGEST_TIMEOUT = 525_600.0
"""Upper bound of timeouts, in minutes: a year, which torch and the OS accept."""
_DRY_RUNS = ("true", "plan", "render", "false")
"""Values of cluster.dry_run."""
_RESOURCE_KEYS = ("partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation", "mem")


class ClusterKind(StrEnum):
    """local: start the run on this machine; slurm: submit it with sbatch; k8s: with kubectl; custom: with a class of
    yours."""

    local = "local"
    slurm = "slurm"
    k8s = "k8s"
    custom = "custom"


class Device(StrEnum):
    """auto: CUDA if a GPU is visible, else CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class NumaBinding(StrEnum):
    """auto: on GPU nodes, each rank runs on the CPUs of its GPU's NUMA node; off: on any CPU."""

    auto = "auto"
    off = "off"


class MemoryPolicy(StrEnum):
    """What happens before a run starts whose estimated memory exceeds the device's. report: a note; refuse: an error,
    if it exceeds the memory by more than the estimate's error; off: nothing is estimated."""

    report = "report"
    refuse = "refuse"
    off = "off"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Nodes, processes and devices; the keys from `launcher` on only affect Slurm jobs, except `k8s` and those that
    docs/kubernetes.md lists.

    Every kind accepts the keys of Slurm and Kubernetes, so that conf/local/user.yaml can set a partition for all runs,
    including local ones, and `cluster.kind=slurm` can be set on any option."""

    kind: ClusterKind
    """local, slurm, k8s or custom; selects one of the subclasses below."""
    nodes: str = "1"
    """Number of nodes, 1 for a local run; on Slurm also a range such as 4-8: each attempt uses as many nodes as the
    cluster has free and the mesh and the global batch allow."""
    procs_per_node: str = "auto"
    """Processes (ranks) per node: a number, or, only for local runs, auto: one per visible GPU; on CPU the product of
    the mesh degrees."""
    oversubscribe: bool = False
    """Allow a local CPU run to start more than four processes per core, or more than fit into the memory. GPUs are
    never shared, since NCCL rejects two ranks on one GPU."""
    device: Device = Device.auto
    """auto (CUDA if a GPU is visible, else CPU), cpu or cuda. On a cluster, auto and cuda request one GPU per process,
    cpu requests none."""
    numa_binding: NumaBinding = NumaBinding.auto
    """CPUs of a rank, among those that it may use: auto (those of its GPU's NUMA node, so that copies from host memory
    do not cross sockets; without a GPU all) or off (all)."""
    gpu: str | None = None
    """Device of a rank, an option of conf/gpu such as h100_80, or a file of yours in conf/local/gpu; null: unknown, so
    that neither memory nor time can be estimated before the run starts."""
    memory_check: MemoryPolicy = MemoryPolicy.report
    """If the estimated memory of a rank exceeds the device's (gpu): report (a note that names the largest term and the
    smallest change that fits), refuse (an error beyond the estimate's error) or off."""
    dry_run: str = "false"
    """true: run all checks, print what would be started, and exit without starting anything or writing a file; plan:
    also simulate a step of the first, last and fullest rank on fake tensors, and print its memory and traffic; render:
    print the batch script or the manifest, also on a machine without sbatch or kubectl, and list what was not checked;
    false."""
    startup_timeout_minutes: float = 10.0
    """Minutes that a process waits for the others to start, 0.01 to a year; then the run fails."""
    collective_timeout_minutes: float = 30.0
    """Minutes that a process waits for the others in a collective, 0.01 to a year; then the run fails."""
    launcher: Launcher = Launcher.srun
    """How to start the ranks of a job: srun (one task per rank) or torchrun (one agent per node)."""
    partition: str | None = None
    """Slurm partition; null: the default partition."""
    account: str | None = None
    """Slurm account to charge; null: your default account."""
    qos: str | None = None
    """Slurm quality of service (QOS); null: the account's default."""
    time: str | None = None
    """Time limit in Slurm's notation, such as 24:00:00 (hours), 2-12 (days-hours) or 90 (minutes), but not M:S, which
    would make 24:00 24 minutes; null: the partition's default."""
    constraint: str | None = None
    """Node features that the job requires (sbatch --constraint)."""
    exclude: str | None = None
    """Nodes to exclude, such as n[3,7]."""
    nodelist: str | None = None
    """Nodes that the job must include (sbatch --nodelist)."""
    reservation: str | None = None
    """Slurm reservation to run in."""
    mem: str | None = None
    """Memory per node, such as 200G; "0": all memory of the node; null: the partition's default."""
    exclusive: bool = False
    """Allocate whole nodes, not shared with other jobs."""
    cpus_per_proc: int | None = None
    """CPU cores per process, at least 1; null: the partition's default."""
    gpu_request: GpuRequest = GpuRequest.gpus_per_node
    """sbatch option that requests GPUs: gpus_per_node (--gpus-per-node), gres (--gres=gpu:N), gpus_per_task
    (--gpus-per-task, by which each rank sees only its own GPU; not with a range of nodes) or none."""
    python: str | None = None
    """Python executable on the nodes; null: the one that submits the job, which must be on a shared file system; in a
    container `python`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that the batch script runs on the first node before anything else, such as `module load cuda`."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job; they override those inherited from your shell. Do not put secrets here: export
    them in your shell instead."""
    network_env: dict[str, str] = field(default_factory=dict)
    """Environment variables set by the option of the group `network`; cluster.env overrides them."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """Container that the ranks run in."""
    signal_lead_seconds: int = 300
    """Seconds before the time limit at which the run receives the signal to save and stop; must cover two steps and a
    save, or the run warns once it has measured them. A running evaluation ends within two batches."""
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    """When the job is requeued automatically."""
    health_check: bool = True
    """Check Python, the run directory, GPUs and shared memory (/dev/shm) on every node before the ranks start; report
    a bad node by name."""
    snapshot: bool = True
    """Copy the code into the run directory and run the copy, so that edits do not affect a queued job."""
    sbatch_extra: dict[str, str] = field(default_factory=dict)
    """Additional long sbatch options by name, such as {mail-type: FAIL}; an empty value passes the option as a flag."""
    srun_extra: list[str] = field(default_factory=list)
    """Additional srun arguments, such as [--cpu-bind=cores]."""
    template: str | None = None
    """Path of a custom Jinja template of the batch script or manifest; null: slurm/train.sbatch.j2, or on Kubernetes
    k8s/job.yaml.j2 or k8s/jobset.yaml.j2."""
    k8s: KubernetesConfig = field(default_factory=KubernetesConfig)
    """Job on Kubernetes: namespace, image, volumes, queue."""

    def __post_init__(self) -> None:
        self.dry_run = self.dry_run.lower()  # YAML's true and false become True and False
        raise_all(self._problems())

    def _problems(self) -> list[str]:
        problems = [
            *own_kind("cluster", self),
            *within("cluster.startup_timeout_minutes", self.startup_timeout_minutes, 0.01, _LONGEST_TIMEOUT),
            *within("cluster.collective_timeout_minutes", self.collective_timeout_minutes, 0.01, _LONGEST_TIMEOUT),
            *at_least("cluster.cpus_per_proc", self.cpus_per_proc, 1),
            *at_least("cluster.signal_lead_seconds", self.signal_lead_seconds, 1),
        ]
        if not _NODES.fullmatch(self.nodes) or self.fewest_nodes > self.most_nodes:
            problems.append(f"cluster.nodes={self.nodes}: must be a number of nodes, 1 or more, or a range such as 4-8")
        if self.procs_per_node != "auto" and not _NUMBER.fullmatch(self.procs_per_node):
            problems.append(
                f"cluster.procs_per_node={self.procs_per_node}: must be auto or a number of processes, 1 or more"
            )
        if self.dry_run not in _DRY_RUNS:
            problems.append(f"cluster.dry_run={self.dry_run}: must be {', '.join(_DRY_RUNS[:-1])} or {_DRY_RUNS[-1]}")
        return problems

    def _automatic_problems(self) -> list[str]:
        if self.procs_per_node != "auto":
            return []
        return ["cluster.procs_per_node=auto: auto is for local runs; set the number of processes per node"]

    def _variable_problems(self) -> list[str]:
        problems = []
        for section, variables in (("env", self.env), ("network_env", self.network_env)):
            for name, value in variables.items():
                if not _VARIABLE.fullmatch(name):
                    problems.append(f"cluster.{section}.{name}: is not a valid variable name; rename it")
                if "\0" in value:
                    problems.append(f"cluster.{section}.{name}: holds a null character; remove it")
        return problems

    @property
    def fewest_nodes(self) -> int:
        """The smallest number of nodes in `nodes`."""
        return int(self.nodes.partition("-")[0])

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes in `nodes`."""
        return int(self.nodes.rpartition("-")[2])

    @property
    def starts_nothing(self) -> bool:
        """Whether the run is only checked and shown (`dry_run`)."""
        return self.dry_run != "false"

    @property
    def only_renders(self) -> bool:
        """Whether the script or manifest is only printed, without asking the cluster."""
        return self.dry_run == "render"

    @property
    def startup_timeout(self) -> timedelta:
        """`startup_timeout_minutes` as a timedelta."""
        return timedelta(minutes=self.startup_timeout_minutes)

    @property
    def collective_timeout(self) -> timedelta:
        """`collective_timeout_minutes` as a timedelta."""
        return timedelta(minutes=self.collective_timeout_minutes)

    @property
    def has_same_packages(self) -> bool:
        """Whether the ranks run the Python that starts them: no other machine's or executable and no container."""
        same_python = self.python is None and self.container.runtime == ContainerRuntime.none and not self.only_renders
        return self.kind == ClusterKind.local or (self.kind != ClusterKind.k8s and same_python)


@dataclass(kw_only=True, slots=True)
class LocalClusterConfig(ClusterConfig):
    """Processes on this machine."""

    kind: ClusterKind = ClusterKind.local
    """local."""

    def _problems(self) -> list[str]:
        problems = ClusterConfig._problems(self)
        if self.nodes != "1" and not problems:
            problems.append(
                f"cluster.nodes={self.nodes}: a local run has one node; set cluster.nodes=1, or submit with "
                "cluster=slurm_2node"
            )
        if self.only_renders:
            problems.append(
                "cluster.dry_run=render: a local run has no batch script and no manifest; set cluster=slurm_1node, "
                "k8s or another option of a cluster, or cluster.dry_run=true"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class SlurmClusterConfig(ClusterConfig):
    """Job submitted with sbatch."""

    kind: ClusterKind = ClusterKind.slurm
    """slurm."""

    def _problems(self) -> list[str]:
        problems = ClusterConfig._problems(self) + self._automatic_problems()
        values = field_values(self)
        for key in _RESOURCE_KEYS:
            value = values[key]
            if value is not None and not _RESOURCE.fullmatch(value):
                problems.append(
                    f"cluster.{key}={value!r}: is not a valid Slurm {key}; remove spaces, quotes and special characters"
                )
        problems += self._time_problems() + self._variable_problems() + self._text_problems()
        if self.gpu_request == GpuRequest.gpus_per_task and "-" in self.nodes:
            problems.append(
                f"cluster.gpu_request=gpus_per_task: with the range cluster.nodes={self.nodes} the job has no tasks; "
                "set gpus_per_node or gres"
            )
        return problems + [
            f"cluster.{section}.{name}: is reserved by the batch script; choose another name"
            for section, variables in (("env", self.env), ("network_env", self.network_env))
            for name in variables
            if name in SCRIPT_VARIABLES
        ]

    def _time_problems(self) -> list[str]:
        if self.time is None:
            return []
        limit = seconds_of(self.time)
        if limit is None:
            return [f"cluster.time={self.time!r}: is not a time limit; write minutes, H:M:S, D-H or D-H:M:S"]
        if self.time.count(":") == 1 and "-" not in self.time:
            return [_minutes("cluster.time", self.time)]
        if self.signal_lead_seconds >= limit:
            return [
                f"cluster.signal_lead_seconds={self.signal_lead_seconds}: the stop signal would arrive before "
                f"the job starts: cluster.time={self.time} is {limit} s; lower the lead, or raise cluster.time"
            ]
        return []

    def _text_problems(self) -> list[str]:
        problems = []
        for line in self.setup:
            if not _is_one_line(line):
                problems.append(f"cluster.setup={line!r}: must be one shell line per entry; write several as a list")
        for name, value in self.sbatch_extra.items():
            # sbatch accepts any unambiguous prefix of a long option.
            refused = next(
                (reason for option, reason in NOT_A_SUBMISSION.items() if name and option.startswith(name)), None
            )
            if refused is not None:
                problems.append(f"cluster.sbatch_extra.{name}={value}: {refused}")
            elif name in NAMED_ELSEWHERE:
                problems.append(f"cluster.sbatch_extra.{name}={value}: is set by {NAMED_ELSEWHERE[name]}; leave it out")
            elif name == "time-min" and re.fullmatch(r"\d+:\d+", value):
                problems.append(_minutes("cluster.sbatch_extra.time-min", value))
            elif not _OPTION.fullmatch(name) or not _is_one_line(value):
                problems.append(f"cluster.sbatch_extra.{name}={value!r}: must be a long option of sbatch, on one line")
        for value in self.srun_extra:
            if not value.startswith("-") or not value.strip("-"):
                problems.append(
                    f"cluster.srun_extra: {value!r} must begin with a dash; write --name=value as one entry"
                )
        for value in (*self.srun_extra, *self.container.args, *self.container.mounts, self.container.image or ""):
            if not _is_one_line(value):
                problems.append(f"cluster: {value!r} must be on one line; change srun_extra or container")
        return problems


@dataclass(kw_only=True, slots=True)
class KubernetesClusterConfig(ClusterConfig):
    """Job submitted with kubectl."""

    kind: ClusterKind = ClusterKind.k8s
    """k8s."""

    def _problems(self) -> list[str]:
        problems = ClusterConfig._problems(self) + self._automatic_problems() + self._variable_problems()
        if "-" in self.nodes and not problems:
            problems.append(
                f"cluster.nodes={self.nodes}: a job on Kubernetes has a fixed number of pods; set one number"
            )
        return (
            problems + pod_variable_problems("env", self.env) + pod_variable_problems("network_env", self.network_env)
        )


@dataclass(kw_only=True, slots=True)
class CustomClusterConfig(ClusterConfig):
    """Job submitted to a scheduler of your own."""

    kind: ClusterKind = ClusterKind.custom
    """custom."""
    factory: str
    """Class as module:Class, a subclass of components.launch.job.scheduler.Scheduler; see examples/own_scheduler. Which
    keys of Slurm its script follows is up to the class; requeue and snapshot apply to every job."""

    def _problems(self) -> list[str]:
        problems = ClusterConfig._problems(self) + self._automatic_problems() + self._variable_problems()
        if not re.fullmatch(IMPORT_PATH, self.factory):
            problems.append(f"cluster.factory={self.factory}: must be module:Class")
        return problems


def _minutes(key: str, time: str) -> str:
    """Return the problem of a time in the form M:S, which is easily mistaken for H:M."""
    return (
        f"{key}={time}: Slurm reads minutes and seconds; set {key}={time}:00 for hours and minutes, or {key}=0:{time} "
        "for minutes and seconds"
    )


def _is_one_line(text: str) -> bool:
    return all(character == "\t" or character.isprintable() for character in text)
