"""kubectl as a child process, its errors, and jobs on Kubernetes: their ids and states."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.config.schema.kubernetes import Workload
from components.launch.backend import Job, JobState
from components.protocol.errors import ConfigError
from components.protocol.safe_json import parse_json

_ID = re.compile(r"(?P<namespace>[a-z0-9-]+)/(?P<workload>job|jobset)/(?P<name>[a-z0-9.-]+)(@(?P<context>\S+))?")
_API = {Workload.job: ("batch/v1", "Job"), Workload.jobset: ("jobset.x-k8s.io/v1alpha2", "JobSet")}
AT_ONCE = 8
"""Number of kubectl commands that run at once."""
_TIMEOUT = 60.0
"""Timeout of a command in seconds; kubectl itself gives up on a request after _REQUEST_TIMEOUT."""
_REQUEST_TIMEOUT = "20s"
COLLECTIONS = {
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
        found = _ID.fullmatch(job)
        if found is None:
            return None
        return cls(found["namespace"], Workload(found["workload"]), found["name"], found["context"])

    @property
    def path(self) -> str:
        """API path of the job."""
        return f"{COLLECTIONS[_API[self.workload]].format(self.namespace)}/{self.name}"

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
    return run_kubectl(name.context, ["-n", name.namespace, "delete", resource, name.name, "--wait=false"]).status == 0


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
        found = _REASON.match(self.errors)
        return found[1] if found else ""

    @property
    def message(self) -> str:
        """The server's message of a failure, on one line."""
        found = _REASON.match(self.errors)
        text = found[2] if found else self.errors.removeprefix("error: ")
        return "; ".join(line.strip() for line in text.splitlines() if line.strip()) or f"exit status {self.status}"

    def json(self) -> dict[str, Any]:
        """Return the object in the output; empty if it is not JSON."""
        try:
            value = parse_json(self.output)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def run_kubectl(context: str | None, arguments: Sequence[str], stdin: str = "") -> Answer:
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
            f"cluster.k8s.context={context}: is not in your kubeconfig ({kubeconfig()}); `kubectl config get-contexts` "
            "lists its contexts"
        )
    if answer.status and any(text in answer.errors for text in _UNREACHABLE):
        raise Unreachable(
            f"cluster.kind=k8s: the cluster cannot be reached: {answer.message}; check `kubectl cluster-info`, "
            "KUBECONFIG and cluster.k8s.context, set cluster=local, or only print the manifest: cluster.dry_run=render"
        )
    return answer


def kubeconfig() -> str:
    """Return the files that kubectl reads its configuration from."""
    return os.environ.get("KUBECONFIG") or "~/.kube/config"


def create(context: str | None, namespace: str, body: dict[str, Any], *, dry_run: bool = False) -> Answer:
    """Create an object; with `dry_run` the server checks it and stores nothing. Raises as `run_kubectl`."""
    path = COLLECTIONS[body["apiVersion"], body["kind"]].format(namespace)
    query = "fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
    return run_kubectl(context, ["create", "--raw", f"{path}?{query}", "-f", "-"], json.dumps(body))


def get(context: str | None, path: str) -> Answer:
    """Return the object or list at an API path. Raises as `run_kubectl`."""
    return run_kubectl(context, ["get", "--raw", path])


def may(context: str | None, namespace: str, verb: str, group: str, resource: str) -> bool:
    """Return whether this user may do something in a namespace, True if the cluster does not report it.

    The request of `kubectl auth can-i`, without the downloads of the cluster's API description that precede it there.
    Raises as `run_kubectl`.
    """
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": resource}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    body = {**review, "spec": {"resourceAttributes": attributes}}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = run_kubectl(context, ["create", "--raw", path, "-f", "-"], json.dumps(body))
    return bool((answer.json().get("status") or {}).get("allowed", answer.status != 0))
