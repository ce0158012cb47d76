"""Which of several failed ranks is reported as the root cause, and what is printed about it."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import pytest

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
