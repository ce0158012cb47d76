"""Checks of Slurm and Kubernetes: whether this user can submit jobs from this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from scripts._doctor.check import NOTE, OK, PROBLEM, ROOT, Check, read_text, run_command, shorten, variable
from scripts._doctor.machine import file_system, is_networked

LISTED = 6
"""Maximum number of partitions to list."""
COLUMNS = "%P|%a|%l|%D|%t|%G"
"""Output format of sinfo: partition, availability, time limit, nodes, their state, GRES."""


def check_slurm() -> list[Check]:
    """Check whether jobs can be submitted from this machine, and to which partitions."""
    configured = str(cluster_settings().get("partition") or "")
    conf = variable("SLURM_CONF")
    if conf and not os.path.isfile(conf):
        fix = "unset SLURM_CONF, or set it to the cluster's slurm.conf"
        return [Check("slurm", PROBLEM, f"SLURM_CONF={conf}: no such file", fix)]
    if shutil.which("sinfo") is None:
        finding, fix = "not installed (no sinfo on PATH)", ""
        if configured:
            finding = f"user.yaml sets partition {configured}, but there is no sinfo on PATH"
            fix = "module load slurm, or cluster=local"
        return [Check("slurm", NOTE, f"{finding}: only local runs are possible", fix)]
    result = run_command("sinfo", "--noheader", "-o", COLUMNS, seconds=10)
    if result.status != 0 and not conf and not os.path.isfile("/etc/slurm/slurm.conf"):
        finding = f"installed, but no cluster is configured: {result.error_line}"
        return [Check("slurm", NOTE, finding, "export SLURM_CONF=...")]
    if result.status != 0:
        return [Check("slurm", PROBLEM, f"sinfo failed: {result.error_line}", "scontrol ping; cluster=local works")]
    partitions = read_partitions(result.output)
    names = [name for name, _, _ in partitions]
    checks = [Check("slurm", OK if up else NOTE, description) for _, up, description in partitions[:LISTED]]
    if len(partitions) > LISTED:
        checks.append(Check("slurm", OK, f"and {len(partitions) - LISTED} more partitions: see sinfo"))
    missing = ",".join(name for name in configured.split(",") if name and name not in names)  # sbatch accepts a list
    if not names:
        checks.append(Check("slurm", PROBLEM, "sinfo lists no partition for this user", "ask the administrators"))
    elif missing:
        fix = f"set cluster.partition={names[0]} in conf/local/user.yaml"
        checks.append(Check("slurm", PROBLEM, f"user.yaml sets partition {missing}, which does not exist", fix))
    try:
        kind = file_system(Path.cwd())
    except OSError:  # the check of the disk reports it
        kind = ""
    if kind and not is_networked(kind):
        finding = f"this folder is on {kind}, which the nodes may not mount; they need access to the run directory"
        checks.append(Check("slurm", NOTE, finding, "start from a shared folder, or set run.dir=/shared/..."))
    return checks


def read_partitions(text: str) -> list[tuple[str, bool, str]]:
    """Return (name, whether it is up, description) of every partition in sinfo's output."""
    rows: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 6:
            rows.setdefault(fields[0], []).append(fields)
    partitions = []
    for name, group in rows.items():
        nodes = sum(int(fields[3]) for fields in group if fields[3].isdecimal())
        states = ", ".join(f"{fields[3]} {fields[4]}" for fields in group)
        description = f"partition {name} ({group[0][1]}): {nodes} nodes ({states}), time limit {group[0][2]}"
        if gres := sorted({fields[5] for fields in group} - {"(null)", ""}):
            description += f", {shorten(' '.join(gres), 40)}"
        partitions.append((name.rstrip("*"), group[0][1] == "up", description))
    return partitions


def check_k8s() -> list[Check]:
    """Check whether jobs can be created from this machine: kubectl, its context, the namespace and permissions.

    What is missing is a problem if user.yaml has settings of Kubernetes, else a note: many kubeconfigs are out of date.
    """
    try:
        from components.config.schema.cluster import KubernetesClusterConfig
        from components.config.schema.schedulers import KubernetesConfig, Workload
        from components.launch.k8s.submit import namespace_problems, permission_problems
        from components.protocol.errors import ConfigError
    except ImportError as error:  # the missing packages are reported by their own check
        return [Check("k8s", NOTE, f"not checked: {shorten(str(error))}")]
    settings = cluster_settings().get("k8s")
    settings = settings if isinstance(settings, dict) else {}
    verdict = PROBLEM if settings else NOTE
    if shutil.which("kubectl") is None:
        finding, fix = "not installed (no kubectl on PATH)", ""
        if settings:
            finding = "user.yaml sets cluster.k8s, but there is no kubectl on PATH"
            fix = "https://kubernetes.io/docs/tasks/tools, or cluster=local"
        return [Check("k8s", NOTE, f"{finding}: no jobs on Kubernetes", fix)]
    context, namespace = settings.get("context"), str(settings.get("namespace") or "default")
    current = run_command("kubectl", "config", "current-context")
    if context is None and current.status != 0:
        fix = "kubectl config use-context NAME, or set KUBECONFIG"
        return [Check("k8s", verdict, f"kubectl has no context: {current.error_line}", fix)]
    try:
        workload = Workload(settings.get("workload") or Workload.job)
        k8s = KubernetesConfig(context=context and str(context), namespace=namespace, workload=workload)
        cluster = KubernetesClusterConfig(procs_per_node="1", k8s=k8s)
        problems = namespace_problems(cluster)[0] or permission_problems(cluster)[0]
    except ConfigError as error:
        problems = error.problems
    except ValueError as error:  # a workload that does not exist: the check of the config names it
        problems = [f"cluster.k8s: {error}; change conf/local/user.yaml"]
    if not problems:
        where = f"context {context or current.output.strip()}, namespace {namespace}"
        return [Check("k8s", OK, f"{where}: you may create, query and delete {workload}s")]
    checks = []
    for problem in problems:
        finding, _, fix = problem.rpartition("; ")
        checks.append(Check("k8s", verdict, finding or problem, fix if finding else "cluster=local works"))
    return checks


def cluster_settings() -> dict[str, Any]:
    """Return `cluster` of conf/local/user.yaml; empty if it has none, is not valid, or PyYAML is missing."""
    try:
        import yaml

        from components.protocol.safe_parsing import load_yaml
    except ImportError:
        return {}
    try:
        values = load_yaml(read_text(ROOT / "conf" / "local" / "user.yaml"))
    except yaml.YAMLError:
        return {}
    cluster = values.get("cluster") if isinstance(values, dict) else None
    return cluster if isinstance(cluster, dict) else {}
