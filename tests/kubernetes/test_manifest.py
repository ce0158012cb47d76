"""The rendered manifests: valid by the official schemas of several versions, with every value as the user wrote it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from components.config.schema import KubernetesClusterConfig, KubernetesConfig
from components.config.schema.schedulers import PodUser, Workload
from components.launch.k8s.kubectl import JobName, PodManifest, new_job_name, objects_in, render_manifest
from components.launch.k8s.submit import amount
from components.protocol.errors import ConfigError
from tests.slurm.strings import HOSTILE, UNSTORABLE

VERSIONS = ("1.29", "1.31", "1.34", "1.37")
STRINGS = [text for texts in HOSTILE.values() for text in texts if text not in UNSTORABLE]
FULL: dict[str, Any] = {
    "context": "prod",
    "namespace": "train",
    "image": "registry.example.com:5000/team/meshbook:1.2@sha256:" + "a" * 64,
    "image_pull_secrets": ["registry"],
    "queue": "gpu-queue",
    "priority_class": "high",
    "volumes": {"runs": "/runs", "data": "/data"},
    "service_account": "trainer",
    "resources": {"cpu": "64", "memory": "900Gi", "rdma/ib": "1"},
    "node_selector": {"gpu": "h100"},
    "tolerations": ["nvidia.com/gpu:NoSchedule", "dedicated=train", "spot"],
    "secrets": ["tokens"],
    "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"},
    "labels": {"team": "llm"},
    "code": "/runs/meshbook",
}


def rendered(env: dict[str, str] | None = None, template: Path | None = None, **k8s: Any) -> list[dict[str, Any]]:
    """Return the objects of a manifest for eight pods of eight GPUs."""
    section = KubernetesConfig(**({"image": "meshbook:1", "volumes": {"runs": "/runs"}} | k8s))
    cluster = KubernetesClusterConfig(
        nodes="8", procs_per_node="8", k8s=section, env=env or {}, template=str(template) if template else None
    )
    manifest = PodManifest(
        cluster, new_job_name(cluster, "my run"), Path("/runs/a"), "recipes/dpo.py", Path("/runs/work")
    )
    return objects_in(render_manifest(manifest), "manifest")


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of the pods of a Job or JobSet."""
    spec = workload["spec"]
    job = spec if workload["kind"] == "Job" else spec["replicatedJobs"][0]["template"]["spec"]
    return job["template"]["spec"]


def validate(each: dict[str, Any], version: str) -> None:
    """Check an object strictly; of a JobSet, whose schema is not part of Kubernetes, the Job that it creates."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make install-dev installs it")
    if each["kind"] == "JobSet":
        template = each["spec"]["replicatedJobs"][0]["template"]
        each = {"apiVersion": "batch/v1", "kind": "Job", **template, "metadata": {"name": "x", **template["metadata"]}}
    kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("workload", Workload)
@pytest.mark.parametrize("settings", [{}, FULL], ids=["least", "most"])
def test_manifest_is_valid_by_the_official_schemas(workload: Workload, settings: dict[str, Any]) -> None:
    objects = rendered(workload=workload, **settings)
    assert [each["kind"] for each in objects] == (["Job", "Service"] if workload == Workload.job else ["JobSet"])
    for version in VERSIONS:
        for each in objects:
            validate(each, version)


def test_schema_check_rejects_unknown_fields_and_wrong_types() -> None:
    job = rendered()[0]
    for break_it in (
        lambda job: job["spec"].update(backofLimit=0),
        lambda job: job["spec"].update(completions="8"),
        lambda job: job["spec"]["podFailurePolicy"]["rules"][0]["onPodConditions"][0].pop("status"),
    ):
        broken = copy.deepcopy(job)
        break_it(broken)
        with pytest.raises(Exception, match="backofLimit|is not of type|required"):
            validate(broken, "1.31")


def test_pod_requests_what_the_config_says() -> None:
    (job, service) = rendered(**FULL)
    pod, name = pod_of(job), job["metadata"]["name"]
    (container,) = pod["containers"]
    assert job["metadata"]["namespace"] == "train"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
    assert job["spec"]["suspend"] is True
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (8, 8, "Indexed")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "64", "memory": "900Gi", "rdma/ib": "1"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["command"][1:] == ["-m", "components.launch.k8s.pod", "/runs/a", "recipes/dpo.py"]
    assert container["workingDir"] == "/runs/work"
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert (env["PYTHONPATH"], env["MASTER_ADDR"]) == ("/runs/meshbook", f"{name}-0.{name}")
    assert JobName.parse(env["MESHBOOK_JOB"]) == JobName("train", Workload.job, name, "prod")
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert {each["mountPath"] for each in container["volumeMounts"]} == {"/dev/shm", "/runs", "/data"}
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "dedicated", "operator": "Equal", "value": "train"},
        {"key": "spot", "operator": "Exists"},
    ]
    assert pod["subdomain"] == service["metadata"]["name"] == name  # host names need both to be equal
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert "securityContext" not in pod_of(rendered(user=PodUser.image)[0])


@pytest.mark.parametrize(("code", "path"), [("/runs/meshbook", "/runs/meshbook:/mine"), (None, "/mine")])
def test_code_is_prepended_to_the_users_pythonpath(code: str | None, path: str) -> None:
    (container,) = pod_of(rendered({"PYTHONPATH": "/mine"}, code=code)[0])["containers"]
    assert {each["name"]: each.get("value") for each in container["env"]}["PYTHONPATH"] == path


@pytest.mark.parametrize("workload", Workload)
def test_first_pod_has_the_host_name_in_master_addr(workload: Workload) -> None:
    """An Indexed Job names its pods JOB-INDEX, and a JobSet its Jobs JOBSET-REPLICATEDJOB-INDEX."""
    job = rendered(workload=workload)[0]
    name, (container,) = job["metadata"]["name"], pod_of(job)["containers"]
    master = {each["name"]: each.get("value") for each in container["env"]}["MASTER_ADDR"]
    owner = name if workload == Workload.job else f"{name}-{job['spec']['replicatedJobs'][0]['name']}-0"
    subdomain = pod_of(job)["subdomain"] if workload == Workload.job else job["spec"]["network"]["subdomain"]
    assert master == f"{owner}-0.{subdomain}"
    assert len(f"{owner}-999-abcde") <= 63


def test_hostile_values_arrive_unchanged() -> None:
    """Through Jinja, YAML, and the replacement of $(NAME) and $$ that Kubernetes makes."""
    env = {f"V{number}": text for number, text in enumerate(STRINGS)}
    env["REFERENCE"] = "$(MESHBOOK_JOB) $$(HOME)"
    job = rendered(env=env, annotations={f"a{number}": text for number, text in enumerate(STRINGS)})[0]
    (container,) = pod_of(job)["containers"]
    variables: dict[str, str] = {}
    for each in container["env"]:
        if "value" in each:
            variables[each["name"]] = expand(each["value"], variables)
    assert {name: variables[name] for name in env} == env
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    assert list(annotations.values()) == STRINGS


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace references to variables as Kubernetes does: $(NAME) if it is defined, and $$ by $."""

    def replace(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", replace, text)


@pytest.mark.parametrize("name", ["My Run!", "9-lives", "ü", "x" * 80, "a.b_c"])
def test_job_names_are_valid_host_names(name: str) -> None:
    cluster = KubernetesClusterConfig(nodes="1", procs_per_node="1")
    one, other = (new_job_name(cluster, name).name for _ in range(2))
    assert one != other
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])", one)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nothing }}", "cannot be rendered.*'nothing' is undefined"),
        ("{% if %}", "cannot be rendered, line 1"),
        ("a: [", "renders to invalid YAML"),
        ("kind: Pod\napiVersion: v1\nmetadata: {}", "may only contain objects with metadata of the kinds Job, JobSet"),
        ("kind: Job\napiVersion: batch/v1\nmetadata: {name: mine}", "must contain one Job with `name: {{ name }}`"),
        (
            "kind: Job\napiVersion: batch/v1\nmetadata: {name: {{ name }}, namespace: other}",
            "every object must be in cluster.k8s.namespace=default",
        ),
    ],
)
def test_error_of_a_template_names_the_key(template: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml.j2"
    file.write_text(template)
    with pytest.raises(ConfigError, match=message) as raised:
        rendered(template=file)
    assert str(raised.value).startswith(f"cluster.template={file}: ")


def test_template_of_the_user_can_include_the_pod(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml.j2"
    head = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: {{ name }}}\nspec:\n  template:\n"
    file.write_text(
        f'{head}{{% set subdomain = "" %}}{{% filter indent(4, true) %}}{{% include "pod.yaml.j2" %}}{{% endfilter %}}'
    )
    (job,) = rendered(template=file)
    validate(job, "1.31")
    assert pod_of(job)["containers"][0]["image"] == "meshbook:1"


def test_quantities() -> None:
    texts = ["8", "250m", "1.5Gi", "500M", "2k", "1E", "1Ei"]
    assert [amount(each) for each in texts] == [8, 0.25, 1.5 * 2**30, 5e8, 2000, 1e18, 2**60]
