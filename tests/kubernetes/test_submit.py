"""Submission with the machine's kubectl to an API server that validates: objects, messages, states and deletion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.config.schema import CausalLMConfig, FinetuneConfig, KubernetesClusterConfig, KubernetesConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.run import RunConfig
from components.config.schema.schedulers import Workload
from components.launch.backend import JobState
from components.launch.clusters import job_of, jobs_by_id, stop, stop_command
from components.launch.k8s.submit import job_problems
from tests.kubernetes.api import ApiServer
from tests.kubernetes.desk import Desk, path_without_kubectl
from tests.kubernetes.test_manifest import VERSIONS, validate
from tests.suites import TORTURE

SPACE = "/api/v1/namespaces/train"
JOBS = "/apis/batch/v1/namespaces/train/jobs"
ENDED = {"status": "True", "type": "Complete"}


@pytest.fixture
def kubectl_here(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    """The API server, for kubectl commands of this process."""
    for name, value in api.variables.items():
        monkeypatch.setenv(name, value)
    return api


def test_submission_creates_the_job_and_prints_how_to_follow_and_stop_it(desk: Desk, kubectl_here: ApiServer) -> None:
    submission = desk.run("training.max_steps=3")
    assert not submission.imported_torch
    run, job = submission.run_dir, submission.field("job")
    name = job.rpartition("/")[2]
    assert job == f"train/job/{name}"
    assert {entry.name for entry in run.iterdir()} >= {"config.yaml", "environment.json", "job.yaml", "job_id", "logs"}
    stored, service = desk.api.objects[f"{JOBS}/{name}"], desk.api.objects[f"{SPACE}/services/{name}"]
    created = {**stored, "metadata": {key: value for key, value in stored["metadata"].items() if key != "uid"}}
    assert created == submission.objects[0]
    assert service["metadata"]["ownerReferences"][0]["uid"] == stored["metadata"]["uid"]
    assert submission.field("mesh").endswith("2 processes in 2 pods")
    assert submission.field("stop") == f"kubectl -n train delete job {name}"
    assert submission.field("follow").startswith("kubectl -n train logs -f -l meshbook-run=")

    states = {
        "Created": (JobState.submitted, {}),
        "Pending": (JobState.submitted, {"active": 2}),
        "Running": (JobState.running, {"active": 2, "ready": 2}),
    }
    for reported, (state, status) in states.items():
        stored["status"] = status
        found = jobs_by_id([job, "17"])[job]
        assert (found.state, found.reported, found.over) == (state, reported, False)

    again = desk.run("training.max_steps=3", f"run.dir={run}")
    assert again.status == 2
    assert again.errors.startswith(f"run.dir={run}: belongs to job {job}, which is Running; choose another run.dir")
    stored["status"] = {"conditions": [ENDED]}
    resumed = desk.run("training.max_steps=3", f"run.dir={run}")
    assert resumed.run_dir == run
    assert resumed.field("job") != job
    assert stop_command(resumed.field("job")) == resumed.field("stop")
    assert stop(resumed.field("job"))
    assert set(desk.api.objects) & {f"{JOBS}/{resumed.field('job').rpartition('/')[2]}"} == set()
    assert jobs_by_id([resumed.field("job")])[resumed.field("job")].state == JobState.gone


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ([{"type": "Complete", "status": "True"}], JobState.ended),
        ([{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}], JobState.failed),
        ([{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}], JobState.timeout),
        ([{"type": "FailureTarget", "status": "True", "reason": "PodFailurePolicy"}], JobState.running),
        ([{"type": "Suspended", "status": "True"}], JobState.submitted),
        ([{"type": "Suspended", "status": "False"}], JobState.running),
    ],
)
def test_conditions_of_a_job_as_states(
    conditions: list[dict[str, Any]], state: JobState, kubectl_here: ApiServer
) -> None:
    kubectl_here.add(f"{JOBS}/a", status={"conditions": conditions, "active": 2, "ready": 2})
    found = jobs_by_id(["train/job/a"])["train/job/a"]
    assert found.state == state
    assert found.over is (state in (JobState.ended, JobState.failed, JobState.timeout))


def test_state_is_unknown_if_the_cluster_does_not_answer(kubectl_here: ApiServer) -> None:
    kubectl_here.stop()
    found = jobs_by_id(["train/job/a"])["train/job/a"]
    assert found.state == JobState.unknown
    assert "the cluster cannot be reached" in found.doubt


def test_lost_answer_to_the_creation_creates_one_job(desk: Desk) -> None:
    desk.api.lose_answers = 1
    submission = desk.run("training.max_steps=3")
    assert [path for path in desk.api.objects if path.startswith(JOBS)] == [
        f"{JOBS}/{submission.field('job').rpartition('/')[2]}"
    ]


def test_job_whose_service_cannot_be_created_is_not_reported_as_submitted(desk: Desk) -> None:
    """Its pods could not find rank 0. The job is named, with the command that deletes it."""
    desk.api.refuse_after = 1
    unknown = desk.run("training.max_steps=3", "run.dir=mine")
    (job,) = [path.rpartition("/")[2] for path in desk.api.objects if path.startswith(JOBS)]
    assert (unknown.status, unknown.output) == (1, "")
    assert f"It is unknown whether the cluster has the job {job} and its other objects" in unknown.errors
    assert f"kubectl -n train delete job {job}" in unknown.errors
    assert (desk.folder / "mine" / ".submission").read_text() == f"train/job/{job}"


def test_unconfirmed_submission_is_found_by_the_next_start(desk: Desk, kubectl_here: ApiServer) -> None:
    submission = desk.run("training.max_steps=3")
    run, job = submission.run_dir, submission.field("job")
    (run / "job_id").rename(run / ".submission")
    assert job_of(run) is None
    assert job_of(run, search=True) == job
    assert (run / "job_id").read_text() == f"{job}\n"
    assert not (run / ".submission").exists()


def test_rejection_leaves_no_run_directory(desk: Desk, tmp_path: Path) -> None:
    template = tmp_path / "mine.yaml.j2"
    template.write_text(
        "apiVersion: batch/v1\nkind: Job\nmetadata: {name: {{ name }}}\nspec: {backofLimit: 0, template: {}}\n"
    )
    rejected = desk.run(f"cluster.template={template}", "run.dir=new")
    assert (rejected.status, rejected.output) == (2, "")
    assert rejected.errors.startswith("cluster.kind=k8s: the cluster rejects the job: ")
    assert "strict decoding error" in rejected.errors
    assert "backofLimit" in rejected.errors
    assert rejected.errors.endswith("change cluster.template\n")
    assert not (desk.folder / "new").exists()


def test_dry_run_prints_the_manifest_and_creates_nothing(desk: Desk) -> None:
    shown = desk.run("cluster.dry_run=true")
    assert shown.status == 0, shown.errors
    assert "\nkind: Job\n" in shown.output
    assert "# cluster.dry_run=true: would submit this to Kubernetes as" in shown.output
    assert not [path for path in desk.api.objects if path.startswith(JOBS)]
    assert list(desk.folder.iterdir()) == []


def test_manifest_rendered_without_kubectl_is_the_one_that_is_created(desk: Desk, tmp_path: Path) -> None:
    desk.environment["PATH"] = path_without_kubectl()
    shown = desk.run("cluster.dry_run=render", "run.dir=mine", "cluster.k8s.queue=gpu")
    assert shown.status == 0, shown.errors
    assert list(desk.folder.iterdir()) == []
    for each in yaml.safe_load_all(shown.output):
        validate(each, VERSIONS[-1])
    unchecked = " ".join(shown.errors.split())
    for text in ("namespace=train", "image=ghcr.io/me/meshbook:1", "volumes.runs=", "quotas", "queue gpu"):
        assert text in unchecked
    del desk.environment["PATH"]
    shown = desk.run("cluster.dry_run=render", "run.dir=mine")
    submission = desk.run("run.dir=mine")
    name, rendered = submission.field("job").rpartition("/")[2], next(yaml.safe_load_all(shown.output))
    created = (submission.run_dir / "job.yaml").read_text()
    assert created == shown.output.replace(rendered["metadata"]["name"], name)


def problems_of(folder: Path, change: Callable[[KubernetesClusterConfig], object] = lambda cluster: None) -> list[str]:
    """Return the problems of a run on the test API server after a change of its config."""
    k8s = KubernetesConfig(namespace="train", image="meshbook:1", volumes={"runs": str(folder)})
    cluster = KubernetesClusterConfig(nodes="8", procs_per_node="8", k8s=k8s)
    change(cluster)
    return job_problems(config(cluster, str(folder / "a")))[0]


def config(cluster: KubernetesClusterConfig, run_dir: str) -> FinetuneConfig:
    return FinetuneConfig(
        model=CausalLMConfig(path="owner/model"), data=DocsDataConfig(), cluster=cluster, run=RunConfig(dir=run_dir)
    )


def test_every_problem_of_the_cluster_is_reported_with_its_key(kubectl_here: ApiServer, tmp_path: Path) -> None:
    api = kubectl_here
    assert problems_of(tmp_path) == []
    api.objects[f"{SPACE}/persistentvolumeclaims/runs"]["spec"]["accessModes"] = ["ReadWriteOnce"]
    api.forbidden |= {("delete", "jobs"), ("create", "services")}
    quota = {"hard": {"requests.nvidia.com/gpu": "32", "pods": "100"}, "used": {"pods": "98"}}
    api.add(f"{SPACE}/resourcequotas/team", status=quota)

    template = tmp_path / "mine.yaml.j2"
    template.write_text(
        "apiVersion: batch/v1\nkind: Job\nmetadata: {name: {{ name }}}\nspec: {completions: two, template: {}}\n"
    )

    def change(cluster: KubernetesClusterConfig) -> None:
        cluster.k8s.queue, cluster.k8s.service_account, cluster.k8s.secrets = "gpu", "trainer", ["tokens"]
        cluster.k8s.volumes["data"] = "/data"
        cluster.template = str(template)

    problems = problems_of(tmp_path, change)
    expected = [
        "cluster.k8s.namespace=train: you may not delete jobs, create services there",
        "cluster.k8s.volumes.runs: the claim has access mode ReadWriteOnce, but 8 pods",
        "cluster.k8s.volumes.data: there is no persistent volume claim data in the namespace train",
        "cluster.k8s.queue=gpu: no such LocalQueue in the namespace train; it has none",
        "cluster.procs_per_node=8: the job needs 64 requests.nvidia.com/gpu, but the quota team of the namespace train",
        "cluster.k8s.service_account: there is no serviceaccount trainer in the namespace train",
        "cluster.k8s.secrets: there is no secret tokens in the namespace train",
        "cluster.kind=k8s: the cluster rejects the job: ",
    ]
    assert len(problems) == len(expected), problems
    assert [each for each, start in zip(problems, expected, strict=True) if not each.startswith(start)] == []


def test_missing_namespace_controller_and_cluster_are_one_message_each(
    kubectl_here: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(**values: object) -> Callable[[KubernetesClusterConfig], None]:
        return lambda cluster: [setattr(cluster.k8s, name, value) for name, value in values.items()] and None

    api = kubectl_here
    assert problems_of(tmp_path, other(namespace="trian")) == [
        "cluster.k8s.namespace=trian: no such namespace; `kubectl get namespaces` lists them, or ask your "
        "administrators"
    ]
    del api.groups["jobset.x-k8s.io/v1alpha2"], api.groups["kueue.x-k8s.io/v1beta1"]
    without = problems_of(tmp_path, other(workload=Workload.jobset, queue="gpu"))
    assert [each.partition(": ")[0] for each in without] == ["cluster.k8s.queue=gpu", "cluster.k8s.workload=jobset"]
    assert "the cluster has no such resource; install its controller, or set job" in without[1]
    (problem,) = problems_of(tmp_path, other(context="prod"))
    assert problem.startswith("cluster.k8s.context=prod: is not in your kubeconfig")
    api.stop()
    (problem,) = problems_of(tmp_path)
    assert problem.startswith("cluster.kind=k8s: the cluster cannot be reached: ")
    monkeypatch.setenv("PATH", path_without_kubectl())
    (problem,) = problems_of(tmp_path)
    assert problem.startswith("cluster.kind=k8s: there is no kubectl on PATH; install it")


def test_paths_that_pods_cannot_see_are_reported(tmp_path: Path) -> None:
    """Without asking the cluster."""
    k8s = KubernetesConfig(image="meshbook:1", volumes={"runs": "/nowhere/runs"})
    cfg = config(KubernetesClusterConfig(procs_per_node="1", k8s=k8s), str(tmp_path))
    (problem,) = job_problems(cfg)[0]
    assert problem.startswith(f"run.dir={tmp_path}: is on no volume of cluster.k8s.volumes (mounted at /nowhere/runs)")
    cfg.run.dir = "/nowhere/runs/a"
    (problem,) = job_problems(cfg)[0]
    assert "there is no folder /nowhere/runs here; submit from a machine or pod that mounts" in problem
    cfg.cluster.k8s = KubernetesConfig()
    keys = [each.partition(":")[0] for each in job_problems(cfg)[0]]
    assert keys == ["cluster.k8s.image=null", "cluster.k8s.volumes={}"]


def test_recipe_of_the_user_must_be_on_a_volume(desk: Desk, tmp_path: Path) -> None:
    source = (Path(__file__).parents[2] / "recipes" / "finetune.py").read_text()
    (tmp_path / "mine.py").write_text(source)
    outside = desk.run(recipe=tmp_path / "mine.py")
    assert outside.status == 2
    assert outside.errors.startswith(f"{tmp_path / 'mine.py'}: this recipe is on no volume of cluster.k8s.volumes")
    (desk.folder / "mine.py").write_text(source)
    submission = desk.run("run.dir=here", recipe=desk.folder / "mine.py")
    (container,) = submission.objects[0]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == str(desk.folder / "mine.py")


@pytest.mark.skipif(not TORTURE, reason="two launchers in new interpreters: MESHBOOK_TORTURE=1")
def test_sweep_submits_a_job_per_point_and_shows_them_in_its_table(desk: Desk) -> None:
    swept = desk.run("-m", "optimizer.lr=1e-4,1e-3", "training.max_steps=3")
    assert swept.status == 0, swept.output + swept.errors
    jobs = {path.rpartition("/")[2] for path in desk.api.objects if path.startswith(JOBS)}
    points = sorted(desk.folder.glob("outputs/**/job_id"))
    assert len(jobs) == 2
    assert {each.read_text().strip() for each in points} == {f"train/job/{job}" for job in jobs}
    assert swept.output.count("submitted") >= 2
