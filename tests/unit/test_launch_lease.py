"""The lease on a run directory: real processes that hold it, stop, are killed, and come back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from components.launch.run_directory import lease
from components.launch.run_directory.lease import take_lease
from components.protocol.failures import RunDirectoryInUse

BEAT, SILENCE, PATIENCE = 0.05, 2.0, 30.0
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lease, "BEAT", BEAT)
    monkeypatch.setattr(lease, "SILENCE", SILENCE)
    monkeypatch.setattr(lease, "POLL", BEAT / 2)
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)


class Other:
    """A process of another start, which takes the lease and keeps it."""

    def __init__(self, run_dir: Path, machine: str | None, environ: dict[str, str]) -> None:
        self.ours, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_hold, args=(run_dir, machine, environ, theirs))
        self.process.start()
        assert self.ours.poll(PATIENCE)
        self.said = self.ours.recv()

    def send(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _hold(run_dir: Path, machine: str | None, environ: dict[str, str], answers: Connection) -> None:
    os.environ |= environ
    if machine is not None:
        lease._machine = lambda: machine  # type: ignore[assignment]
    try:
        take_lease(run_dir)
    except RunDirectoryInUse as error:
        answers.send(str(error))
        return
    answers.send("held")
    time.sleep(PATIENCE)


Start = Callable[..., Other]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    others: list[Other] = []

    def one(machine: str | None = "another", **environ: str) -> Other:
        others.append(Other(tmp_path, machine, environ))
        return others[-1]

    yield one
    for other in others:
        other.send(signal.SIGCONT) if other.process.is_alive() else None
        other.kill()


def taken_within(run_dir: Path) -> float:
    began = time.monotonic()
    take_lease(run_dir).release()
    return time.monotonic() - began


@pytest.mark.parametrize("machine", ["another", None])
def test_a_holder_that_is_alive_is_named(tmp_path: Path, start: Start, machine: str | None) -> None:
    """On this machine or another one: by its job where it has one."""
    other = start(machine, SLURM_JOB_ID="17", SLURMD_NODENAME="n3")
    said = (
        f"job 17 .process {other.process.pid} on host n3. is training in it; wait for it to finish, end it with "
        "scancel 17"
    )
    with pytest.raises(RunDirectoryInUse, match=said):
        take_lease(tmp_path)
    other.kill()
    assert start(machine).said == "held"
    with pytest.raises(
        RunDirectoryInUse, match=r": process \d+ on host \S+ is training in it; wait for it to finish, end it, or"
    ):
        take_lease(tmp_path)


def test_a_holder_that_was_killed_is_followed_at_once_or_after_its_silence(tmp_path: Path, start: Start) -> None:
    start(None).kill()
    assert taken_within(tmp_path) < SILENCE / 2
    start("another").kill()
    assert SILENCE < taken_within(tmp_path) < 3 * SILENCE
    assert taken_within(tmp_path) < SILENCE / 2  # released


def test_a_holder_that_was_stopped_ends_when_it_goes_on(tmp_path: Path, start: Start) -> None:
    """Its directory has another owner then: it must not write any more."""
    other = start("another")
    other.send(signal.SIGSTOP)
    held = take_lease(tmp_path)
    other.send(signal.SIGCONT)
    other.process.join(PATIENCE)
    assert other.process.exitcode == 1
    held.release()


def test_a_requeued_job_follows_its_own_earlier_attempt_at_once(tmp_path: Path, start: Start) -> None:
    """Left over on a node that Slurm has lost, it ends itself."""
    first = start("one", SLURM_JOB_ID="17")
    began = time.monotonic()
    assert start("two", SLURM_JOB_ID="17", SLURM_RESTART_COUNT="1").said == "held"
    assert time.monotonic() - began < SILENCE / 2
    first.process.join(PATIENCE)
    assert first.process.exitcode == 1


def test_of_many_that_start_at_once_one_trains(tmp_path: Path) -> None:
    pipes = [FORK.Pipe() for _ in range(8)]
    processes = [
        FORK.Process(target=_hold, args=(tmp_path, f"machine {number}", {}, theirs))
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    said = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.kill()
        process.join()
    assert said.count("held") == 1
    assert sum("is training in it" in each for each in said) == 7


@pytest.mark.parametrize("text", ["", "{", '{"token": 1}', "[]"])
def test_a_lease_that_cannot_be_read_is_taken_over_after_its_silence(tmp_path: Path, text: str) -> None:
    """Its owner was killed while it wrote."""
    (tmp_path / ".lease").mkdir()
    (tmp_path / ".lease" / "1").write_text(text)
    assert SILENCE < taken_within(tmp_path) < 3 * SILENCE
