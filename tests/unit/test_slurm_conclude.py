"""What the batch script calls around the ranks: the look at a node before, the last words and the status after."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.config.errors import ConfigError
from components.launch.slurm import conclude as concluded
from components.launch.slurm.commands import Answer, clean_environment, run_slurm
from components.launch.slurm.conclude import conclude
from components.launch.slurm.requeue import hung_nodes
from components.protocol.failures import HungRun, write_report
from components.resilience.heartbeat import Post, blame

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


HUNG = type("StepTimeout", (HungRun,), {})("no progress for 12 s in step 3: rank 1 on host n2 is missing")
LOST = RuntimeError("[gloo] Connection closed by peer [10.0.0.2]:41")
RAISED, REFUSED = ValueError("boom"), ConfigError("data.path=x: gone")
STOPPED = {"status": "preempted", "steps": 9}
ENDS = {
    "all well": ({}, {"status": "ok"}, 0, 0, "ok"),
    "saved and stopped": ({}, STOPPED, 0, 0, "preempted"),
    "saved and stopped, and torchrun ends with 1": ({}, STOPPED, 1, 0, "preempted"),
    "interrupted": ({}, {"status": "interrupted"}, 1, 0, "interrupted"),
    "failed after its result": ({}, {"status": "ok"}, 9, 9, "ok"),
    "asked to stop after its end": ({}, {"status": "ok"}, 140, 0, "ok"),
    "stopped before it listened": ({}, {}, 140, 0, "preempted"),
    "nothing said, nothing wrong": ({}, {}, 0, 0, None),
    "nothing said": ({}, {}, 7, 7, "failed"),
    "a rank raised": ({2: RAISED}, {}, 1, 1, "failed"),
    "a rank raised after the others had saved": ({2: RAISED}, STOPPED, 0, 1, "failed"),
    "out of memory": ({2: out_of_memory()}, {}, 1, 1, "oom"),
    "a run that stood still": ({0: HUNG, 2: LOST}, {}, 137, 75, "hung"),
    "a cause and a consequence": ({0: LOST, 3: RAISED}, {}, 143, 143, "failed"),
    "a person's mistake": ({1: REFUSED}, {}, 2, 2, "invalid"),
    "a person's mistake, seen by srun": ({1: REFUSED}, {}, 143, 2, "invalid"),
}
"""Reports by rank, result.json, and the status of srun; then the job's status, and that in result.json."""


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_an_attempt(run_dir: Path, name: str) -> None:
    """Only what has saved, or has not begun, asks for the queue."""
    reports, before, status, wanted, ended = ENDS[name]
    for rank, error in reports.items():
        write_report(run_dir / "logs" / "attempt_1", rank, error)
    if before:
        (run_dir / "result.json").write_text(json.dumps(before))
    if before == STOPPED:
        (run_dir / "requeue").touch()
    assert conclude(run_dir, 1, status, cancelled=False) == wanted
    assert result(run_dir).get("status") == ended
    assert (run_dir / "requeue").exists() == (ended == "preempted")


def job_of_attempts(run_dir: Path, *attempts: tuple[bool, bool], hung: int = 0) -> int:
    """Leave the files of a job's attempts, each (finished a step, published a checkpoint); return the last number.

    The first `hung` of them ended in a hang. An attempt of an earlier job, without progress, comes before.
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
            (logs / "result.json").write_text('{"status": "hung"}')
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
def test_a_job_without_progress_is_not_requeued(run_dir: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of an attempt that has stopped as asked, and at the start of one that Slurm requeued."""
    attempts, limit = PROGRESS[name]
    last = job_of_attempts(run_dir, *attempts)
    (run_dir / "result.json").write_text(json.dumps(STOPPED))
    (run_dir / "requeue").touch()
    assert conclude(run_dir, last, 0, cancelled=False) == (1 if limit else 0)
    assert (run_dir / "requeue").exists() == (limit is None)
    assert (limit or "requeuing the job") in capsys.readouterr().out
    following = run_dir / "logs" / f"attempt_{last + 1}"
    following.mkdir()
    (following / "job").write_text("7\n")
    published = [path.name for path in (run_dir / "checkpoints").iterdir()]
    (following / "checkpoints").write_text("".join(f"{name}\n" for name in published))
    (run_dir / "result.json").unlink()
    command = [sys.executable, "-m", "components.launch.slurm.requeue", str(run_dir), str(last + 1)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1 if limit else 0, "")
    assert (limit or "") in result(run_dir).get("error", "")


def test_the_limits_are_those_of_the_runs_config(run_dir: Path) -> None:
    last = job_of_attempts(run_dir, STEP)
    (run_dir / "config.yaml").write_text("cluster: {kind: slurm, procs_per_node: '1', requeue: {without_progress: 1}}")
    (run_dir / "result.json").write_text(json.dumps(STOPPED))
    (run_dir / "requeue").touch()
    assert conclude(run_dir, last, 0, cancelled=False) == 1


HANGS = {
    "with progress": ([PUBLISHED], 0, True),
    "without progress": ([PUBLISHED, STEP], 0, False),
    "after three others": ([PUBLISHED] * 4, 3, False),
    "after two others": ([PUBLISHED] * 3, 2, True),
}


@pytest.mark.parametrize("name", HANGS)
def test_a_run_that_hung_is_requeued_while_it_makes_progress(run_dir: Path, name: str) -> None:
    """Without the node of the rank that the others waited for; the rank that reported it is elsewhere."""
    attempts, before, requeued = HANGS[name]
    last = job_of_attempts(run_dir, *attempts, hung=before)
    write_report(run_dir / "logs" / f"attempt_{last}", 0, HUNG)
    assert conclude(run_dir, last, 137, cancelled=False) == 75
    assert result(run_dir)["status"] == "hung"
    marker = run_dir / "requeue"
    assert (marker.read_text() if marker.exists() else None) == ("n2\n" if requeued else None)


def test_the_nodes_of_silent_and_late_ranks_are_found_in_the_message_of_a_hang() -> None:
    """They are parsed from the message, and the requeued job excludes them; without a culprit it excludes none."""
    posts = {
        rank: Post(9, "in step 3", "forward (model.py:7)", f"n{rank}", {"world": 7 - rank % 2}) for rank in range(4)
    }
    assert hung_nodes(f"no progress for 12 s in step 3: {blame([2], posts)}") == ["n2"]
    assert hung_nodes(blame([], posts)) == ["n1", "n3"]
    assert hung_nodes(blame([], {rank: posts[rank] for rank in (0, 2)})) == []


def test_cancelled_before_anything_could_be_concluded(run_dir: Path) -> None:
    """The batch script's own note, left as soon as it is told, does what its argument does."""
    (run_dir / "logs" / "attempt_1" / "cancelled").touch()
    (run_dir / "result.json").write_text(json.dumps(STOPPED))
    (run_dir / "requeue").touch()
    assert conclude(run_dir, 1, 0, cancelled=False) == 1
    assert result(run_dir)["status"] == "cancelled"
    assert not (run_dir / "requeue").exists()


def test_agents_that_were_stopped_before_their_ranks_listened(run_dir: Path) -> None:
    (run_dir / "logs" / "attempt_1" / "node_0.log").write_text("Process 7 got signal: 12\n")
    assert conclude(run_dir, 1, 1, cancelled=False) == 0
    assert result(run_dir)["status"] == "preempted"
    assert (run_dir / "requeue").exists()


@pytest.mark.parametrize(("error", "ended"), [(LOST, "cancelled"), (RAISED, "failed")])
def test_cancelled_after_a_failure_or_with_its_consequence(run_dir: Path, error: Exception, ended: str) -> None:
    write_report(run_dir / "logs" / "attempt_1", 0, error)
    assert conclude(run_dir, 1, 143, cancelled=True) == 143
    assert result(run_dir)["status"] == ended


def test_the_cause_and_not_its_consequence_is_the_last_word(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = run_dir / "logs" / "attempt_1"
    write_report(logs, 0, LOST)
    write_report(logs, 3, ValueError("boom"))
    conclude(run_dir, 1, 1, cancelled=False)
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == ["rank 3 exited with status 1: ValueError: boom", f"logs: {logs}"]
    assert result(run_dir)["error"] == "rank 3: ValueError: boom"


def test_a_status_that_nobody_explains_points_at_the_logs(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(run_dir, 1, 7, cancelled=False) == 7
    said = capsys.readouterr().out
    assert "srun exited with status 7, and no rank reported an error; see job.log" in said
    assert result(run_dir)["status"] == "failed"


@pytest.mark.parametrize(("status", "wanted"), [(0, 1), (143, 143)])
def test_cancelled_is_for_good_and_keeps_what_the_ranks_said(run_dir: Path, status: int, wanted: int) -> None:
    (run_dir / "result.json").write_text('{"status": "preempted", "steps": 9}')
    (run_dir / "requeue").touch()
    assert conclude(run_dir, 1, status, cancelled=True) == wanted
    assert result(run_dir) == {"status": "cancelled", "steps": 9}
    assert not (run_dir / "requeue").exists()


def test_the_batch_script_calls_it(run_dir: Path) -> None:
    command = [sys.executable, "-m", concluded.__name__, str(run_dir), "1", "0", "--cancelled"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "cancelled\n")
    assert result(run_dir) == {"status": "cancelled"}


def node_check(run_dir: Path, gpus: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "components.launch.slurm.node_check", str(run_dir), str(gpus)]
    return subprocess.run(
        command, cwd=PROJECT, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_a_good_node(run_dir: Path) -> None:
    checked = node_check(run_dir)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert os.listdir(run_dir / "logs") == ["attempt_1"]


def test_a_node_that_does_not_see_the_run_directory(tmp_path: Path) -> None:
    checked = node_check(tmp_path / "gone")
    assert checked.returncode == 1
    assert checked.stderr.startswith(
        f"node {os.uname().nodename}: does not see the run directory {tmp_path / 'gone'}; "
    )


def test_a_node_that_cannot_write(run_dir: Path) -> None:
    """Root may write anywhere but in /proc."""
    shutil.rmtree(run_dir / "logs")
    (run_dir / "logs").symlink_to("/proc/self")
    checked = node_check(run_dir)
    assert checked.returncode == 1
    assert f"cannot write to the run directory {run_dir}: " in checked.stderr


def test_a_node_with_too_few_gpus(run_dir: Path) -> None:
    checked = node_check(run_dir, gpus=4, CUDA_VISIBLE_DEVICES="0,1")
    assert checked.returncode == 1
    assert "sees 2 GPUs where cluster.procs_per_node=4 processes need one each" in checked.stderr


def test_a_node_whose_driver_is_ill(run_dir: Path, tmp_path: Path) -> None:
    """An nvidia-smi that fails, as it does when a GPU has fallen off the bus."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'Unable to determine the device handle: Unknown Error' >&2\nexit 255\n")
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    checked = node_check(run_dir, gpus=2, CUDA_VISIBLE_DEVICES="0,1", PATH=path)
    assert checked.returncode == 1
    assert checked.stderr.endswith("nvidia-smi failed: Unable to determine the device handle: Unknown Error\n")
    program.write_text("#!/bin/sh\necho 'GPU 0'\n")
    assert node_check(run_dir, gpus=2, CUDA_VISIBLE_DEVICES="0,1", PATH=path).returncode == 0


def test_every_problem_of_a_node_is_told(tmp_path: Path) -> None:
    checked = node_check(tmp_path / "gone", gpus=1, CUDA_VISIBLE_DEVICES="")
    assert len(checked.stderr.splitlines()) == 2


def test_what_a_job_around_us_set_is_not_handed_on() -> None:
    inherited = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_CPU_BIND": "none",
        "SBATCH_PARTITION": "high",
        "SRUN_DEBUG": "3",
        "RANK": "1",
        "MESHBOOK_WORKER": "1",
        "PMIX_RANK": "0",
    }
    kept = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "SLURMER": "x", "HF_TOKEN": "secret", "MESHBOOK_X": "1"}
    assert clean_environment({**inherited, **kept}) == kept


def test_commands_that_are_not_there_or_say_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_slurm(["sh", "-c", "cat; echo no >&2; exit 3"], script="said\n") == Answer(3, "said", "no")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no sbatch on PATH; submit from a login node"):
        run_slurm(["sbatch"])


def test_a_controller_that_hangs_up_does_not_kill_the_command() -> None:
    """Its write fails then, and it tries again; of SIGPIPE it would die."""
    assert run_slurm(["sh", "-c", "kill -s PIPE $$; echo alive"]) == Answer(0, "alive", "")


def test_a_request_to_stop_does_not_end_the_look_at_a_node(run_dir: Path) -> None:
    """It would, were the signal not ignored: the ranks get the next one."""
    program = (
        "import os, signal, sys; from components.launch.slurm import node_check\n"
        f"sys.argv = ['node_check', {str(run_dir)!r}, '0']\n"
        "print(node_check.check_node()); os.kill(os.getpid(), signal.SIGUSR2); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\nalive\n")
    assert 128 + signal.SIGUSR2 == concluded.STOPPED_EARLY
