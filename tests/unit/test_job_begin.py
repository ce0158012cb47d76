"""The start of an attempt: its number, what it moves, its limits and nodes, and attempts without progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.launch.job.attempts import Refused, _record_failed_nodes, begin
from components.launch.job.policy import attempts_of_job
from components.launch.k8s.pod import run_pod
from components.protocol.errors import ConfigError
from tests.frozen import frozen

PROJECT = Path(__file__).resolve().parents[2]
NODES = [f"n{number}" for number in range(1, 9)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(frozen("cluster: {kind: slurm, nodes: '4', procs_per_node: '2'}"))
    (tmp_path / "logs" / "attempt_0").mkdir(parents=True)
    return tmp_path


def attempt(
    run_dir: Path, nodes: list[str], counts: list[int], *, failed: list[str] | None = None, **given: str
) -> int:
    """Begin an attempt of job 7 on `nodes`, of which some fail; return its number."""
    number = begin(run_dir, given.get("job", "7"), nodes=nodes, counts=counts, ended="6")
    _record_failed_nodes(run_dir / "logs" / f"attempt_{number}", failed or [])
    return number


def chosen(run_dir: Path, number: int) -> list[str]:
    return (run_dir / "logs" / f"attempt_{number}" / "nodes").read_text().split()


def test_attempts_are_numbered_and_keep_what_the_one_before_left(run_dir: Path) -> None:
    """The first takes the number of the submission, whose logs have no job yet; then the next free one."""
    (run_dir / "checkpoints" / "step_3").mkdir(parents=True)
    assert begin(run_dir, "7", nodes=["n1"], counts=[1]) == 0
    (run_dir / "result.json").write_text('{"status": "preempted"}')
    (run_dir / "logs" / "first_step").touch()
    for marker in ("requeue", "restart"):
        (run_dir / marker).touch()
    assert begin(run_dir, "8", nodes=["n1"], counts=[1], ended="7") == 1
    logs = run_dir / "logs"
    assert json.loads((logs / "attempt_0" / "result.json").read_text()) == {"status": "preempted"}
    assert (logs / "attempt_0" / "first_step").exists()
    assert {entry.name for entry in run_dir.iterdir()} == {"config.yaml", "checkpoints", "logs", "job_id"}
    assert [(logs / f"attempt_{number}" / "job").read_text() for number in (0, 1)] == ["7\n", "8\n"]
    assert (run_dir / "job_id").read_text() == "8\n"
    assert (logs / "attempt_1" / "checkpoints").read_text() == "step_3\n"
    assert (logs / "latest").readlink() == Path("attempt_1")
    for rank in (0, 1):
        assert (logs / "attempt_1" / f"rank_{rank}.log").stat().st_mode & 0o777 == 0o600


def test_job_without_a_run_or_beside_another_job_is_refused(run_dir: Path) -> None:
    (run_dir / "job_id").write_text("6\n")
    with pytest.raises(ConfigError, match="belongs to job 6, which has not ended; cancel that job, or choose another"):
        begin(run_dir, "7", nodes=["n1"], counts=[1], ended="5")
    assert not (run_dir / "logs" / "attempt_0" / "job").exists()
    assert begin(run_dir, "7", nodes=["n1"], counts=[1], ended="6") == 0
    assert begin(run_dir, "7", nodes=["n1"], counts=[1], ended="6") == 1
    (run_dir / "job_id").write_text("queue:Queue/8\n")
    message = "--job 8: RUN_DIR/job_id has queue:Queue/8; pass this id, with its beginning"
    with pytest.raises(ConfigError, match=message):
        begin(run_dir, "8")
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="no longer contains a run; submit the command again"):
        begin(run_dir, "7", nodes=["n1"], counts=[1])


@pytest.mark.parametrize(("counts", "used"), [([8], 7), ([4, 8], 4), ([4, 6, 8], 6), ([4, 5, 6, 7, 8], 7), ([1, 2], 2)])
def test_attempt_uses_as_many_nodes_as_the_run_can(run_dir: Path, counts: list[int], used: int) -> None:
    assert chosen(run_dir, attempt(run_dir, NODES[:7], counts if used < 7 else [*counts, 7])) == NODES[:used]
    assert not (run_dir / "requeue").exists()


def test_logs_of_a_local_attempt_are_not_those_of_a_job(run_dir: Path) -> None:
    """A run was continued locally and failed, and its script was submitted by hand."""
    begin(run_dir, "7", nodes=["n1"], counts=[1])
    logs = run_dir / "logs" / "attempt_1"
    logs.mkdir()
    (logs / "rank_0.error.json").write_text("{}")
    assert begin(run_dir, "8", nodes=["n1"], counts=[1], ended="7") == 2


def test_attempt_that_was_killed_as_it_began_made_no_progress(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step_3").mkdir(parents=True)
    for _ in range(3):
        begin(run_dir, "7", nodes=["n1"], counts=[1])
    (run_dir / "logs" / "attempt_1" / "checkpoints").unlink()
    assert [each.progressed for each in attempts_of_job(run_dir, 2)] == [False] * 3


def test_file_system_without_links_has_no_latest(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert begin(run_dir, "7", nodes=["n1"], counts=[1]) == 0


def test_node_that_failed_twice_is_left_out(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures in attempts of another job do not count."""
    attempt(run_dir, NODES, [8], failed=["n1"], job="6")
    attempt(run_dir, NODES, [8], failed=["n1", "n3"])
    attempt(run_dir, NODES, [8], failed=["n3"])
    assert chosen(run_dir, attempt(run_dir, NODES, [4, 5, 6, 7, 8])) == ["n1", "n2", *NODES[3:]]
    assert "without n3, which failed in 2 attempts" in capsys.readouterr().out


def test_job_is_requeued_once_for_other_nodes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If it gets the same nodes again, it uses them: no others are up."""
    for _ in range(2):
        attempt(run_dir, NODES[:4], [4], failed=["n2"])
    attempt(run_dir, NODES[:4], [4])
    assert (run_dir / "requeue").read_text() == "n2\n"
    assert "n2 failed in 2 attempts: requeuing the job for other nodes" in capsys.readouterr().out
    last = attempt(run_dir, NODES[:4], [4])
    assert not (run_dir / "requeue").exists()
    assert chosen(run_dir, last) == NODES[:4]


def test_nodes_that_are_down_count_as_failed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """sinfo lists a node once per partition, and nodes of other jobs, too."""
    attempt(run_dir, NODES[:4], [4])
    down = ["n2|down*|Not responding", "n7|drained|a|b", "n2|down*|Not responding"]
    begin(run_dir, "7", nodes=NODES[:4], counts=[4], down=down)
    assert capsys.readouterr().out == "node n2 of the previous attempt is down*: Not responding\n"
    assert (run_dir / "logs" / "attempt_0" / "failed_nodes").read_text() == "n2\n"


def test_scheduler_that_starts_jobs_again_by_itself_is_limited(run_dir: Path) -> None:
    """Pods are replaced by their job: cluster.requeue.max counts the attempts."""
    (run_dir / "config.yaml").write_text(
        frozen("cluster: {kind: k8s, procs_per_node: '1', device: cpu, requeue: {max: 2}}")
    )
    for number in range(3):
        assert begin(run_dir, "a/job/b", limit_requeues=True) == number
    with pytest.raises(Refused, match="not restarted: the limit of 2 requeues is reached"):
        begin(run_dir, "a/job/b", limit_requeues=True)
    assert begin(run_dir, "7", ended="a/job/b") == 4


def command(run_dir: Path, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a batch script."""
    line, options = [sys.executable, "-m", "components.launch.job", *arguments], {"capture_output": True, "text": True}
    return subprocess.run(line, cwd=PROJECT, env=os.environ | environment, input=stdin, check=False, **options)


def test_commands_of_a_batch_script(run_dir: Path) -> None:
    """As the template calls them: a rank is killed, then the job is stopped and requeued without the node that hung."""
    start = ("begin", str(run_dir), "--nodes", "n1 n2 n3 ", "--counts", "2", "3", "--down", "-")
    began = command(run_dir, *start, "--job", "7", stdin="n9|down|x\n")
    assert (began.returncode, began.stdout, began.stderr) == (0, "0\n", "")
    (run_dir / "logs" / "first_step").touch()
    killed = command(run_dir, "conclude", str(run_dir), "137", "--left", "UNLIMITED", MESHBOOK_ATTEMPT="0")
    assert (killed.returncode, (run_dir / "restart").exists()) == (137, True), killed.stdout
    down = command(run_dir, *start, MESHBOOK_JOB="7", stdin="n3|down*|gone\n")
    assert (down.returncode, down.stdout) == (0, "1\n")
    assert down.stderr == "node n3 of the previous attempt is down*: gone\n"
    (run_dir / "requeue").write_text("n2\nelsewhere\n")
    (run_dir / "result.json").write_text('{"status": "preempted"}')
    up = "".join(f"n{number}|gpu\n" for number in range(1, 7))
    end = ("conclude", str(run_dir), "0", "--up", "-", "--excluded", "n6")
    stopped = command(run_dir, *end, stdin=up, MESHBOOK_ATTEMPT="1")
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.splitlines()[-1] == "to be requeued without n2, where a rank failed"
    assert (run_dir / "requeue").read_text() == "n2\nn6\n"


def test_wrong_calls_of_a_batch_script_are_explained(run_dir: Path) -> None:
    """Without a traceback: the messages are the end of the job's log."""
    environment = {"MESHBOOK_JOB": "", "MESHBOOK_ATTEMPT": ""}
    for arguments, status, message in (
        (("begin", str(run_dir)), 2, "--job and MESHBOOK_JOB are not set; pass the id of the job"),
        (("conclude", str(run_dir), "0"), 2, "MESHBOOK_ATTEMPT=: is no number; export the one that `begin` printed"),
        (("begin", str(run_dir / "gone"), "--job", "7"), 2, "no longer contains a run; submit the command again"),
        (
            ("begin", str(run_dir), "--job", "7", "--counts", "2", "--nodes", " "),
            2,
            "--nodes: lists no node of the job",
        ),
        (("finish", str(run_dir)), 2, "invalid choice: 'finish'"),
    ):
        done = command(run_dir, *arguments, **environment)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
        assert message in done.stderr


JOB = "train/job/mine-1"
POD = {"JOB_COMPLETION_INDEX": "0", "MESHBOOK_POD_UID": "new", "MESHBOOK_JOB": JOB}


@pytest.mark.parametrize(
    ("attempts", "stepped", "message"),
    [
        (
            3,
            True,
            "not restarted: 3 attempts in a row took steps and published no newer checkpoint "
            "(cluster.requeue.without_progress=3): save more often (checkpoint.every, checkpoint.every_minutes), give "
            "a save more time (cluster.signal_lead_seconds, the grace period of the pods), or raise the limit",
        ),
        (
            10,
            False,
            "not restarted: 10 attempts in a row were stopped before their first step "
            "(cluster.requeue.before_first_step=10): set cluster.k8s.priority_class to a class that is preempted less, "
            "or raise the limit",
        ),
    ],
)
def test_pod_refuses_another_attempt_without_progress(
    tmp_path: Path, attempts: int, stepped: bool, message: str
) -> None:
    (tmp_path / "config.yaml").write_text(frozen("cluster: {kind: k8s, procs_per_node: '1', device: cpu}"))
    for number in range(attempts):
        logs = tmp_path / "logs" / f"attempt_{number}"
        logs.mkdir(parents=True)
        (logs / "job").write_text(f"{JOB}\n")
        (logs / "checkpoints").write_text("")
        (logs / "pods.json").write_text(json.dumps({"0": f"uid {number}"}))
        if stepped:
            (logs / "first_step").touch()
    assert run_pod(tmp_path, "recipes/finetune.py", POD) == 1
    assert json.loads((tmp_path / "result.json").read_text())["error"] == message
