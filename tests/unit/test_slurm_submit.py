"""Submission of Slurm jobs: states, their names in a table, errors of sbatch, and paths that nodes may not share."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from components.config.schema import FinetuneConfig, ModelConfig
from components.config.schema.cluster import Device, SlurmClusterConfig
from components.config.schema.data import MixtureDataConfig, SftDataConfig
from components.config.schema.schedulers import GpuRequest
from components.launch.backend import CheckedRun, recorded_job
from components.launch.clusters import job_of
from components.launch.job.scheduler import _QUERIES, UnknownSubmission
from components.launch.slurm.submit import (
    _ENDED,
    _GONE,
    _SUBMITTED,
    _UNKNOWN,
    RUNNING,
    SlurmScheduler,
    _build_problems,
    _describe_job,
    _job_states,
    _local_paths,
    _to_job_state,
    refusal,
)
from components.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("slurm", "state"),
    [
        *((state, "submitted") for state in sorted(_SUBMITTED)),
        *((state, "running") for state in sorted(RUNNING)),
        *(("TIMEOUT", "timeout"), ("OUT_OF_MEMORY", "oom"), ("CANCELLED", "cancelled"), ("NODE_FAIL", "failed")),
        *(("PREEMPTED", "preempted"), ("COMPLETED", "ended"), ("WHAT_IS_THIS", "failed"), (_GONE, _GONE)),
        (_UNKNOWN, _UNKNOWN),
    ],
)
def test_slurm_states_map_to_job_states(slurm: str, state: str) -> None:
    assert _to_job_state(slurm) == state


def test_slurm_state_sets_are_disjoint() -> None:
    assert not _SUBMITTED & RUNNING
    assert not (_SUBMITTED | RUNNING) & _ENDED.keys()


def test_job_states_are_unknown_without_working_slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _job_states(["12", "; rm"]) == {"12": _UNKNOWN}
    for name in ("squeue", "scontrol", "sacct"):
        (tmp_path / name).write_bytes(b"\0")  # not executable on this machine
        (tmp_path / name).chmod(0o755)
    assert _job_states(["12"]) == {"12": _UNKNOWN}


def test_job_states_come_from_squeue_scontrol_and_sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake commands with output recorded from Slurm 22.05; tests/slurm queries a real one."""
    commands = {
        "squeue": 'printf "12 RUNNING\\n13 PENDING\\n"',
        "scontrol": 'case "$*" in *"job 14"*) echo "JobId=14 JobName=x JobState=TIMEOUT Reason=None";; '
        '*ping*) echo "Slurmctld(primary) at n0 is UP";; '
        '*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;; esac',
        "sacct": 'case "$*" in *"-j 15"*) echo "CANCELLED by 0";; *"-j 17"*) echo "CANCELLED+";; *) exit 1;; esac',
    }
    _write_commands(tmp_path, **commands)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    states = {"12": "RUNNING", "13": "PENDING", "14": "TIMEOUT", "15": "CANCELLED", "16": _GONE, "17": "CANCELLED"}
    assert _job_states([*states]) == states


def test_controller_that_is_down_is_queried_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that the accounting still has are reported nevertheless."""
    commands = {
        "squeue": f"echo squeue >> {tmp_path}/asked; exit 1",
        "scontrol": f"echo scontrol >> {tmp_path}/asked; echo Slurmctld is DOWN; exit 1",
        "sacct": 'case "$*" in *"-j 13"*) echo COMPLETED;; *) exit 1;; esac',
    }
    _write_commands(tmp_path, **commands)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert _job_states(["12", "13", "14"]) == {"12": _UNKNOWN, "13": "COMPLETED", "14": _UNKNOWN}
    assert (tmp_path / "asked").read_text().split() == ["squeue", "scontrol"]


@pytest.mark.parametrize("show", ["exec sleep 60", "echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1"])
def test_job_is_unknown_if_the_controller_only_responds_to_ping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: str
) -> None:
    """A live job that counted as ended would let a second one into its run directory."""
    scontrol = f'case "$*" in ping) echo "Slurmctld(primary) at n0 is UP";; *) {show};; esac'
    _write_commands(tmp_path, squeue="exec sleep 60", scontrol=scontrol, sacct="exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("components.launch.slurm.submit._TIMEOUT", 0.3)
    assert _job_states(["12"]) == {"12": _UNKNOWN}
    assert not _describe_job("12", _UNKNOWN).over


def _write_commands(folder: Path, **scripts: str) -> None:
    """Write fake Slurm commands into a folder that is first on PATH."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


CLUSTER = SlurmClusterConfig(procs_per_node="1")
ACCEPT_JOB = 'for word; do case "$word" in --comment=*) echo "31 ${word#--comment=}" >> jobs;; esac; done'
"""Part of a fake sbatch: accepts the job, whatever the command prints and returns."""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("components.launch.job.scheduler.PAUSE", 0.0)
    monkeypatch.setattr("components.launch.slurm.submit._TIMEOUT", 2.0)
    (tmp_path / "job_id").write_text("7\n")
    (tmp_path / "logs").mkdir()
    return tmp_path / "job.sbatch"


def submit(script: Path, notes: list[str]) -> str:
    """Submit a script, and return the id of its job."""
    run = CheckedRun(cast("Any", None), cast("Any", SimpleNamespace(cluster=CLUSTER)), cast("Any", None), 1, notes)
    return SlurmScheduler()._submit(run, script, "meshbook:1")


def test_submission_without_response_is_found_by_squeue(script: Path) -> None:
    _write_commands(script.parent, sbatch=f"{ACCEPT_JOB}\nexec sleep 60", squeue="cat jobs")
    notes: list[str] = []
    assert submit(script, notes) == "31"
    assert "did not respond within" in notes[0]
    assert recorded_job(script.parent) == "31"


def test_submission_that_never_reached_slurm_is_rejected(script: Path) -> None:
    """The earlier job stays the recorded job of the directory."""
    lost = "echo Socket timed out >&2; exit 1"
    _write_commands(script.parent, sbatch=lost, squeue="echo x >> asked; echo '30 other'")
    with pytest.raises(ConfigError, match="sbatch failed: Socket timed out"):
        submit(script, [])
    assert len(Path("asked").read_text().split()) == _QUERIES
    assert recorded_job(script.parent) == "7"
    assert not Path(".submission").exists()


def test_rejected_submission_is_queried_once(script: Path) -> None:
    refusing = "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1"
    _write_commands(script.parent, sbatch=refusing, squeue="echo x >> asked")
    with pytest.raises(ConfigError, match="sbatch rejects"):
        submit(script, [])
    assert len(Path("asked").read_text().split()) == 1


def test_unresolved_submission_is_kept_until_it_is_found(script: Path) -> None:
    _write_commands(script.parent, sbatch=f"{ACCEPT_JOB}; echo Socket timed out >&2; exit 1", squeue="exit 1")
    with pytest.raises(UnknownSubmission, match="grep meshbook:"):
        submit(script, [])
    assert recorded_job(script.parent) is None
    with pytest.raises(ConfigError, match="squeue failed"):
        job_of(script.parent, search=True)
    _write_commands(script.parent, squeue="cat jobs")
    assert job_of(script.parent, search=True) == "31"
    assert recorded_job(script.parent) == "31"


def test_interrupt_after_the_answer_cancels_the_job(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between sbatch's answer and the record of its id, and while a lost answer is searched for."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    accepted = f"{ACCEPT_JOB}; echo 31"
    _write_commands(script.parent, sbatch=accepted, squeue="cat jobs", scancel='echo "$@" > cancelled')
    with monkeypatch.context() as patched:
        patched.setattr("components.launch.job.scheduler.record_job", interrupt)
        with pytest.raises(KeyboardInterrupt):
            submit(script, [])
    assert Path("cancelled").read_text() == "31\n"
    Path("cancelled").unlink()
    _write_commands(script.parent, sbatch=f"{ACCEPT_JOB}; echo Socket timed out >&2; exit 1")
    with monkeypatch.context() as patched:
        patched.setattr(SlurmScheduler, "_find_late", interrupt)
        with pytest.raises(KeyboardInterrupt):
            submit(script, [])
    assert Path("cancelled").read_text() == "31\n"


def test_interrupted_submission_is_cancelled(script: Path) -> None:
    """Ctrl-C reaches a terminal's whole process group, sbatch included."""
    interrupted = f"{ACCEPT_JOB}; kill -INT $PPID; sleep 1"
    _write_commands(script.parent, sbatch=interrupted, squeue="cat jobs", scancel='echo "$@" > cancelled')
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes may ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            submit(script, [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert Path("cancelled").read_text() == "31\n"


TWO_RANKS = SlurmClusterConfig(procs_per_node="2")
OPTIONS = "--nodes=1 --ntasks-per-node=2 --gpus-per-node=2"


UNREACHABLE = {
    "Could not establish a configuration source": [
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host",
        "sbatch: error: fetch_config: DNS SRV lookup failed",
        "sbatch: error: _establish_config_source: failed to fetch config",
        "sbatch: fatal: Could not establish a configuration source",
    ],
    "s_p_parse_file: cannot stat file /no: No such file or directory": [
        "sbatch: error: s_p_parse_file: cannot stat file /no: No such file or directory, retrying in 1sec",
        "sbatch: error: ClusterName needs to be specified",
        "sbatch: fatal: Unable to process configuration file",
    ],
    "Unable to contact slurm controller": [
        "sbatch: error: slurm_persist_conn_open: failed",
        "allocation failure: Unable to contact slurm controller",
    ],
}
"""The line of the cause -> output of sbatch without, and with another, slurm.conf, and without a controller."""


@pytest.mark.parametrize("reason", UNREACHABLE)
def test_unreachable_slurm_is_reported_with_the_line_of_the_cause(reason: str) -> None:
    advice = "submit from a login node of the cluster, set cluster=local, or only print the script here: "
    assert refusal(UNREACHABLE[reason], TWO_RANKS) == (
        f"cluster.kind=slurm: Slurm cannot be reached from here: {reason}; {advice}cluster.dry_run=render"
    )


INVALID = [
    "sbatch: error: invalid partition specified: nosuch",
    "sbatch: error: Batch job submission failed: Invalid partition name specified",
]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (INVALID, "invalid partition specified: nosuch; Invalid partition name specified"),
        (["allocation failure: A", "sbatch: error: A"], "A"),
        ([], "no reason given"),
    ],
)
def test_rejected_job_is_reported_with_every_reason_from_sbatch(lines: list[str], reason: str) -> None:
    advice = "change these keys of cluster (see sinfo)"
    assert refusal(lines, TWO_RANKS) == f"cluster.kind=slurm: sbatch rejects {OPTIONS}: {reason}; {advice}"


@pytest.mark.parametrize(
    ("settings", "requests_gpus"),
    [
        ({}, True),
        ({"gpu_request": GpuRequest.gres}, True),
        ({"gpu_request": GpuRequest.none, "sbatch_extra": {"tres-per-task": "gres/gpu:1"}}, True),
        ({"gpu_request": GpuRequest.none, "sbatch_extra": {"gpus": "2"}}, True),
        ({"device": Device.cpu, "partition": "gpu", "account": "gpu-users", "constraint": "nogpu"}, False),
        ({"device": Device.cpu, "sbatch_extra": {"gres": "nvme:1", "comment": "no gpu"}}, False),
    ],
)
def test_cpu_build_of_torch_is_rejected_only_if_the_job_requests_gpus(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], requests_gpus: bool
) -> None:
    monkeypatch.setattr("components.launch.slurm.submit._torch_built_for_cpus", lambda: "2.8.0+cpu")
    problems = _build_problems(SlurmClusterConfig(procs_per_node="2", **settings))
    assert ["the job requests GPUs" in problem for problem in problems] == [True] * requests_gpus


def test_node_local_paths_are_reported_including_mixture_sources() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".jsonl") as file:
        path = SftDataConfig(path=file.name)
        for data, key in ((path, "data.path"), (MixtureDataConfig(sources={"a": path}), "data.sources.a.path")):
            (note,) = _local_paths(FinetuneConfig(model=ModelConfig(path="owner/model"), data=data))
            assert f"{key} (tmpfs)" in note
