"""The launcher and sweeps use a scheduler only through its interface: this one of a user is treated like Slurm."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from components.config.compose.sweep_keys import EarlyStop
from components.config.schema.cluster import ClusterConfig, ClusterKind, CustomClusterConfig
from components.config.stored_run import MetricsLog
from components.launch import run_directory_lease
from components.launch.backend import CheckedRun, Job, JobState
from components.launch.clusters import backend_of, job_of, jobs_by_id, stop, stop_command
from components.launch.job.scheduler import Scheduler
from components.launch.run_directory_lease import Holder
from components.launch.run_directory_lock import exclude_starts, open_run_directory
from components.launch.sweep import points
from components.launch.sweep.plan import STOPPED_EARLY, Point, PointRecord, Sweep, read_points, write_record
from components.protocol.errors import ConfigError
from tests.unit.test_launch_run_directory import config, end, start

FACTORY = f"{__name__}:Pods"
JOB = f"{FACTORY}/pod-1"


class Pods(Scheduler):
    """A scheduler with non-numeric job ids whose answers the test sets."""

    current_job: ClassVar[Job]
    search_error: ClassVar[ConfigError | None]

    def render(self, run: CheckedRun, tag: str) -> str:
        return ""

    def send(self, run: CheckedRun, file: Path, tag: str) -> str:
        return "pod-1"

    def find(self, file: Path, tag: str) -> str | None:
        if self.search_error is not None:
            raise self.search_error
        return "pod-1" if tag == "mine" else None

    def query(self, jobs: Sequence[str]) -> dict[str, Job]:
        return {"pod-1": self.current_job} if "pod-1" in jobs else {}

    def cancel(self, job: str) -> bool:
        return False

    def cancel_command(self, job: str) -> str:
        return f"pods delete {job}"


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Pods]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        Pods, "current_job", Job("pod-1", "Pods", JobState.running, "Active", over=False), raising=False
    )
    monkeypatch.setattr(Pods, "search_error", None, raising=False)
    return Pods


@pytest.mark.parametrize("kind", ClusterKind)
def test_every_cluster_kind_has_a_backend(kind: ClusterKind) -> None:
    cluster = CustomClusterConfig(procs_per_node="1", factory=FACTORY) if kind == ClusterKind.custom else None
    backend = backend_of(cluster or ClusterConfig(kind=kind))
    assert backend.runs_here is (kind == ClusterKind.local)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_such_module:Queue",
         "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'; put the file next to"),
        (f"{__name__}:Queue", "cannot be imported: AttributeError: module .* has no attribute 'Queue'"),
        ("os:abort", "is no subclass of components.launch.job.scheduler.Scheduler"),  # which a foreign run may name
        ("components.launch.job.scheduler:Scheduler",
         "does not define cancel, cancel_command, find, query, render, send"),
        ("components.launch.local:LocalBackend", "is no subclass of components.launch.job.scheduler.Scheduler"),
    ],
)  # fmt: skip
def test_scheduler_that_is_none_is_explained(factory: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.factory={factory}: {message}"):
        backend_of(CustomClusterConfig(procs_per_node="1", factory=factory))
    with pytest.raises(ConfigError, match=message):
        stop_command(f"{factory}/1")
    found = jobs_by_id([f"{factory}/1", "a/b"])
    assert {job: each.state for job, each in found.items()} == {f"{factory}/1": JobState.unknown}


def test_job_ids_resolve_to_the_scheduler_that_issued_them(pods: type[Pods]) -> None:
    assert jobs_by_id([JOB]) == {JOB: replace(pods.current_job, id=JOB)}
    commands = (stop_command(JOB), stop_command("17"), stop_command("nobody's"))
    assert commands == ("pods delete pod-1", "scancel 17", None)
    assert not stop(JOB)


def test_unconfirmed_submission_of_an_own_scheduler_is_found(pods: type[Pods], tmp_path: Path) -> None:
    (tmp_path / ".submission").write_text(f"{FACTORY}/mine")
    assert job_of(tmp_path) is None
    assert job_of(tmp_path, search=True) == JOB
    assert (tmp_path / "job_id").read_text() == f"{JOB}\n"


def test_run_directory_of_a_live_job_is_rejected_on_any_backend(
    pods: type[Pods], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = start(config("mine"))
    end(directory)
    assert job_of(directory.path) is None
    (directory.path / "job_id").write_text(JOB)
    message = f"belongs to job {JOB}, which is Active; .* end the job with pods delete pod-1"
    with pytest.raises(ConfigError, match=message):
        open_run_directory(config("mine"), "finetune")
    pods.current_job = Job("pod-1", "Pods", JobState.unknown, "", over=False, doubt="no pods here")
    with pytest.raises(ConfigError, match="which may still run: no pods here; retry on a login node"):
        exclude_starts(directory.path).__enter__()
    pods.search_error = ConfigError("pods hang")
    (directory.path / "job_id").rename(directory.path / ".submission")
    with pytest.raises(ConfigError, match="unknown whether the cluster accepted the job .pods hang."):
        exclude_starts(directory.path).__enter__()
    (directory.path / ".submission").rename(directory.path / "job_id")
    pods.search_error, pods.current_job = None, Job("pod-1", "Pods", JobState.ended, "Succeeded", over=True)
    with exclude_starts(directory.path):
        pass
    assert capsys.readouterr().err == ""


def test_lease_holder_counts_as_ended_once_its_job_has_ended(pods: type[Pods], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory_lease, "_machine", lambda: "")
    me, other = (
        Holder(token=token, host="n1", pid=1, started="", machine="", cluster="c", job=job)
        for token, job in (("a", f"{FACTORY}/pod-2"), ("b", JOB))
    )
    assert not other.has_certainly_ended(me)
    pods.current_job = Job("pod-1", "Pods", JobState.ended, "Succeeded", over=True)
    assert other.has_certainly_ended(me)


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        (JobState.running, "running", f"job {JOB}, no step yet"),
        (JobState.submitted, "submitted", f"job {JOB}"),
        (JobState.unknown, "submitted", f"job {JOB}; Pods cannot be queried from here"),
        (JobState.gone, "failed", f"job {JOB} left no result, and Pods no longer lists it"),
        (JobState.oom, "oom", f"job {JOB} ended with the state oom and left no result"),
    ],
)
def test_sweep_reports_the_job_state_of_a_point(
    pods: type[Pods], tmp_path: Path, state: JobState, status: str, reason: str
) -> None:
    sweep = sweep_of_jobs(tmp_path, ["submitted"])
    pods.current_job = Job("pod-1", "Pods", state, "raw", over=False)
    (row,) = read_points(sweep)
    assert (row.state, row.reason) == (status, reason)


def sweep_of_jobs(folder: Path, statuses: list[str]) -> Sweep:
    """A sweep with a point per status: submitted as JOB, or that of its result.json."""
    numbered = [Point(n, f"{n}_{n}", {"run.seed": str(n)}, [], runs_here=False) for n in range(len(statuses))]
    sweep = Sweep(folder, "s", "finetune", folder / "f.py", folder, "f.py -m", [], ["run.seed"], numbered, parallel=1)
    for point, status in zip(numbered, statuses, strict=True):
        sweep.run_dir(point).mkdir()
        if status == "submitted":
            (sweep.run_dir(point) / "job_id").write_text(JOB)
        else:
            (sweep.run_dir(point) / "result.json").write_text(json.dumps({"status": status}))
        write_record(sweep, point, PointRecord(0.0, status=0))
    return sweep


def test_sweep_waits_for_a_requeued_job_whose_scheduler_does_not_answer_once(
    pods: type[Pods], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result of its first attempt is preempted until the second one ends."""
    monkeypatch.setattr(points, "_POLL_JOBS", 0.0)
    sweep = sweep_of_jobs(tmp_path, ["submitted"])
    result = sweep.run_dir(sweep.points[0]) / "result.json"
    result.write_text('{"status": "preempted"}')

    def answers() -> Iterator[Job]:
        yield pods.current_job
        yield Job("pod-1", "Pods", JobState.unknown, "", over=False, doubt="no pods here")
        result.write_text('{"status": "ok"}')
        yield pods.current_job

    answer = answers()
    monkeypatch.setattr(pods, "query", lambda self, jobs: {"pod-1": next(answer)} if "pod-1" in jobs else {})
    assert points.PointLoop(sweep, iter(sweep.points), 1, None).run() == []
    assert capsys.readouterr().out.endswith("... ok\n")


@pytest.mark.parametrize("state", [JobState.gone, JobState.failed, JobState.cancelled])
def test_point_whose_job_was_stopped_early_needs_no_result(pods: type[Pods], tmp_path: Path, state: JobState) -> None:
    """A deleted job is gone at once, while its pods save."""
    sweep = sweep_of_jobs(tmp_path, ["submitted"])
    write_record(sweep, sweep.points[0], PointRecord(0.0, status=0, stopped_early="loses"))
    pods.current_job = Job("pod-1", "Pods", state, "raw", over=True)
    (row,) = read_points(sweep)
    assert (row.state, row.reason) == (STOPPED_EARLY, "loses")


def test_refused_early_stop_is_requested_again(
    pods: type[Pods], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(points, "_POLL_JOBS", 0.0)
    sweep = replace(sweep_of_jobs(tmp_path, ["ok", "ok", "ok", "ok", "submitted"]), early_stop=EarlyStop.median)
    for point in sweep.points:
        for step in range(1, 3 - point.number // 4):
            MetricsLog(sweep.run_dir(point)).append({"step": step, "eval_loss": float(point.number)})
    requests: list[str] = []

    def cancel(self: Pods, job: str) -> bool:
        requests.append(job)
        if len(requests) == 1:
            raise ConfigError("pods hang")
        if len(requests) == 3:
            pods.current_job = Job("pod-1", "Pods", JobState.gone, "NotFound", over=True)
        return len(requests) == 3

    monkeypatch.setattr(pods, "cancel", cancel)
    assert points.PointLoop(sweep, iter(sweep.points[4:]), 1, None).run() == []
    assert requests == ["pod-1"] * 3
    _, refused, ended = capsys.readouterr().out.splitlines()
    assert refused == "4_4: not stopped early yet: pods hang"
    assert ended.startswith("stopped early, eval_loss is 4 at best up to step 1")
