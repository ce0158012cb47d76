"""kubectl as a child process, and the classification of its errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.config.errors import ConfigError
from components.protocol.safe_json import parse_json

TIMEOUT = 60.0
"""Timeout of a command in seconds; kubectl itself gives up on a request after REQUEST_TIMEOUT."""
REQUEST_TIMEOUT = "20s"

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
    command = ["kubectl", *([f"--context={context}"] if context else []), f"--request-timeout={REQUEST_TIMEOUT}"]
    try:
        done = subprocess.run(
            [*command, *arguments], input=stdin, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except (FileNotFoundError, PermissionError) as error:  # the latter if a folder in PATH is not searchable
        raise ConfigError(
            "cluster.kind=k8s: there is no kubectl on PATH; install it (https://kubernetes.io/docs/tasks/tools), set "
            "cluster=local, or only print the manifest: cluster.dry_run=render"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"cluster.kind=k8s: kubectl did not respond within {TIMEOUT:g} s") from error
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
