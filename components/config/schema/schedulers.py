"""Parts of `cluster` that only affect Slurm jobs, and parts that only affect Kubernetes jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from components.protocol.errors import at_least, raise_all
from components.protocol.processes import ATTEMPT, RUN_DIR, WORKER, reserved_for_ranks

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
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_QUALIFIED = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?", re.ASCII)
_TOLERATION = re.compile(r"(?P<key>[^=:]*)(=(?P<value>[^=:]*))?(:(?P<effect>[A-Za-z]+))?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]+)?"
_PATH_PART = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"({_HOST}/)?{_PATH_PART}(/{_PATH_PART})*(:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?",
    re.ASCII,
)
"""[HOST[:PORT]/]PATH[:TAG][@DIGEST], as in the OCI distribution specification."""


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
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    hours, minutes, seconds = (0, *parts) if len(parts) == 2 else parts
    return (hours * 60 + minutes) * 60 + seconds


class Workload(StrEnum):
    """job: an Indexed Job with a headless Service, part of every cluster; jobset: a JobSet, whose controller must be
    installed."""

    job = "job"
    jobset = "jobset"


class PodUser(StrEnum):
    """submitter: the user and group ids of the process that submits, which owns the run directory; image: the image's
    user."""

    submitter = "submitter"
    image = "image"


@dataclass(kw_only=True, slots=True)
class KubernetesConfig:
    """Job on Kubernetes; only affects cluster.kind=k8s. One pod per node (cluster.nodes) starts its ranks."""

    context: str | None = None
    """Context of your kubeconfig; null: the current one."""
    namespace: str = "default"
    """Namespace of the job, its volumes, queue and quota."""
    image: str | None = None
    """Container image with Meshbook's environment, [HOST/]PATH[:TAG][@DIGEST]; required."""
    image_pull_secrets: list[str] = field(default_factory=list)
    """Names of the secrets for pulling the image from a private registry."""
    workload: Workload = Workload.job
    """job (an Indexed Job with a headless Service) or jobset (a JobSet, for clusters with its controller)."""
    queue: str | None = None
    """Kueue LocalQueue that admits all pods at once; null: no queue, so that some pods may hold nodes while others
    wait."""
    priority_class: str | None = None
    """Priority class of the pods; null: the cluster's default."""
    volumes: dict[str, str] = field(default_factory=dict)
    """Persistent volume claims by name, and the path at which to mount each: {runs: /runs}. One must contain run.dir,
    and be mounted at the same path on the machine that submits."""
    service_account: str | None = None
    """Service account of the pods; null: the namespace's default. Its token is not mounted."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the resource that requests GPUs, one per process; unused if cluster.device=cpu."""
    resources: dict[str, str] = field(default_factory=dict)
    """Other resources of a pod, as request and limit, such as {cpu: "64", memory: 900Gi, rdma/ib: "1"}."""
    shm_size: str = "16Gi"
    """Size of /dev/shm, which NCCL and data workers use; counts towards the pod's memory."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that the nodes must have."""
    tolerations: list[str] = field(default_factory=list)
    """Taints that the pods tolerate, each KEY[=VALUE][:EFFECT], such as nvidia.com/gpu:NoSchedule."""
    secrets: list[str] = field(default_factory=list)
    """Names of Kubernetes secrets whose keys become environment variables of the ranks, such as HF_TOKEN. The variables
    of your shell do not reach the pods."""
    annotations: dict[str, str] = field(default_factory=dict)
    """Annotations of the pods, such as those that attach a second network."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the job and its pods."""
    code: str | None = None
    """Folder in the pods that contains components/, to be prepended to PYTHONPATH; null: this checkout if a volume
    contains it, else the packages of the image."""
    user: PodUser = PodUser.submitter
    """User of the ranks: submitter (your user and group ids, so that they own their files on the volume) or image."""
    keep_hours: float = 168.0
    """Hours after which the cluster deletes an ended job with its pods and their logs, at least 0; the run directory
    remains."""

    def __post_init__(self) -> None:
        raise_all([*self._name_problems(), *self._map_problems(), *self._volume_problems()])

    def _name_problems(self) -> list[str]:
        named = {"namespace": self.namespace, "queue": self.queue, "priority_class": self.priority_class}
        lists = {"secrets": self.secrets, "image_pull_secrets": self.image_pull_secrets}
        named["service_account"] = self.service_account
        found = [_name(key, name, _SUBDOMAIN if key != "namespace" else _LABEL) for key, name in named.items()]
        found += [_name(key, name, _SUBDOMAIN) for key, names in lists.items() for name in names]
        problems = [problem for problem in found if problem]
        if self.image is not None and not _IMAGE.fullmatch(self.image):
            lower = self.image.lower()
            hint = f"did you mean {lower}?" if _IMAGE.fullmatch(lower) else "write [HOST[:PORT]/]PATH[:TAG][@DIGEST]"
            problems.append(f"cluster.k8s.image={self.image!r}: is not a valid image name; {hint}")
        if self.code is not None and not self.code.startswith("/"):
            problems.append(f"cluster.k8s.code={self.code}: must be an absolute path in the pods")
        return problems + at_least("cluster.k8s.keep_hours", self.keep_hours, 0)

    def _map_problems(self) -> list[str]:
        problems = []
        for name, amount in {**self.resources, "shm_size": self.shm_size}.items():
            key = "cluster.k8s.shm_size" if name == "shm_size" else f"cluster.k8s.resources.{name}"
            if not _QUANTITY.fullmatch(amount):
                problems.append(f"{key}={amount!r}: is not a Kubernetes quantity; write a number or 64Gi, 500M, 250m")
        if "shm_size" in self.resources:
            problems.append("cluster.k8s.resources.shm_size: is not a Kubernetes resource; set cluster.k8s.shm_size")
        if self.gpu_resource in self.resources:
            problems.append(
                f"cluster.k8s.resources.{self.gpu_resource}: is set by cluster.procs_per_node; leave it out"
            )
        for name in (self.gpu_resource, *self.resources, *self.node_selector, *self.labels, *self.annotations):
            if not _QUALIFIED.fullmatch(name):
                problems.append(
                    f"cluster.k8s: {name!r} is not a valid name of a resource, label or annotation; write [DOMAIN/]NAME"
                )
        for section, values in (("node_selector", self.node_selector), ("labels", self.labels)):
            problems += [
                f"cluster.k8s.{section}.{name}={value!r}: is not a valid label value; use at most 63 letters, digits, "
                "dashes, underscores and dots"
                for name, value in values.items()
                if not _LABEL_VALUE.fullmatch(value)
            ]
        for text in self.tolerations:
            match = _TOLERATION.fullmatch(text)
            if match is None or not match["key"] or (match["effect"] or _EFFECTS[0]) not in _EFFECTS:
                problems.append(
                    f"cluster.k8s.tolerations: {text!r} is not KEY[=VALUE][:EFFECT] with the effect "
                    f"{', '.join(_EFFECTS[:-1])} or {_EFFECTS[-1]}"
                )
        return problems

    def _volume_problems(self) -> list[str]:
        problems = []
        for claim, path in self.volumes.items():
            key, parts = f"cluster.k8s.volumes.{claim}", path.split("/")
            if not _SUBDOMAIN.fullmatch(claim):
                problems.append(f"{key}: is not a valid name of a persistent volume claim")
            if not path.startswith("/") or ":" in path or {"", ".", ".."} & set(parts[1:]):
                problems.append(f"{key}={path!r}: must be an absolute path other than /, without . and .. and ':'")
            elif path == "/dev/shm" or path.startswith("/dev/shm/"):
                problems.append(f"{key}={path}: /dev/shm is shared memory; mount the volume elsewhere")
        if len(set(self.volumes.values())) < len(self.volumes):
            problems.append(f"cluster.k8s.volumes={self.volumes}: two claims have the same path; give each its own")
        return problems

    @property
    def parsed_tolerations(self) -> list[dict[str, str]]:
        """`tolerations` as in a pod's specification."""
        parsed = []
        for toleration in filter(None, map(_TOLERATION.fullmatch, self.tolerations)):
            entry = {"key": toleration["key"], "operator": "Exists" if toleration["value"] is None else "Equal"}
            entry |= {name: value for name in ("value", "effect") if (value := toleration[name])}
            parsed.append(entry)
        return parsed


def pod_variable_problems(section: str, names: Iterable[str]) -> list[str]:
    """Reject variables of `cluster.SECTION` that each pod sets for its ranks."""
    return [
        f"cluster.{section}.{name}: is set for each rank by its pod; choose another name"
        for name in names
        if reserved_for_ranks(name)
    ]


def _name(key: str, name: str | None, pattern: re.Pattern[str]) -> str | None:
    """Return the problem of a name of a Kubernetes object; None if it is valid or null."""
    if name is None or pattern.fullmatch(name):
        return None
    return (
        f"cluster.k8s.{key}={name!r}: is not a valid name of a Kubernetes object; use lowercase letters, digits and "
        "dashes, beginning and ending with a letter or digit"
    )
