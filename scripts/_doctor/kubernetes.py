"""Checks of Kubernetes: kubectl, its context, and the user's namespace and permissions, as before a submission."""

from __future__ import annotations

from typing import Any

from scripts._doctor.check import NOTE, OK, PROBLEM, ROOT, Check, read_text, run_command, shorten

TOPIC = "k8s"


def check_k8s() -> list[Check]:
    """Check whether jobs can be created from this machine.

    What is missing is a problem if user.yaml has settings of Kubernetes, else a note: many kubeconfigs are out of date.
    """
    try:
        from components.config.schema.cluster import KubernetesClusterConfig
        from components.config.schema.schedulers import KubernetesConfig, Workload
        from components.launch.k8s.submit import namespace_problems, permission_problems
        from components.protocol.errors import ConfigError
    except ImportError as error:  # the missing packages are reported by their own check
        return [Check(TOPIC, NOTE, f"not checked: {shorten(str(error))}")]
    settings = k8s_settings(read_text(ROOT / "conf" / "local" / "user.yaml"))
    verdict = PROBLEM if settings else NOTE
    context, namespace = settings.get("context"), str(settings.get("namespace") or "default")
    found = run_command("kubectl", "config", "current-context")
    if found.status is None and "not on PATH" in found.errors:
        if not settings:
            return [Check(TOPIC, NOTE, "not installed (no kubectl on PATH): no jobs on Kubernetes")]
        finding = "user.yaml sets cluster.k8s, but there is no kubectl on PATH: no jobs on Kubernetes"
        return [Check(TOPIC, NOTE, finding, "https://kubernetes.io/docs/tasks/tools, or cluster=local")]
    if context is None and found.status != 0:
        fix = "kubectl config use-context NAME, or set KUBECONFIG"
        return [Check(TOPIC, verdict, f"kubectl has no context: {found.error_line}", fix)]
    try:
        workload = Workload(settings.get("workload") or Workload.job)
        k8s = KubernetesConfig(context=context and str(context), namespace=namespace, workload=workload)
        cluster = KubernetesClusterConfig(procs_per_node="1", k8s=k8s)
        problems, _ = namespace_problems(cluster)
        if not problems:
            problems, _ = permission_problems(cluster)
    except ConfigError as error:
        problems = error.problems
    except ValueError as error:  # a workload that does not exist: the check of the config names it
        problems = [f"cluster.k8s: {error}; change conf/local/user.yaml"]
    if not problems:
        where = f"context {context or found.output.strip()}, namespace {namespace}"
        return [Check(TOPIC, OK, f"{where}: you may create, query and delete {k8s.workload}s")]
    return [Check(TOPIC, verdict, *_finding_and_fix(each)) for each in problems]


def _finding_and_fix(problem: str) -> tuple[str, str]:
    finding, separator, fix = problem.rpartition("; ")
    return (finding, fix) if separator else (problem, "cluster=local works")


def k8s_settings(user_yaml: str) -> dict[str, Any]:
    """Return cluster.k8s of the text of user.yaml; empty if it has none, or is not valid."""
    import yaml

    from components.protocol.safe_yaml import load_yaml

    try:
        values = load_yaml(user_yaml)
    except yaml.YAMLError:
        return {}
    for name in ("cluster", "k8s"):
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}
