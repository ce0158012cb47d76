"""The launcher and sweeps use a backend only through its interface: this fake cluster is treated like Slurm."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from components.config.compose.sweep_keys import EarlyStop
from components.config.schema.cluster import ClusterKind
from components.config.stored_run import MetricsLog
from components.launch import clusters
from components.launch.backend import Backend, Job, JobState
from components.launch.clusters import backend_of, job_of, jobs_by_id, stop_command
from components.launch.local import LocalBackend
from components.launch.run_directory import lease
from components.launch.run_directory.lease import Holder
from components.launch.run_directory.opening import exclude_starts, open_run_directory
from components.launch.sweep import points
from components.launch.sweep.plan import Point, PointRecord, Sweep, write_record
from components.launch.sweep.point_rows import STOPPED_EARLY, read_points
from components.protocol.errors import ConfigError
from tests.unit.test_launch_run_directory import config, end, start

JOB = "pod-1"


class Pods(LocalBackend):
    """A cluster with non-numeric job ids whose responses the test sets."""

    runs_here = False

    def __init__(self) -> None:
        self.current_job = Job(JOB, "Pods", JobState.running, "Active", over=False)
        self.search_error: ConfigError | None = None

    def job(self, run_dir: Path, *, search: bool = False) -> str | None:
        if search and self.search_error is not None:
            raise self.search_error
        return JOB if (run_dir / "pod").exists() else None

    def state(self, jobs: Iterable[str]) -> dict[str, Job]:
        return {JOB: self.current_job} if JOB in jobs else {}

    def stop_command(self, job: str) -> str | None:
        return f"pods delete {job}" if job.startswith("pod-") else None


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pods:
    monkeypatch.chdir(tmp_path)
    backend = Pods()
    monkeypatch.setattr(clusters, "_backends", lambda: iter([*map(backend_of, ClusterKind), backend]))
    return backend


@pytest.mark.parametrize("kind", ClusterKind)
def test_every_cluster_kind_has_a_backend_with_the_full_interface(kind: ClusterKind) -> None:
    backend = backend_of(kind)
    names = [name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")]
    assert {"validate", "show", "submit", "job", "state", "stop", "stop_command"} == set(names)
    for name in names:
        expected = list(inspect.signature(getattr(Backend, name)).parameters)[1:]
        assert list(inspect.signature(getattr(backend, name)).parameters) == expected
    assert backend.runs_here is (kind == ClusterKind.local)


def test_job_ids_resolve_to_the_backend_that_issued_them(pods: Pods) -> None:
    assert jobs_by_id([JOB]) == {JOB: pods.current_job}
    assert (stop_command(JOB), stop_command("17"), stop_command("nobody's")) == (
        "pods delete pod-1",
        "scancel 17",
        None,
    )
    assert LocalBackend().stop(JOB) is False


def test_run_directory_of_a_live_job_is_rejected_on_any_backend(
    pods: Pods, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = start(config("mine"))
    end(directory)
    assert job_of(directory.path) is None
    (directory.path / "pod").touch()
    with pytest.raises(
        ConfigError, match="belongs to job pod-1, which is Active; .* end the job with pods delete pod-1"
    ):
        open_run_directory(config("mine"), "finetune")
    pods.current_job = Job(JOB, "Pods", JobState.unknown, "", over=False, doubt="no pods here")
    with pytest.raises(ConfigError, match="which may still run: no pods here; retry on a login node"):
        exclude_starts(directory.path).__enter__()
    pods.search_error = ConfigError("pods hang")
    with pytest.raises(ConfigError, match="unknown whether the cluster accepted the job .pods hang."):
        exclude_starts(directory.path).__enter__()
    pods.search_error, pods.current_job = None, Job(JOB, "Pods", JobState.ended, "Succeeded", over=True)
    with exclude_starts(directory.path):
        pass
    assert capsys.readouterr().err == ""


def test_lease_holder_counts_as_ended_once_its_job_has_ended(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_machine", lambda: "")
    me, other = (
        Holder(token=token, host="n1", pid=1, started="", machine="", cluster="c", job=job)
        for token, job in (("a", "pod-2"), ("b", JOB))
    )
    assert not other.has_certainly_ended(me)
    pods.current_job = Job(JOB, "Pods", JobState.ended, "Succeeded", over=True)
    assert other.has_certainly_ended(me)


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        (JobState.running, "running", "job pod-1, no step yet"),
        (JobState.submitted, "submitted", "job pod-1"),
        (JobState.unknown, "submitted", "job pod-1; Pods cannot be queried from here"),
        (JobState.gone, "failed", "job pod-1 left no result, and Pods no longer lists it"),
        (JobState.oom, "oom", "job pod-1 ended with the state oom and left no result"),
    ],
)
def test_sweep_reports_the_job_state_of_a_point(
    pods: Pods, tmp_path: Path, state: JobState, status: str, reason: str
) -> None:
    sweep = sweep_of_jobs(tmp_path, ["submitted"])
    pods.current_job = Job(JOB, "Pods", state, "raw", over=False)
    (row,) = read_points(sweep)
    assert (row.state, row.reason) == (status, reason)


def sweep_of_jobs(folder: Path, statuses: list[str]) -> Sweep:
    """A sweep with a point per status: submitted as JOB, or that of its result.json."""
    numbered = [Point(n, f"{n}_{n}", {"run.seed": str(n)}, [], runs_here=False) for n in range(len(statuses))]
    sweep = Sweep(folder, "s", "finetune", folder / "f.py", folder, "f.py -m", [], ["run.seed"], numbered, parallel=1)
    for point, status in zip(numbered, statuses, strict=True):
        sweep.run_dir(point).mkdir()
        if status == "submitted":
            (sweep.run_dir(point) / "pod").touch()
        else:
            (sweep.run_dir(point) / "result.json").write_text(json.dumps({"status": status}))
        write_record(sweep, point, PointRecord(0.0, status=0))
    return sweep


def test_sweep_waits_for_a_requeued_job_whose_scheduler_does_not_answer_once(
    pods: Pods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result of its first attempt is preempted until the second one ends."""
    monkeypatch.setattr(points, "POLL_JOBS", 0.0)
    sweep = sweep_of_jobs(tmp_path, ["submitted"])
    result = sweep.run_dir(sweep.points[0]) / "result.json"
    result.write_text('{"status": "preempted"}')

    def answers() -> Iterator[Job]:
        yield pods.current_job
        yield Job(JOB, "Pods", JobState.unknown, "", over=False, doubt="no pods here")
        result.write_text('{"status": "ok"}')
        yield pods.current_job

    answer = answers()
    monkeypatch.setattr(pods, "state", lambda jobs: {JOB: next(answer)} if JOB in jobs else {})
    assert points.PointLoop(sweep, iter(sweep.points), 1, None).run() == []
    assert capsys.readouterr().out.endswith("... ok\n")


@pytest.mark.parametrize("state", [JobState.gone, JobState.failed, JobState.cancelled])
def test_point_whose_job_was_stopped_early_needs_no_result(pods: Pods, tmp_path: Path, state: JobState) -> None:
    """A deleted job is gone at once, while its pods save."""
    sweep = sweep_of_jobs(tmp_path, ["submitted"])
    write_record(sweep, sweep.points[0], PointRecord(0.0, status=0, stopped_early="loses"))
    pods.current_job = Job(JOB, "Pods", state, "raw", over=True)
    (row,) = read_points(sweep)
    assert (row.state, row.reason) == (STOPPED_EARLY, "loses")


def test_refused_early_stop_is_requested_again(
    pods: Pods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(points, "POLL_JOBS", 0.0)
    sweep = replace(sweep_of_jobs(tmp_path, ["ok", "ok", "ok", "ok", "submitted"]), early_stop=EarlyStop.median)
    for point in sweep.points:
        for step in range(1, 3 - point.number // 4):
            MetricsLog(sweep.run_dir(point)).append({"step": step, "eval_loss": float(point.number)})
    requests: list[str] = []

    def stop(job: str) -> bool:
        requests.append(job)
        if len(requests) == 1:
            raise ConfigError("pods hang")
        if len(requests) == 3:
            pods.current_job = Job(JOB, "Pods", JobState.gone, "NotFound", over=True)
        return len(requests) == 3

    monkeypatch.setattr(pods, "stop", stop)
    assert points.PointLoop(sweep, iter(sweep.points[4:]), 1, None).run() == []
    assert requests == [JOB] * 3
    _, refused, ended = capsys.readouterr().out.splitlines()
    assert refused == "4_4: not stopped early yet: pods hang"
    assert ended.startswith("stopped early, eval_loss is 4 at best up to step 1")
