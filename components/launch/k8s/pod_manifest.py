"""Rendering of a job's manifest from k8s/job.yaml.j2, k8s/jobset.yaml.j2 or the user's own template."""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.config.schema.cluster import ClusterConfig, Device
from components.config.schema.kubernetes import PodUser, Workload
from components.launch.job.scheduler import render_template
from components.launch.k8s.pod_jobs import COLLECTIONS, JobName
from components.project import COMPONENTS, PROJECT
from components.protocol.errors import EXIT_RESTART, ConfigError
from components.protocol.role import JOB
from components.protocol.safe_yaml import check_expansion

_TEMPLATES = PROJECT / "k8s"
_ROOT = COMPONENTS.parent
"""Folder of `components`, which is prepended to PYTHONPATH if a volume contains it."""
_LONGEST_NAME = 40
"""Maximum characters of a job's name; host names of pods, which append to it, have at most 63."""
RUN_LABEL = "meshbook-run"
"""Label of the pods of a job, with its name."""


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
        known = isinstance(each, dict) and (each.get("apiVersion"), each.get("kind")) in COLLECTIONS
        if not known or not isinstance(each.get("metadata"), dict):
            kinds = ", ".join(kind for _, kind in COLLECTIONS)
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
