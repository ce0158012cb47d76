"""The lease on a run directory: tested with real processes that hold it, are stopped, killed and resumed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from components.launch import run_directory_lease
from components.launch.run_directory_lease import is_held, take_lease
from components.protocol.failures import RunDirectoryInUse

BEAT, SILENCE, TIMEOUT = 0.05, 2.0, 30.0
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_directory_lease, "_BEAT", BEAT)
    monkeypatch.setattr(run_directory_lease, "_SILENCE", SILENCE)
    monkeypatch.setattr(run_directory_lease, "_POLL", BEAT / 2)
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)


class LeaseHolder:
    """A process of another launch that takes the lease and holds it."""

    def __init__(self, run_dir: Path, machine: str | None, environ: dict[str, str]) -> None:
        self.ours, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_hold, args=(run_dir, machine, environ, theirs))
        self.process.start()
        assert self.ours.poll(TIMEOUT)
        self.outcome = self.ours.recv()

    def send(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _hold(run_dir: Path, machine: str | None, environ: dict[str, str], outcomes: Connection) -> None:
    os.environ |= environ
    if machine is not None:
        run_directory_lease._machine = lambda: machine  # type: ignore[assignment]
    try:
        take_lease(run_dir)
    except RunDirectoryInUse as error:
        outcomes.send(str(error))
        return
    outcomes.send("held")
    time.sleep(TIMEOUT)


Start = Callable[..., LeaseHolder]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    holders: list[LeaseHolder] = []

    def start_holder(machine: str | None = "another", **environ: str) -> LeaseHolder:
        holders.append(LeaseHolder(tmp_path, machine, environ))
        return holders[-1]

    yield start_holder
    for holder in holders:
        holder.send(signal.SIGCONT) if holder.process.is_alive() else None
        holder.kill()


def seconds_to_take(run_dir: Path) -> float:
    began = time.monotonic()
    take_lease(run_dir).release()
    return time.monotonic() - began


@pytest.mark.parametrize("machine", ["another", None])
def test_live_holder_is_named_in_the_error(tmp_path: Path, start: Start, machine: str | None) -> None:
    """The holder runs on this machine or another one, and is named by its job if it has one."""
    holder = start(machine, SLURM_JOB_ID="17", SLURMD_NODENAME="n3")
    message = (
        f"job 17 .process {holder.process.pid} on host n3. is training in it; wait for it to finish, end it with "
        "scancel 17"
    )
    with pytest.raises(RunDirectoryInUse, match=message):
        take_lease(tmp_path)
    holder.kill()
    assert start(machine).outcome == "held"
    with pytest.raises(
        RunDirectoryInUse, match=r": process \d+ on host \S+ is training in it; wait for it to finish, end it, or"
    ):
        take_lease(tmp_path)


def test_lease_of_a_killed_holder_is_taken_at_once_or_after_the_silence_period(tmp_path: Path, start: Start) -> None:
    start(None).kill()
    assert seconds_to_take(tmp_path) < SILENCE / 2
    start("another").kill()
    assert SILENCE < seconds_to_take(tmp_path) < 3 * SILENCE
    assert seconds_to_take(tmp_path) < SILENCE / 2  # released


@pytest.mark.parametrize("machine", ["another", None])
def test_lease_counts_as_held_until_its_holder_ends_or_is_silent(
    tmp_path: Path, start: Start, machine: str | None
) -> None:
    """The end of a process of another machine is noticed by its silence only."""
    assert not is_held(tmp_path)
    holder = start(machine)
    assert is_held(tmp_path)
    holder.kill()
    assert is_held(tmp_path) is (machine is not None)
    (file,) = (tmp_path / ".lease").iterdir()
    os.utime(file, (time.time() - 2 * SILENCE,) * 2)
    assert not is_held(tmp_path)
    take_lease(tmp_path).release()
    assert not is_held(tmp_path)


def test_stopped_holder_exits_on_resume_after_losing_its_lease(tmp_path: Path, start: Start) -> None:
    """The run directory has another owner by then, so the process must not write any more."""
    holder = start("another")
    holder.send(signal.SIGSTOP)
    new_lease = take_lease(tmp_path)
    holder.send(signal.SIGCONT)
    holder.process.join(TIMEOUT)
    assert holder.process.exitcode == 1
    new_lease.release()


def test_requeued_job_takes_the_lease_of_its_earlier_attempt_at_once(tmp_path: Path, start: Start) -> None:
    """The earlier attempt, still running on a node that Slurm lost, terminates itself."""
    first = start("one", SLURM_JOB_ID="17")
    began = time.monotonic()
    assert start("two", SLURM_JOB_ID="17", SLURM_RESTART_COUNT="1").outcome == "held"
    assert time.monotonic() - began < SILENCE / 2
    first.process.join(TIMEOUT)
    assert first.process.exitcode == 1


def test_only_one_of_many_concurrent_starts_takes_the_lease(tmp_path: Path) -> None:
    pipes = [FORK.Pipe() for _ in range(8)]
    processes = [
        FORK.Process(target=_hold, args=(tmp_path, f"machine {number}", {}, theirs))
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    outcomes = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.kill()
        process.join()
    assert outcomes.count("held") == 1
    assert sum("is training in it" in each for each in outcomes) == 7


@pytest.mark.parametrize("text", ["", "{", '{"token": 1}', "[]"])
def test_unreadable_lease_is_taken_over_after_the_silence_period(tmp_path: Path, text: str) -> None:
    """Its owner was killed while writing it."""
    (tmp_path / ".lease").mkdir()
    (tmp_path / ".lease" / "1").write_text(text)
    assert SILENCE < seconds_to_take(tmp_path) < 3 * SILENCE
