"""Backends and schedulers of a run, and the root cause among the failures of its ranks."""

from __future__ import annotations

import json
import signal
import threading
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
from components.protocol.failures import (
    CorruptRank,
    Failure,
    HungRun,
    Kind,
    LeftEarly,
    LostPeer,
    RankExit,
    RankReport,
    RunDirectoryInUse,
    caller_code,
    describe_exit,
    first_failure,
    kind_of,
    package_of,
    print_failure,
    read_reports,
    thread_frames,
    write_report,
)
from components.protocol.run_files import log_file
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


GLOO_LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:41"


def rank_report(rank: int, time: float, message: str = "boom", error: type[Exception] = ValueError) -> RankReport:
    return RankReport(rank, kind_of(error(message)), error.__name__, message, "Traceback ...", time)


def rank_exit(rank: int, time: float, status: int = 1, terminated: bool = False) -> RankExit:
    return RankExit(rank, status, time, terminated)


def root_cause(exits: list[RankExit], *reports: RankReport) -> int | None:
    failure = first_failure(exits, {report.rank: report for report in reports})
    return failure.rank if failure else None


NETWORK_ERROR = type("DistNetworkError", (RuntimeError,), {})
ENDED, LOST = rank_exit(0, 5.0), rank_report(0, 4.9, GLOO_LOST)
CAUSES = {
    "all ranks exit with zero": ([rank_exit(0, 1, status=0), rank_exit(1, 2, status=0)], [], None),
    "the first to raise, not the first to exit": (
        [ENDED, rank_exit(1, 5.1)], [rank_report(0, 4.9), rank_report(1, 4.1)], 1,
    ),
    "a killed rank, although its peer raised first": ([ENDED, rank_exit(1, 5.2, -signal.SIGKILL)], [LOST], 1),
    "whatever the peer raised": (
        [ENDED, rank_exit(1, 5.2, -signal.SIGKILL)], [rank_report(0, 4.9, "an unrelated message")], 1,
    ),
    "a crash, not the lost peer": ([ENDED, rank_exit(1, 5.2, -signal.SIGSEGV)], [LOST], 1),
    "a status, not the network": ([ENDED, rank_exit(1, 5.2, 3)], [rank_report(0, 4.9, "x", NETWORK_ERROR)], 1),
    "an exception before an abort": ([ENDED, rank_exit(1, 5.2, -signal.SIGABRT)], [rank_report(0, 4.9)], 0),
    "a lost peer alone": ([ENDED], [LOST], 0),
    "not a rank that the launcher terminated": (
        [ENDED, rank_exit(1, 7.0, -signal.SIGTERM, terminated=True)], [rank_report(0, 4.9)], 0,
    ),
    "terminated alone": ([rank_exit(1, 7.0, -signal.SIGKILL, terminated=True)], [], None),
    "a rank that raised and hung until terminated": (
        [rank_exit(0, 9.0, -signal.SIGKILL, terminated=True), rank_exit(1, 9.0, 0)], [rank_report(0, 4.9)], 0,
    ),
}  # fmt: skip
"""Name -> (exits, reports, the rank that is the root cause)."""


@pytest.mark.parametrize("name", CAUSES)
def test_root_cause_of_a_failed_run(name: str) -> None:
    exits, reports, expected = CAUSES[name]
    assert root_cause(exits, *reports) == expected


def test_rank_that_left_with_status_0_is_the_cause_of_lost_peers_only() -> None:
    left, lost, ended = rank_exit(1, 5.2, status=0), rank_report(0, 4.9, GLOO_LOST), rank_exit(0, 9.0, -15, True)
    failure = first_failure([ended, left], {0: lost})
    assert failure is not None
    assert failure.error == "rank 1: exited with status 0 before the end of the run"
    assert root_cause([ended, rank_exit(1, 5.2, status=0, terminated=True)], lost) == 0  # it saved on request
    reported = rank_report(1, 5.0, "exited", LeftEarly)
    assert root_cause([ended, rank_exit(1, 9.0, -15, terminated=True)], lost, reported) == 1
    both = [rank_exit(0, 5.0, 1), rank_exit(1, 5.0, 1)]
    assert root_cause(both, rank_report(0, 5.0, "", LeftEarly), reported) is None
    assert root_cause([rank_exit(0, 5.0), left], rank_report(0, 4.9)) == 0
    assert root_cause([rank_exit(0, 5.0, -15, True), left]) is None
    other = first_failure([ended], {0: rank_report(0, 4.9)})
    assert other is not None
    assert other.what == "failed"  # it raised, and then the launcher ended it


class _MissingRank(LostPeer):
    """Subclass of a failure type, as components define them."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("run.dir=x: Connection refused"), Kind.config),
        (RunDirectoryInUse("run.dir=x: in use"), Kind.in_use),
        (HungRun("rank 1 is missing: Broken pipe"), Kind.hung),
        (CorruptRank("rank 1 computes wrong numbers: Broken pipe"), Kind.corrupted),
        (_MissingRank("x"), Kind.lost_peer),
        (type("DistBackendError", (RuntimeError,), {})("x"), Kind.lost_peer),
        (OSError("Connection reset by peer"), Kind.lost_peer),
        (type("StepTimeout", (RuntimeError,), {})("a class name alone is ignored"), Kind.exception),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_failure_kind_is_derived_from_the_exception_class(error: Exception, kind: Kind, tmp_path: Path) -> None:
    write_report(tmp_path, 3, error)
    report = read_reports(tmp_path)[3]
    assert report.kind is kind_of(error) is kind
    assert report.is_config == (report.traceback == "") == isinstance(error, ConfigError)


@pytest.mark.parametrize(
    ("status", "text"), [(3, "exited with status 3"), (-9, "was ended by SIGKILL"), (-11, "SIGSEGV"), (-35, "35")]
)
def test_describe_exit_names_the_status_or_signal(status: int, text: str) -> None:
    assert text in describe_exit(status)


def test_rank_report_round_trips_through_its_file(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("bôom\nin two lines")

    for rank, error in enumerate([ConfigError(["a=1: wrong", "b=2: wrong"]), ConfigError("a=1: wrong")]):
        write_report(tmp_path, rank, error)
    with pytest.raises(ValueError, match="two lines") as caught:
        fail()
    write_report(tmp_path, 2, caught.value)
    reports = read_reports(tmp_path)
    assert reports[0].message == "2 problems with this run:\na=1: wrong\nb=2: wrong"
    assert (reports[1].kind, reports[1].message, reports[1].traceback) == (Kind.config, "a=1: wrong", "")
    expected = (Kind.exception, "ValueError", "bôom\nin two lines")
    assert (reports[2].kind, reports[2].type, reports[2].message) == expected
    assert 'raise ValueError("bôom' in reports[2].traceback
    assert not list(tmp_path.glob("*.tmp"))


def test_report_is_dropped_if_the_run_directory_is_gone(tmp_path: Path) -> None:
    """Another rank rejected the config first, and the launcher already removed the run directory."""
    write_report(tmp_path / "gone", 0, ConfigError("x"))


def test_hung_run_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report names the missing rank, which the launcher then terminated."""
    message = "no progress for 12 s in step 3: rank 1 on host n2 is missing"
    reports = {0: rank_report(0, 4.9, GLOO_LOST), 2: rank_report(2, 5.0, message, HungRun)}
    exits = [rank_exit(0, 5.1), rank_exit(1, 7.0, -signal.SIGKILL, terminated=True), rank_exit(2, 6.0, 75)]
    failure = first_failure(exits, reports)
    assert failure is not None
    assert failure.error == message
    print_failure(failure, tmp_path)
    assert capsys.readouterr().err.splitlines() == [message, f"logs: {tmp_path}"]


def test_last_log_lines_of_a_rank_without_a_report_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_file(tmp_path, 1).write_text("".join(f"line {number}\n" for number in range(40)))
    print_failure(Failure(1, describe_exit(-signal.SIGSEGV), None), tmp_path)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "last lines of rank_1.log:"
    assert printed[1:16] == [f"line {number}" for number in range(25, 40)]
    assert printed[16:] == ["rank 1 was ended by SIGSEGV", f"logs: {tmp_path}"]


def test_caller_code_returns_the_calling_function() -> None:
    def inner(levels: int) -> object:
        return caller_code(levels)

    def outer(levels: int) -> object:
        return inner(levels)

    test = test_caller_code_returns_the_calling_function.__code__
    assert inner(1) is test
    assert (outer(1), outer(2)) == (outer.__code__, test)


def test_thread_frames_start_with_the_innermost() -> None:
    started, end = threading.Event(), threading.Event()

    def wait_inside() -> None:
        started.set()
        end.wait()

    def run() -> None:
        wait_inside()

    thread = threading.Thread(target=run)
    assert thread_frames(thread.ident) == []
    thread.start()
    started.wait()
    try:
        codes = [frame.f_code for frame in thread_frames(thread.ident)]
        assert codes.index(wait_inside.__code__) + 1 == codes.index(run.__code__)
        assert {package_of(frame) for frame in thread_frames(thread.ident)} == {"threading", "tests"}
    finally:
        end.set()
        thread.join()
    assert thread_frames(thread.ident) == []


def test_package_of_frame_follows_its_code() -> None:
    packages: list[list[str]] = []

    def hook(pairs: list[tuple[str, object]]) -> None:
        packages.append([package_of(frame) for frame in thread_frames(threading.get_ident())])

    json.loads("{}", object_pairs_hook=hook)
    assert packages[0][0] == "components"
    assert set(packages[0]) >= {"components", "tests", "json"}
