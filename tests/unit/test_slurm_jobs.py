"""States of jobs, as Slurm tells them to three commands, and what a table calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.launch.slurm.jobs import ENDED, GONE, RUNNING, SUBMITTED, UNKNOWN, in_words, job_states


@pytest.mark.parametrize(
    ("slurm", "state"),
    [
        *((state, "submitted") for state in sorted(SUBMITTED)),
        *((state, "running") for state in sorted(RUNNING)),
        ("TIMEOUT", "timeout"),
        ("OUT_OF_MEMORY", "oom"),
        ("CANCELLED", "cancelled"),
        ("NODE_FAIL", "failed"),
        ("PREEMPTED", "preempted"),
        ("COMPLETED", "ended"),
        ("WHAT_IS_THIS", "failed"),
        (GONE, GONE),
        (UNKNOWN, UNKNOWN),
    ],
)
def test_states_of_slurm_in_our_words(slurm: str, state: str) -> None:
    assert in_words(slurm) == state


def test_a_state_has_one_meaning() -> None:
    assert not SUBMITTED & RUNNING
    assert not (SUBMITTED | RUNNING) & ENDED.keys()


def test_jobs_that_nobody_can_be_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_states(["12", "; rm"]) == {"12": UNKNOWN}
    for name in ("squeue", "scontrol", "sacct"):
        (tmp_path / name).write_bytes(b"\0")  # of another machine
        (tmp_path / name).chmod(0o755)
    assert job_states(["12"]) == {"12": UNKNOWN}


def test_slurm_is_asked_by_three_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins that answer as Slurm 22.05 was seen to; the real one is asked in tests/slurm."""
    answers = {
        "squeue": 'printf "12 RUNNING\\n13 PENDING\\n"',
        "scontrol": 'case "$*" in *"job 14"*) echo "JobId=14 JobName=x JobState=TIMEOUT Reason=None";; '
        '*ping*) echo "Slurmctld(primary) at n0 is UP";; *) exit 1;; esac',
        "sacct": 'case "$*" in *"-j 15"*) echo "CANCELLED by 0";; *"-j 17"*) echo "CANCELLED+";; *) exit 1;; esac',
    }
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert job_states(["12", "13", "14", "15", "16", "17"]) == {
        "12": "RUNNING",
        "13": "PENDING",
        "14": "TIMEOUT",
        "15": "CANCELLED",
        "16": GONE,
        "17": "CANCELLED",
    }


def test_a_controller_that_is_down_is_not_asked_for_every_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the accounting still knows is told all the same."""
    answers = {
        "squeue": f"echo squeue >> {tmp_path}/asked; exit 1",
        "scontrol": f"echo scontrol >> {tmp_path}/asked; echo Slurmctld is DOWN; exit 1",
        "sacct": 'case "$*" in *"-j 13"*) echo COMPLETED;; *) exit 1;; esac',
    }
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert job_states(["12", "13", "14"]) == {"12": UNKNOWN, "13": "COMPLETED", "14": UNKNOWN}
    assert (tmp_path / "asked").read_text().split() == ["squeue", "scontrol"]
