"""Which of several failed ranks is named, and what is told of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from components.config.errors import ConfigError
from components.protocol.failures import (
    Failure,
    HungRun,
    Kind,
    LostPeer,
    RankExit,
    RankReport,
    RunDirectoryInUse,
    describe_exit,
    first_failure,
    kind_of,
    print_failure,
    read_reports,
    write_report,
)
from components.protocol.run_files import log_file

GLOO_LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:41"


def raised(rank: int, time: float, message: str = "boom", error: type[Exception] = ValueError) -> RankReport:
    return RankReport(rank, kind_of(error(message)), error.__name__, message, "Traceback ...", time)


def ended(rank: int, time: float, status: int = 1, asked: bool = False) -> RankExit:
    return RankExit(rank, status, time, asked)


def first(exits: list[RankExit], *reports: RankReport) -> int | None:
    failure = first_failure(exits, {report.rank: report for report in reports})
    return failure.rank if failure else None


def test_all_well() -> None:
    assert first([ended(0, 1, status=0), ended(1, 2, status=0)]) is None


def test_the_first_to_raise_not_the_first_to_be_seen() -> None:
    assert first([ended(0, 5.0), ended(1, 5.1)], raised(0, 4.9), raised(1, 4.1)) == 1


def test_a_killed_rank_is_the_cause_although_its_peer_spoke_first() -> None:
    assert first([ended(0, 5.0), ended(1, 5.2, -signal.SIGKILL)], raised(0, 4.9, GLOO_LOST)) == 1
    assert first([ended(0, 5.0), ended(1, 5.2, -signal.SIGKILL)], raised(0, 4.9, "told in words of its own")) == 1


def test_a_lost_peer_is_a_consequence_of_a_crash() -> None:
    assert first([ended(0, 5.0), ended(1, 5.2, -signal.SIGSEGV)], raised(0, 4.9, GLOO_LOST)) == 1
    assert (
        first([ended(0, 5.0), ended(1, 5.2, 3)], raised(0, 4.9, "x", type("DistNetworkError", (RuntimeError,), {})))
        == 1
    )


def test_a_crash_may_be_a_consequence_of_what_was_raised() -> None:
    assert first([ended(0, 5.0), ended(1, 5.2, -signal.SIGABRT)], raised(0, 4.9)) == 0


def test_a_lost_peer_alone_is_named() -> None:
    assert first([ended(0, 5.0), ended(1, 5.2, status=0)], raised(0, 4.9, GLOO_LOST)) == 0


def test_ranks_that_the_launcher_ended_are_not_failures() -> None:
    assert first([ended(0, 5.0), ended(1, 7.0, -signal.SIGTERM, asked=True)], raised(0, 4.9)) == 0
    assert first([ended(1, 7.0, -signal.SIGKILL, asked=True)]) is None


def test_a_rank_that_reported_and_hung_until_it_was_ended_is_one() -> None:
    assert first([ended(0, 9.0, -signal.SIGKILL, asked=True), ended(1, 9.0, 0)], raised(0, 4.9)) == 0


class _MissingRank(LostPeer):
    """As a component derives one of its own."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("run.dir=x: Connection refused"), Kind.config),
        (RunDirectoryInUse("run.dir=x: in use"), Kind.in_use),
        (HungRun("rank 1 is missing: Broken pipe"), Kind.hung),
        (_MissingRank("x"), Kind.lost_peer),
        (type("DistBackendError", (RuntimeError,), {})("x"), Kind.lost_peer),
        (OSError("Connection reset by peer"), Kind.lost_peer),
        (type("StepTimeout", (RuntimeError,), {})("a name means nothing"), Kind.exception),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_the_kind_of_a_failure_is_read_from_its_class(error: Exception, kind: Kind, tmp_path: Path) -> None:
    write_report(tmp_path, 3, error)
    report = read_reports(tmp_path)[3]
    assert report.kind is kind_of(error) is kind
    assert report.is_config == (report.traceback == "") == isinstance(error, ConfigError)


@pytest.mark.parametrize(
    ("status", "words"), [(3, "exited with status 3"), (-9, "was ended by SIGKILL"), (-11, "SIGSEGV"), (-35, "35")]
)
def test_how_a_process_ended(status: int, words: str) -> None:
    assert words in describe_exit(status)


def test_a_report_survives_its_file(tmp_path: Path) -> None:
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
    assert (reports[2].kind, reports[2].type, reports[2].message) == (
        Kind.exception,
        "ValueError",
        "bôom\nin two lines",
    )
    assert 'raise ValueError("bôom' in reports[2].traceback
    assert not list(tmp_path.glob("*.tmp"))


def test_a_report_without_a_place_is_dropped(tmp_path: Path) -> None:
    """Another rank was faster to refuse, and the launcher has taken the run directory back."""
    write_report(tmp_path / "gone", 0, ConfigError("x"))


def test_a_run_that_stood_still_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever reports it names the rank that is missing, which the launcher then ended."""
    message = "no progress for 12 s in step 3: rank 1 on host n2 is missing"
    reports = {0: raised(0, 4.9, GLOO_LOST), 2: raised(2, 5.0, message, HungRun)}
    exits = [ended(0, 5.1), ended(1, 7.0, -signal.SIGKILL, asked=True), ended(2, 6.0, 75)]
    failure = first_failure(exits, reports)
    assert failure is not None
    assert failure.error == message
    print_failure(failure, tmp_path)
    assert capsys.readouterr().err.splitlines() == [message, f"logs: {tmp_path}"]


def test_the_last_lines_of_a_silent_rank_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_file(tmp_path, 1).write_text("".join(f"line {number}\n" for number in range(40)))
    print_failure(Failure(1, describe_exit(-signal.SIGSEGV), None), tmp_path)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "last lines of rank_1.log:"
    assert told[1:16] == [f"line {number}" for number in range(25, 40)]
    assert told[16:] == ["rank 1 was ended by SIGSEGV", f"logs: {tmp_path}"]
