"""What is sent to kubectl and what it answers: the manifest of a job, and the ids, states and errors of jobs.

Manifests are rendered from k8s/job.yaml.j2, k8s/jobset.yaml.j2 or the user's own template.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.config.schema.cluster import ClusterConfig, Device
from components.config.schema.schedulers import PodUser, Workload
from components.launch.backend import Job, JobState
from components.launch.job.scheduler import render_template
from components.package import COMPONENTS, PROJECT
from components.protocol.errors import EXIT_RESTART, ConfigError
from components.protocol.processes import JOB
from components.protocol.safe_parsing import check_expansion, parse_json

_ID = re.compile(r"(?P<namespace>[a-z0-9-]+)/(?P<workload>job|jobset)/(?P<name>[a-z0-9.-]+)(@(?P<context>\S+))?")
_API = {Workload.job: ("batch/v1", "Job"), Workload.jobset: ("jobset.x-k8s.io/v1alpha2", "JobSet")}
AT_ONCE = 8
"""Number of kubectl commands that run at once."""
_TIMEOUT = 60.0
"""Timeout of a command in seconds; kubectl itself gives up on a request after _REQUEST_TIMEOUT."""
_REQUEST_TIMEOUT = "20s"
_COLLECTIONS = {
    ("batch/v1", "Job"): "/apis/batch/v1/namespaces/{}/jobs",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    ("v1", "Service"): "/api/v1/namespaces/{}/services",
    ("v1", "ConfigMap"): "/api/v1/namespaces/{}/configmaps",
}
"""apiVersion and kind of the objects that a manifest may contain -> path of their collection.

Objects are created with `kubectl create --raw PATH`. Unlike `kubectl create -f`, it sends one request without first
downloading the cluster's API description, and the path selects strict validation and dry runs on the server, which
older versions of kubectl do not offer otherwise."""
_REASON = re.compile(r"^(?:error: |Error from server )\(?(\w+)\)?: (.*)", re.DOTALL)
_UNREACHABLE = (
    *(
        "Unable to connect to the server",
        "The connection to the server",
        "couldn't get current server API",
        "i/o timeout",
    ),
    *("no such host", "connection refused", "context deadline exceeded", "TLS handshake", "unexpected EOF"),
    *("net/http", "Client.Timeout", "getting credentials", "asked for the client to provide credentials"),
    *("no configuration has been provided", "invalid configuration", "(Unauthorized)", "(ServiceUnavailable)"),
    *("(Timeout)", "(ServerTimeout)", "(InternalError)", "(TooManyRequests)", "error loading config file"),
)
_TEMPLATES = PROJECT / "k8s"
_ROOT = COMPONENTS.parent
"""Folder of `components`, which is prepended to PYTHONPATH if a volume contains it."""
_LONGEST_NAME = 40
"""Maximum characters of a job's name; host names of pods, which append to it, have at most 63."""
RUN_LABEL = "meshbook-run"
"""Label of the pods of a job, with its name."""


@dataclass(frozen=True, slots=True)
class JobName:
    """Name of a job on a cluster; its text is the job's id: NAMESPACE/WORKLOAD/NAME[@CONTEXT]."""

    namespace: str
    workload: Workload
    name: str
    context: str | None = None
    """Context of the kubeconfig; None: the current one."""

    def __str__(self) -> str:
        context = f"@{self.context}" if self.context else ""
        return f"{self.namespace}/{self.workload}/{self.name}{context}"

    @classmethod
    def parse(cls, job: str) -> JobName | None:
        """Return the name in an id, or None for an id of another backend."""
        match = _ID.fullmatch(job)
        if match is None:
            return None
        return cls(match["namespace"], Workload(match["workload"]), match["name"], match["context"])

    @property
    def path(self) -> str:
        """API path of the job."""
        return f"{_COLLECTIONS[_API[self.workload]].format(self.namespace)}/{self.name}"

    def command(self, *arguments: str) -> str:
        """Return a kubectl command in the job's namespace and context, for a shell."""
        context = f" --context={self.context}" if self.context else ""
        return f"kubectl{context} -n {self.namespace} {' '.join(arguments)}"

    @property
    def first_job(self) -> str:
        """Name of the Job that owns the pods: the job itself, or the one that its JobSet creates."""
        return self.name if self.workload == Workload.job else f"{self.name}-ranks-0"

    @property
    def first_host(self) -> str:
        """Host name of the first pod within the namespace."""
        return f"{self.first_job}-0.{self.name}"


def delete(name: JobName) -> bool:
    """Delete a job, and return whether the cluster accepted the request. Raises ConfigError if it does not answer."""
    # The full name of a resource is unambiguous on any cluster.
    resource = "jobs.batch" if name.workload == Workload.job else "jobsets.jobset.x-k8s.io"
    return _run_kubectl(name.context, ["-n", name.namespace, "delete", resource, name.name, "--wait=false"]).status == 0


def state_of(name: JobName) -> Job:
    """Return a job as the cluster reports it."""
    try:
        answer = get(name.context, name.path)
    except ConfigError as error:
        return Job(str(name), "Kubernetes", JobState.unknown, "unknown", over=False, doubt=str(error))
    if answer.reason == "NotFound":
        return Job(str(name), "Kubernetes", JobState.gone, "gone", over=True)
    if answer.status:
        return Job(str(name), "Kubernetes", JobState.unknown, "unknown", over=False, doubt=answer.message)
    state, reported, over = _describe_status(answer.json(), name.workload)
    return Job(str(name), "Kubernetes", state, reported, over=over)


def _describe_status(job: dict[str, Any], workload: Workload) -> tuple[JobState, str, bool]:
    """Return the state of a Job or JobSet object, the condition that the cluster reports, and whether it has ended."""
    status, deleted = job.get("status") or {}, "deletionTimestamp" in (job.get("metadata") or {})
    conditions = {each.get("type"): each for each in status.get("conditions") or () if each.get("status") == "True"}
    # A Job says Complete, a JobSet Completed. Counts of pods lag behind conditions, so that they come last.
    for ending in ("Complete", "Completed"):
        if ending in conditions:
            return JobState.ended, ending, True
    if "Failed" in conditions:
        reason = conditions["Failed"].get("reason") or ""
        state = JobState.timeout if reason == "DeadlineExceeded" else JobState.failed
        return state, f"Failed ({reason})" if reason else "Failed", True
    if deleted:
        return JobState.running, "Terminating", False
    if "Suspended" in conditions:
        return JobState.submitted, "Suspended", False
    if workload == Workload.jobset:
        parts = status.get("replicatedJobsStatus") or [{}]
        active, ready = (sum(part.get(key) or 0 for part in parts) for key in ("active", "ready"))
    else:
        active, ready = status.get("active") or 0, status.get("ready") or 0
    if ready:
        return JobState.running, "Running", False
    return JobState.submitted, "Pending" if active else "Created", False


class Unreachable(ConfigError):
    """kubectl received no answer from the cluster, which may still carry out the request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Exit status, stdout and stderr of a kubectl command that reached the cluster."""

    status: int
    output: str
    errors: str

    @property
    def reason(self) -> str:
        """The server's reason of a failure, such as NotFound, Forbidden or AlreadyExists; empty if it named none."""
        match = _REASON.match(self.errors)
        return match[1] if match else ""

    @property
    def message(self) -> str:
        """The server's message of a failure, on one line."""
        match = _REASON.match(self.errors)
        text = match[2] if match else self.errors.removeprefix("error: ")
        return "; ".join(line.strip() for line in text.splitlines() if line.strip()) or f"exit status {self.status}"

    def json(self) -> dict[str, Any]:
        """Return the object in the output; empty if it is not JSON."""
        try:
            value = parse_json(self.output)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def _run_kubectl(context: str | None, arguments: Sequence[str], stdin: str = "") -> Answer:
    """Run a kubectl command with `stdin` as its input.

    Raises:
        Unreachable: The cluster did not answer.
        ConfigError: kubectl is not installed, or its configuration has no such context.
    """
    command = ["kubectl", *([f"--context={context}"] if context else []), f"--request-timeout={_REQUEST_TIMEOUT}"]
    try:
        done = subprocess.run(
            [*command, *arguments], input=stdin, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (FileNotFoundError, PermissionError) as error:  # the latter if a folder in PATH is not searchable
        raise ConfigError(
            "cluster.kind=k8s: there is no kubectl on PATH; install it (https://kubernetes.io/docs/tasks/tools), set "
            "cluster=local, or only print the manifest: cluster.dry_run=render"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"cluster.kind=k8s: kubectl did not respond within {_TIMEOUT:g} s") from error
    answer = Answer(done.returncode, done.stdout.strip(), done.stderr.strip())
    if answer.status and "context" in answer.errors and "does not exist" in answer.errors:
        raise ConfigError(
            f"cluster.k8s.context={context}: is not in your kubeconfig ({_kubeconfig()}); `kubectl config "
            "get-contexts` lists its contexts"
        )
    if answer.status and any(text in answer.errors for text in _UNREACHABLE):
        raise Unreachable(
            f"cluster.kind=k8s: the cluster cannot be reached: {answer.message}; check `kubectl cluster-info`, "
            "KUBECONFIG and cluster.k8s.context, set cluster=local, or only print the manifest: cluster.dry_run=render"
        )
    return answer


def _kubeconfig() -> str:
    """Return the files that kubectl reads its configuration from."""
    return os.environ.get("KUBECONFIG") or "~/.kube/config"


def create(context: str | None, namespace: str, body: dict[str, Any], *, dry_run: bool = False) -> Answer:
    """Create an object; with `dry_run` the server checks it and stores nothing. Raises as `_run_kubectl`."""
    path = _COLLECTIONS[body["apiVersion"], body["kind"]].format(namespace)
    query = "fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
    return _run_kubectl(context, ["create", "--raw", f"{path}?{query}", "-f", "-"], json.dumps(body))


def get(context: str | None, path: str) -> Answer:
    """Return the object or list at an API path. Raises as `_run_kubectl`."""
    return _run_kubectl(context, ["get", "--raw", path])


def may(context: str | None, namespace: str, verb: str, group: str, resource: str) -> bool:
    """Return whether this user may do something in a namespace, True if the cluster does not report it.

    The request of `kubectl auth can-i`, without the downloads of the cluster's API description that precede it there.
    Raises as `_run_kubectl`.
    """
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": resource}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    body = {**review, "spec": {"resourceAttributes": attributes}}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = _run_kubectl(context, ["create", "--raw", path, "-f", "-"], json.dumps(body))
    return bool((answer.json().get("status") or {}).get("allowed", answer.status != 0))


@dataclass(frozen=True, slots=True)
class PodManifest:
    """Input of the manifest's template."""

    cluster: ClusterConfig
    job: JobName
    run_dir: Path
    recipe: str
    """The recipe's file in the pods: absolute on a volume, or relative to Meshbook's folder in the pods."""
    folder: Path
    """Working directory of the submission; that of the pods if a volume contains it."""


def new_job_name(cluster: ClusterConfig, name: str) -> JobName:
    """Return an unused name for a job, from the name of its run."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    slug = slug if slug[0].isalpha() else f"run-{slug}"  # names of Services begin with a letter
    ending = secrets.token_hex(4)
    short = slug[: _LONGEST_NAME - len(ending) - 1].rstrip("-")
    return JobName(cluster.k8s.namespace, cluster.k8s.workload, f"{short}-{ending}", cluster.k8s.context)


def mounted_at(cluster: ClusterConfig, path: Path) -> str | None:
    """Return the mount path of the volume that contains a path; None if there is none."""
    return next((mount for mount in cluster.k8s.volumes.values() if path.is_relative_to(mount)), None)


def code_in_pods(cluster: ClusterConfig) -> str | None:
    """Return the folder of Meshbook's code on a volume, which pods prepend to PYTHONPATH; None: that of the image."""
    return cluster.k8s.code or (str(_ROOT) if mounted_at(cluster, _ROOT) else None)


def recipe_in_pods(file: Path) -> str:
    """Return the recipe's path for the pods: relative to Meshbook's folder there, or absolute for a user's own."""
    return str(file.relative_to(PROJECT)) if file.is_relative_to(PROJECT) else str(file)


def render_manifest(manifest: PodManifest) -> str:
    """Return the manifest. Raises ConfigError if the template cannot be rendered, or its objects cannot be created."""
    from jinja2 import FileSystemLoader, StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    cluster = manifest.cluster
    file = Path(os.path.expanduser(cluster.template or _TEMPLATES / f"{cluster.k8s.workload}.yaml.j2"))
    environment = SandboxedEnvironment(
        loader=FileSystemLoader([file.parent, _TEMPLATES]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["yaml"] = _as_yaml
    text = render_template(environment, file, _values(manifest))
    text = "".join(line for line in text.splitlines(keepends=True) if line.strip())
    _check_objects(objects_in(text, f"cluster.template={file}"), manifest.job, f"cluster.template={file}")
    return text


def _as_yaml(value: object) -> str:
    """Return a value as YAML on one line: JSON, in which YAML reads surrogates and other line breaks differently."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text)


def objects_in(manifest: str, what: str) -> list[dict[str, Any]]:
    """Return the objects of a manifest. Raises ConfigError, beginning with `what`, if it is not YAML of objects."""
    try:
        check_expansion(manifest)
        objects = [each for each in yaml.safe_load_all(manifest) if each is not None]
    except (yaml.YAMLError, ValueError) as error:  # an integer of 5,000 digits, a date in month 13
        raise ConfigError(f"{what}: renders to invalid YAML: {' '.join(str(error).split())}") from error
    for each in objects:
        known = isinstance(each, dict) and (each.get("apiVersion"), each.get("kind")) in _COLLECTIONS
        if not known or not isinstance(each.get("metadata"), dict):
            kinds = ", ".join(kind for _, kind in _COLLECTIONS)
            raise ConfigError(
                f"{what}: may only contain objects with metadata of the kinds {kinds}; create others beforehand"
            )
    return objects


def is_workload(each: dict[str, Any]) -> bool:
    """Return whether an object of a manifest is the Job or JobSet that runs the pods."""
    return each["kind"] in ("Job", "JobSet")


def _check_objects(objects: list[dict[str, Any]], job: JobName, what: str) -> None:
    """Raise ConfigError unless the manifest has exactly the workload that the job's id names, in its namespace."""
    expected = ("Job" if job.workload == Workload.job else "JobSet", job.name)
    workloads = [(each["kind"], each["metadata"].get("name")) for each in objects if is_workload(each)]
    if workloads != [expected]:
        raise ConfigError(
            f"{what}: must contain one {expected[0]} with `name: {{{{ name }}}}` and no other workload "
            f"(cluster.k8s.workload={job.workload}); it has {workloads or 'none'}"
        )
    if any(each["metadata"].get("namespace", job.namespace) != job.namespace for each in objects):
        raise ConfigError(f"{what}: every object must be in cluster.k8s.namespace={job.namespace}")


def _values(manifest: PodManifest) -> dict[str, Any]:
    """Return the template's variables, all of which docs/kubernetes.md documents."""
    cluster, job = manifest.cluster, manifest.job
    k8s = cluster.k8s
    labels = {"app.kubernetes.io/name": "meshbook", **k8s.labels, RUN_LABEL: job.name}
    return {
        "cluster": cluster,
        "k8s": k8s,
        "name": job.name,
        "labels": labels,
        "job_labels": {**labels, **({"kueue.x-k8s.io/queue-name": k8s.queue} if k8s.queue else {})},
        "command": [
            _literal(cluster.python or "python"),
            *("-m", "components.launch.k8s.pod", _literal(manifest.run_dir), _literal(manifest.recipe)),
        ],
        "env": {name: _literal(value) for name, value in _environment(manifest).items()},
        "folder": str(manifest.folder) if mounted_at(cluster, manifest.folder) else "",
        "resources": pod_resources(cluster),
        "tolerations": k8s.parsed_tolerations,
        "user": {"uid": os.getuid(), "gid": os.getgid()} if k8s.user == PodUser.submitter else None,
        "restart_status": EXIT_RESTART,
        "keep_seconds": round(k8s.keep_hours * 3600),
    }


def _literal(value: object) -> str:
    """Escape $, since Kubernetes replaces $(NAME) in commands and variables, and $$ by $."""
    return str(value).replace("$", "$$")


def pod_resources(cluster: ClusterConfig) -> dict[str, str]:
    """Return the resources of one pod, as request and limit: GPUs, CPU cores, and cluster.k8s.resources."""
    procs = int(cluster.procs_per_node)
    resources = {} if cluster.cpus_per_proc is None else {"cpu": str(cluster.cpus_per_proc * procs)}
    if cluster.device != Device.cpu:
        resources[cluster.k8s.gpu_resource] = str(procs)
    return resources | cluster.k8s.resources


def _environment(manifest: PodManifest) -> dict[str, str]:
    """Return the variables of a pod; the user's take precedence."""
    cluster, k8s = manifest.cluster, manifest.cluster.k8s
    code = code_in_pods(cluster)
    variables = {JOB: str(manifest.job), "MASTER_ADDR": manifest.job.first_host, "PYTHONUNBUFFERED": "1"}
    if k8s.user == PodUser.submitter:  # whose id the image has no name and home for
        variables |= {"HOME": "/tmp", "USER": "meshbook", "LOGNAME": "meshbook"}
    variables |= cluster.network_env | cluster.env
    if code is not None:  # prepended, as on Slurm: the user's folders add modules, and do not replace Meshbook
        variables["PYTHONPATH"] = ":".join(filter(None, [code, variables.get("PYTHONPATH")]))
    return variables
