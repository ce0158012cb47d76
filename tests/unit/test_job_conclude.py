"""What the batch script runs around the ranks: the node check before, the final report and exit status after."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.launch.job import attempts as attempts_module
from components.launch.job.attempts import Ended, conclude, seconds_left
from components.launch.slurm.submit import CommandResult, _clean_environment, _run_slurm
from components.protocol.errors import ConfigError
from components.protocol.failures import CorruptRank, HungRun, write_report
from tests.frozen import frozen

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
    return tmp_path


def result(run_dir: Path) -> dict[str, Any]:
    file = run_dir / "result.json"
    return json.loads(file.read_text()) if file.exists() else {}


def out_of_memory() -> Exception:
    return type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")


HUNG = HungRun("no progress for 12 s in step 3: rank 1 on host n2 is missing", ("n2",))
CORRUPT = CorruptRank("rank 1 on host n2 computes wrong numbers", ("n2",))
LOST = RuntimeError("[gloo] Connection closed by peer [10.0.0.2]:41")
RAISED, REFUSED = ValueError("boom"), ConfigError("data.path=x: gone")
STOPPED = {"status": "preempted", "steps": 9}
ENDS = {
    "success": ({}, {"status": "ok"}, 0, 0, "ok"),
    "preempted": ({}, STOPPED, 0, 0, "preempted"),
    "preempted, torchrun exits with 1": ({}, STOPPED, 1, 0, "preempted"),
    "interrupted": ({}, {"status": "interrupted"}, 1, 0, "interrupted"),
    "failed after its result": ({}, {"status": "ok"}, 9, 9, "ok"),
    "stop signal after the end": ({}, {"status": "ok"}, 140, 0, "ok"),
    "stop signal before the handler": ({}, {}, 140, 0, "preempted"),
    "no result, status 0": ({}, {}, 0, 0, None),
    "no result, status 7": ({}, {}, 7, 7, "failed"),
    "a rank raised": ({2: RAISED}, {}, 1, 1, "failed"),
    "a rank raised after the others saved": ({2: RAISED}, STOPPED, 0, 1, "failed"),
    "out of memory": ({2: out_of_memory()}, {}, 1, 1, "oom"),
    "hung run": ({0: HUNG, 2: LOST}, {}, 137, 75, "hung"),
    "rank that computes wrong numbers": ({0: CORRUPT, 1: CORRUPT, 2: LOST}, {}, 1, 76, "corrupted"),
    "root cause and consequence": ({0: LOST, 3: RAISED}, {}, 143, 143, "failed"),
    "config error": ({1: REFUSED}, {}, 2, 2, "invalid"),
    "config error, srun exits with 143": ({1: REFUSED}, {}, 143, 2, "invalid"),
}
"""Name -> (reports by rank, result.json, exit status of srun, expected job status, expected status in result.json)."""


@pytest.mark.parametrize("name", ENDS)
def test_end_of_attempt_sets_exit_status_result_and_requeue(run_dir: Path, name: str) -> None:
    """Only an attempt that saved, did not start or ran on a node that computes wrong numbers is requeued."""
    reports, before, status, expected, outcome = ENDS[name]
    for rank, error in reports.items():
        write_report(run_dir / "logs" / "attempt_1", rank, error)
    if before:
        (run_dir / "result.json").write_text(json.dumps(before))
    if before == STOPPED:
        (run_dir / "requeue").touch()
    assert conclude(run_dir, 1, Ended(status)) == expected
    assert result(run_dir).get("status") == outcome
    assert (run_dir / "requeue").exists() == (outcome in ("preempted", "corrupted"))


def job_of_attempts(run_dir: Path, *attempts: tuple[bool, bool], hung: int = 0, status: str = "hung") -> int:
    """Write the files of a job's attempts, each (finished a step, published a checkpoint); return the last number.

    The first `hung` attempts ended with `status`. They follow an attempt of an earlier job that made no progress.
    """
    shutil.rmtree(run_dir / "logs")
    checkpoints = ["step_1.tmp-ab", "step_10"]
    (run_dir / "checkpoints").mkdir()
    for number, (stepped, published) in enumerate([(True, False), *attempts]):
        logs = run_dir / "logs" / f"attempt_{number}"
        logs.mkdir(parents=True)
        (logs / "job").write_text("7\n" if number else "6\n")
        (logs / "checkpoints").write_text("".join(f"{name}\n" for name in checkpoints))
        checkpoints += [f"step_{10 + number}.1"] if published else []
        if stepped:
            (logs / "first_step").touch()
        if 0 < number <= hung:
            (logs / "result.json").write_text(json.dumps({"status": status}))
    for name in checkpoints:
        (run_dir / "checkpoints" / name).mkdir()
    return len(attempts)


STEP, PUBLISHED, NOTHING = (True, False), (True, True), (False, False)
PROGRESS = {
    "two attempts without progress": ([STEP, STEP], None),
    "three in a row": ([PUBLISHED, STEP, STEP, STEP], "cluster.requeue.without_progress=3"),
    "not in a row": ([STEP, STEP, PUBLISHED, STEP, STEP], None),
    "some of them before the first step": ([STEP, NOTHING, STEP, NOTHING, STEP], "cluster.requeue.without_progress=3"),
    "nine before the first step": ([NOTHING] * 9, None),
    "ten before the first step": ([PUBLISHED, *[NOTHING] * 10], "cluster.requeue.before_first_step=10"),
}


@pytest.mark.parametrize("name", PROGRESS)
def test_job_without_progress_is_not_requeued(run_dir: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both at the end of a preempted attempt and at the start of an attempt that Slurm requeued."""
    attempts, limit = PROGRESS[name]
    last = job_of_attempts(run_dir, *attempts)
    (run_dir / "config.yaml").write_text(frozen("cluster: {kind: slurm, procs_per_node: '1'}"))
    (run_dir / "result.json").write_text(json.dumps(STOPPED))
    (run_dir / "requeue").touch()
    assert conclude(run_dir, last, Ended(0)) == (1 if limit else 0)
    assert (run_dir / "requeue").exists() == (limit is None)
    assert (limit or "requeuing the job") in capsys.readouterr().out
    command = [sys.executable, "-m", "components.launch.job", "begin", str(run_dir), "--job", "7"]
    process = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == ((1, "") if limit else (0, f"{last + 1}\n"))
    assert (limit or "") in result(run_dir).get("error", "")


def test_requeue_limits_are_read_from_the_config_of_the_run(run_dir: Path) -> None:
    last = job_of_attempts(run_dir, STEP)
    (run_dir / "config.yaml").write_text(
        frozen("cluster: {kind: slurm, procs_per_node: '1', requeue: {without_progress: 1}}")
    )
    (run_dir / "result.json").write_text(json.dumps(STOPPED))
    (run_dir / "requeue").touch()
    assert conclude(run_dir, last, Ended(0)) == 1


FAULTS = {"hung": (HUNG, 137, 75), "corrupted": (CORRUPT, 1, 76)}
"""Status of a result -> error of a rank, exit status of srun, and that of the job."""
FAULTY = [
    # status of the result, attempts, how many of them ended so before, whether the job is requeued
    ("hung", [PUBLISHED], 0, True),
    ("hung", [PUBLISHED, STEP], 0, True),
    ("hung", [STEP, NOTHING], 0, True),  # before its first step, in a job that has taken steps
    ("hung", [NOTHING], 0, False),  # before the first step of the job
    ("hung", [PUBLISHED, STEP, STEP, STEP], 2, False),  # third without a newer checkpoint
    ("hung", [PUBLISHED] * 4, 3, False),
    ("hung", [PUBLISHED] * 3, 2, True),
    ("corrupted", [PUBLISHED], 0, True),
    ("corrupted", [PUBLISHED, STEP], 0, True),
    ("corrupted", [PUBLISHED] * 4, 3, False),
    ("corrupted", [PUBLISHED] * 3, 2, True),
    ("corrupted", [STEP] * 3, 2, False),  # three attempts without a checkpoint
]


@pytest.mark.parametrize(("outcome", "attempts", "before", "requeued"), FAULTY)
def test_run_that_hung_or_computes_wrong_numbers_is_requeued_without_the_node(
    run_dir: Path, outcome: str, attempts: list[tuple[bool, bool]], before: int, requeued: bool
) -> None:
    """The requeued job excludes the node of the faulty rank, which is not the rank that reported it. After wrong
    numbers also without a new checkpoint, since it runs on other nodes; up to cluster.requeue.corruption."""
    error, ended, status = FAULTS[outcome]
    last = job_of_attempts(run_dir, *attempts, hung=before, status=outcome)
    write_report(run_dir / "logs" / f"attempt_{last}", 0, error)
    assert conclude(run_dir, last, Ended(ended)) == status
    assert result(run_dir) == {"status": outcome, "error": str(error)}
    marker = run_dir / "requeue"
    assert (marker.read_text() if marker.exists() else None) == ("n2\n" if requeued else None)


def gpu_error(message: str) -> Exception:
    return type("AcceleratorError", (RuntimeError,), {})(message)


CRASHES = {
    "killed": ({}, 137, [STEP], 0, "restart"),
    "segmentation fault": ({}, 139, [PUBLISHED], 0, "restart"),
    "only a lost peer is reported": ({0: LOST}, 137, [STEP], 0, "restart"),
    "GPU error": ({1: gpu_error("CUDA error: uncorrectable ECC error encountered")}, 1, [STEP], 0, "restart"),
    "NCCL error": ({1: RuntimeError("NCCL error in: x.cpp:1, remote process exited")}, 1, [STEP], 0, "restart"),
    "assertion on a GPU": ({1: gpu_error("CUDA error: device-side assert triggered")}, 1, [STEP], 0, None),
    "out of memory on a GPU": ({1: gpu_error("CUDA error: out of memory")}, 1, [STEP], 0, None),
    "exception": ({1: RAISED}, 1, [STEP], 0, None),
    "exit without a report": ({}, 7, [STEP], 0, None),
    "stop signal before the handler": ({}, 140, [STEP], 0, "requeue"),
    "before the first step": ({}, 137, [NOTHING], 0, None),
    "twentieth crash": ({}, 137, [PUBLISHED] * 20, 19, "restart"),
    "one more": ({}, 137, [PUBLISHED] * 21, 20, None),
    "third without a newer checkpoint": ({}, 137, [PUBLISHED, STEP, STEP, STEP], 3, None),
}
"""Name -> (reports by rank, exit status of srun, attempts, how many of them crashed before, expected marker)."""


@pytest.mark.parametrize("name", CRASHES)
def test_ranks_are_started_again_after_a_crash_that_may_not_recur(run_dir: Path, name: str) -> None:
    reports, status, attempts, before, marker = CRASHES[name]
    last = job_of_attempts(run_dir, *attempts, hung=before, status="failed")
    for rank, error in reports.items():
        write_report(run_dir / "logs" / f"attempt_{last}", rank, error)
    conclude(run_dir, last, Ended(status, seconds_left=math.inf))
    assert [name for name in ("requeue", "restart") if (run_dir / name).exists()] == ([marker] if marker else [])
    assert result(run_dir)["status"] == (
        "preempted" if marker == "requeue" else "oom" if "memory" in name else "failed"
    )


@pytest.mark.parametrize(
    ("attempts", "before", "status", "requeued"),
    [
        ([PUBLISHED, NOTHING], 1, 1, True),
        ([PUBLISHED, NOTHING], 0, 1, False),
        ([PUBLISHED, STEP], 1, 1, False),
        ([STEP, NOTHING], 0, 233, True),  # srun: Communication connection failure
        ([NOTHING, NOTHING], 0, 233, False),
    ],
)
def test_job_is_requeued_if_its_ranks_cannot_be_started_again(
    run_dir: Path, attempts: list[tuple[bool, bool]], before: int, status: int, requeued: bool
) -> None:
    """srun cannot reach a node after a crash or a requeue; before the job's first step it is an error of the job."""
    last = job_of_attempts(run_dir, *attempts, hung=before, status="failed")
    conclude(run_dir, last, Ended(status, seconds_left=math.inf))
    assert (run_dir / "requeue").exists() == requeued
    assert not (run_dir / "restart").exists()


@pytest.mark.parametrize(("cancelled", "left"), [(True, math.inf), (False, None)])
def test_cancelled_job_and_template_without_restarts_end_after_a_crash(
    run_dir: Path, cancelled: bool, left: float | None
) -> None:
    last = job_of_attempts(run_dir, STEP)
    assert conclude(run_dir, last, Ended(137, cancelled, left)) == 137
    assert not (run_dir / "restart").exists()


@pytest.mark.parametrize(
    ("left", "marker"),
    [("2:39", "requeue"), ("2:41", "restart"), ("UNLIMITED", "restart"), ("1-00:00:00", "restart"), ("", "restart")],
)
def test_crash_near_the_time_limit_requeues_the_job(run_dir: Path, left: str, marker: str) -> None:
    """The signal that comes before the time limit might arrive before the ranks can handle it."""
    last = job_of_attempts(run_dir, STEP)
    (run_dir / "config.yaml").write_text(
        frozen("cluster: {kind: slurm, procs_per_node: '1', signal_lead_seconds: 100}")
    )
    conclude(run_dir, last, Ended(137, seconds_left=seconds_left(left)))
    assert [name for name in ("requeue", "restart") if (run_dir / name).exists()] == [marker]


def test_only_a_node_with_a_gpu_error_counts_as_failed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed rank says nothing about its node."""
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    last = job_of_attempts(run_dir, STEP)
    file = run_dir / "logs" / f"attempt_{last}" / "failed_nodes"
    write_report(run_dir / "logs" / f"attempt_{last}", 0, LOST)
    conclude(run_dir, last, Ended(137, seconds_left=math.inf))
    assert not file.exists()
    (run_dir / "result.json").unlink()
    write_report(run_dir / "logs" / f"attempt_{last}", 1, gpu_error("CUDA error: uncorrectable ECC error encountered"))
    conclude(run_dir, last, Ended(1, seconds_left=math.inf))
    assert file.read_text() == "n3\n"


def test_nodes_of_a_hang_come_from_the_report_and_not_from_its_message(run_dir: Path) -> None:
    """A message that names hosts, but a report without faulty_hosts: the requeued job excludes no node."""
    last = job_of_attempts(run_dir, PUBLISHED)
    write_report(run_dir / "logs" / f"attempt_{last}", 0, HungRun(str(HUNG)))
    assert conclude(run_dir, last, Ended(137)) == 75
    assert (run_dir / "requeue").read_text() == ""


def test_cancelled_file_of_batch_script_prevents_requeue(run_dir: Path) -> None:
    """The file that the batch script creates on scancel has the same effect as the --cancelled argument."""
    (run_dir / "logs" / "attempt_1" / "cancelled").touch()
    (run_dir / "result.json").write_text(json.dumps(STOPPED))
    (run_dir / "requeue").touch()
    assert conclude(run_dir, 1, Ended(0)) == 1
    assert result(run_dir)["status"] == "cancelled"
    assert not (run_dir / "requeue").exists()


def test_torchrun_stopped_before_ranks_handle_signals_is_preempted(run_dir: Path) -> None:
    (run_dir / "logs" / "attempt_1" / "node_0.log").write_text("Process 7 got signal: 12\n")
    assert conclude(run_dir, 1, Ended(1)) == 0
    assert result(run_dir)["status"] == "preempted"
    assert (run_dir / "requeue").exists()


@pytest.mark.parametrize(("error", "outcome"), [(LOST, "cancelled"), (RAISED, "failed")])
def test_cancelled_run_reports_failed_only_if_a_rank_raised(run_dir: Path, error: Exception, outcome: str) -> None:
    write_report(run_dir / "logs" / "attempt_1", 0, error)
    assert conclude(run_dir, 1, Ended(143, cancelled=True)) == 143
    assert result(run_dir)["status"] == outcome


def test_root_cause_is_reported_instead_of_its_consequence(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = run_dir / "logs" / "attempt_1"
    write_report(logs, 0, LOST)
    write_report(logs, 3, ValueError("boom"))
    conclude(run_dir, 1, Ended(1))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == ["rank 3 exited with status 1: ValueError: boom", f"logs: {logs}"]
    assert result(run_dir)["error"] == "rank 3: ValueError: boom"


def test_rank_without_a_report_is_named_if_the_others_only_lost_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = run_dir / "logs" / "attempt_1"
    for rank in range(3):
        (logs / f"rank_{rank}.log").touch()
    write_report(logs, 0, LOST)
    write_report(logs, 2, LOST)
    conclude(run_dir, 1, Ended(1))
    assert "rank 1 reported nothing: killed, or exited with status 0 before the end" in capsys.readouterr().out


def test_unexplained_exit_status_points_to_the_job_log(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(run_dir, 1, Ended(7)) == 7
    output = capsys.readouterr().out
    assert "the ranks ended with status 7, and none reported an error; see the output of the job and " in output
    assert result(run_dir)["status"] == "failed"


@pytest.mark.parametrize(("status", "expected"), [(0, 1), (143, 143)])
def test_cancelled_run_is_not_requeued_and_keeps_its_result(run_dir: Path, status: int, expected: int) -> None:
    (run_dir / "result.json").write_text('{"status": "preempted", "steps": 9}')
    (run_dir / "requeue").touch()
    assert conclude(run_dir, 1, Ended(status, cancelled=True)) == expected
    assert result(run_dir) == {"status": "cancelled", "steps": 9}
    assert not (run_dir / "requeue").exists()


@pytest.mark.parametrize(
    ("settings", "excluded", "printed"),
    [
        ("nodes: '2'", ["n2"], "requeued without n2, where a rank failed"),
        ("nodes: '4'", [], "requeued on any node: too few nodes that the job can use are up without n2"),
        ("nodes: '3-9'", ["n2"], "requeued without n2, where a rank failed"),
        ("nodes: '2', constraint: a100", ["n2"], "requeued without n2, where a rank failed"),
        ("nodes: '3', constraint: a100", [], "requeued on any node: too few nodes"),  # n4 has only a100_80
        ("nodes: '1', constraint: 'a100|a100_80'", [], "requeued on any node: too few nodes"),
        ("nodes: '1', nodelist: 'n[1-2]'", [], "requeued on any node, also n2: cluster.nodelist or"),
        ("nodes: '1', reservation: week", [], "requeued on any node, also n2: cluster.nodelist or"),
    ],
)
def test_faulty_node_is_excluded_only_if_the_job_fits_without_it(
    run_dir: Path, settings: str, excluded: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exclusion that leaves too few nodes would keep the job pending forever. n9 is not one of the job's."""
    (run_dir / "config.yaml").write_text(frozen(f"cluster: {{kind: slurm, procs_per_node: '1', {settings}}}"))
    last = job_of_attempts(run_dir, PUBLISHED)
    logs = run_dir / "logs" / f"attempt_{last}"
    (logs / "nodes").write_text("n1\nn2\n")
    write_report(logs, 0, HungRun("no progress", ("n2", "n9")))
    up = ["n1|a100,nvlink", "n2|a100,nvlink", "n3|a100,nvlink", "n4|a100_80,nvlink", "n4|a100_80,nvlink"]
    conclude(run_dir, last, Ended(137, up=up, excluded=["n7"]))
    assert printed in capsys.readouterr().out
    assert (run_dir / "requeue").read_text().split() == ([*excluded, "n7"] if excluded else [])


def test_starts_of_the_ranks_in_their_job_are_no_requeues(run_dir: Path) -> None:
    last = job_of_attempts(run_dir, *[PUBLISHED] * 21)

    def is_requeued() -> bool:
        (run_dir / "result.json").write_text(json.dumps(STOPPED))
        (run_dir / "requeue").touch()
        conclude(run_dir, last, Ended(0))
        return (run_dir / "requeue").exists()

    assert not is_requeued()
    (run_dir / "logs" / "attempt_5" / "restarted").touch()
    assert is_requeued()


def node_check(run_dir: Path, gpus: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "components.launch.job", "check", str(run_dir), str(gpus)]
    return subprocess.run(
        command, cwd=PROJECT, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_node_check_reports_every_problem_of_a_node(run_dir: Path, tmp_path: Path) -> None:
    checked = node_check(run_dir)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert os.listdir(run_dir / "logs") == ["attempt_1"]
    checked = node_check(run_dir, gpus=4, CUDA_VISIBLE_DEVICES="0,1")
    assert checked.returncode == 1
    assert "has 2 visible GPUs, but cluster.procs_per_node=4 requires one per process" in checked.stderr
    checked = node_check(tmp_path / "gone", gpus=1, CUDA_VISIBLE_DEVICES="")
    assert (checked.returncode, len(checked.stderr.splitlines())) == (1, 2)
    gone = f"node {os.uname().nodename}: cannot access the run directory {tmp_path / 'gone'}; "
    assert checked.stderr.startswith(gone)


def test_node_that_cannot_write_fails_the_node_check(run_dir: Path) -> None:
    """The symlink into /proc makes the test work for root too, which can write anywhere else."""
    shutil.rmtree(run_dir / "logs")
    (run_dir / "logs").symlink_to("/proc/self")
    checked = node_check(run_dir)
    assert checked.returncode == 1
    assert f"cannot write to the run directory {run_dir}: " in checked.stderr


def path_with_nvidia_smi(folder: Path, script: str) -> str:
    """Write a program nvidia-smi, and return a PATH that begins with its folder."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


def test_node_with_failing_nvidia_smi_fails_the_node_check(run_dir: Path, tmp_path: Path) -> None:
    """The fake nvidia-smi fails as the real one does when a GPU has fallen off the bus."""
    path = path_with_nvidia_smi(tmp_path, "echo 'Unable to determine the device handle: Unknown Error' >&2; exit 255")
    checked = node_check(run_dir, gpus=2, CUDA_VISIBLE_DEVICES="0,1", PATH=path)
    assert checked.returncode == 1
    assert checked.stderr.endswith("nvidia-smi failed: Unable to determine the device handle: Unknown Error\n")
    path = path_with_nvidia_smi(tmp_path, "echo 'GPU 0'")
    assert node_check(run_dir, gpus=2, CUDA_VISIBLE_DEVICES="0,1", PATH=path).returncode == 0


def test_variables_of_an_enclosing_job_are_not_inherited() -> None:
    names = "SLURM_JOB_ID SLURM_NTASKS SLURM_CPU_BIND SBATCH_PARTITION SRUN_DEBUG RANK MESHBOOK_WORKER PMIX_RANK"
    inherited = dict.fromkeys(names.split(), "1")
    kept = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "SLURMER": "x", "HF_TOKEN": "secret", "MESHBOOK_X": "1"}
    assert _clean_environment({**inherited, **kept}) == kept


def test_missing_or_failing_slurm_command_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run_slurm(["sh", "-c", "cat; echo no >&2; exit 3"], script="said\n") == CommandResult(3, "said", "no")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no sbatch on PATH; submit from a login node"):
        _run_slurm(["sbatch"])


def test_sigpipe_does_not_kill_a_slurm_command() -> None:
    """With SIGPIPE ignored the command gets a write error and can retry; otherwise it would be killed."""
    assert _run_slurm(["sh", "-c", "kill -s PIPE $$; echo alive"]) == CommandResult(0, "alive", "")


def test_stop_signal_during_the_node_check_requests_a_requeue(run_dir: Path, tmp_path: Path) -> None:
    """There is nothing to save yet. Without the handler the signal would end the check with status 140."""
    path = path_with_nvidia_smi(tmp_path, "kill -USR2 $PPID; sleep 0.5")
    checked = node_check(run_dir, gpus=1, CUDA_VISIBLE_DEVICES="0", PATH=path)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert (run_dir / "requeue").exists()
    assert 128 + signal.SIGUSR2 == attempts_module._STOPPED_EARLY


def test_folder_in_place_of_a_marker_is_none(run_dir: Path) -> None:
    for name in ("requeue", "restart"):
        (run_dir / name).mkdir()
    (run_dir / "result.json").write_text(json.dumps(STOPPED))
    assert conclude(run_dir, 1, Ended(0)) == 0
    assert not (run_dir / "requeue").exists()
    assert not (run_dir / "restart").exists()
    assert (run_dir / "requeue.damaged").is_dir()


def test_job_that_can_exclude_nodes_goes_on_after_wrong_numbers(run_dir: Path) -> None:
    """Pods cannot, nor can a scheduler of the user's own that reports no nodes."""
    for kind in ("k8s", "custom, factory: 'a:b'"):
        last = job_of_attempts(run_dir, PUBLISHED)
        (run_dir / "config.yaml").write_text(frozen(f"cluster: {{kind: {kind}, procs_per_node: '1', device: cpu}}"))
        (run_dir / "logs" / f"attempt_{last}" / "nodes").write_text("n1\nn2\n")
        write_report(run_dir / "logs" / f"attempt_{last}", 0, CORRUPT)
        conclude(run_dir, last, Ended(1))
        assert not (run_dir / "requeue").exists()
        conclude(run_dir, last, Ended(1, up=["n1", "n3"]))
        assert (run_dir / "requeue").read_text() == "n2\n"
        shutil.rmtree(run_dir / "checkpoints")
        (run_dir / "requeue").unlink()
