"""The doctor's check of Kubernetes, with the real kubectl and a test API server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts._doctor import clusters
from scripts._doctor.check import NOTE, OK, PROBLEM
from scripts._doctor.clusters import check_k8s
from tests.kubernetes.api import ApiServer
from tests.kubernetes.desk import path_without_kubectl


@pytest.fixture
def user_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's settings in a project of the test."""
    file = tmp_path / "conf" / "local" / "user.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("cluster:\n  k8s: {namespace: train}\n")
    monkeypatch.setattr(clusters, "ROOT", tmp_path)
    return file


def found() -> tuple[str, str]:
    """Return the verdict and the line of the only check."""
    (check,) = check_k8s()
    assert check.fix or check.verdict != PROBLEM
    return check.verdict, f"{check.finding} -> {check.fix}"


def test_doctor_checks_context_namespace_and_permissions(
    api: ApiServer, user_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in api.variables.items():
        monkeypatch.setenv(name, value)
    assert found() == (OK, "context here, namespace train: you may create, query and delete jobs -> ")
    api.forbidden.add(("create", "jobs"))
    verdict, line = found()
    assert verdict == PROBLEM
    assert line.startswith(
        "cluster.k8s.namespace=train: you may not create jobs there (kubectl auth can-i create jobs)"
    )
    user_yaml.write_text("cluster:\n  k8s: {namespace: other}\n")
    assert found()[1].startswith("cluster.k8s.namespace=other: no such namespace -> `kubectl get namespaces` lists")
    user_yaml.write_text("cluster:\n  k8s: {context: gone}\n")
    assert found()[1].startswith("cluster.k8s.context=gone: is not in your kubeconfig")
    user_yaml.write_text("cluster:\n  k8s: {workload: pod}\n")
    assert "'pod' is not a valid Workload -> change conf/local/user.yaml" in found()[1]
    user_yaml.write_text("cluster:\n  k8s: {namespace: train}\n")
    api.stop()
    verdict, line = found()
    assert verdict == PROBLEM
    assert line.startswith("cluster.kind=k8s: the cluster cannot be reached: ")
    user_yaml.write_text("optimizer: {lr: 0.1}\n")
    assert found()[0] == NOTE  # a kubeconfig that is out of date, of a user who does not use Kubernetes


def test_machine_without_kubectl_or_a_context_gets_one_line(user_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", os.devnull)
    if os.environ["PATH"] != path_without_kubectl():
        verdict, line = found()
        assert (verdict, line.partition(": ")[0]) == (PROBLEM, "kubectl has no context")
    monkeypatch.setenv("PATH", path_without_kubectl())
    assert found()[1].startswith("user.yaml sets cluster.k8s, but there is no kubectl on PATH: no jobs on Kubernetes")
    user_yaml.write_text("")
    assert found() == (NOTE, "not installed (no kubectl on PATH): no jobs on Kubernetes -> ")
