"""Stopped jobs are requeued, resume in their run directory, and log bitwise the losses of an undisturbed run.

At each commit one run loses a rank, is stopped and is cancelled; `make torture` draws twenty stops of every kind and at
every moment of a run.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, until
from tests.slurm.login import CPU, QUICK, CommandResult, Login, log_of, result_of, steps_of
from tests.suites import TORTURE, in_torture

STEPS = 160
RUN = (
    *("cluster=slurm_2node", "cluster.procs_per_node=1", "parallelism=fsdp2", "cluster.signal_lead_seconds=20"),
    *(*CPU, *QUICK, f"training.max_steps={STEPS}", "training.eval_every=40", "checkpoint.every=50"),
)
LONG = ("training.max_steps=240", "checkpoint.every=20")
TORCHRUN = "cluster.launcher=torchrun"


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same run on two nodes without a stop."""
    losses = _losses(Login(cluster, tmp_path_factory.mktemp("undisturbed")))
    assert len(losses) == STEPS
    return losses


@pytest.fixture(scope="module")
def undisturbed_for_longer(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run that takes longer than the time limit, without a stop."""
    return _losses(Login(cluster, tmp_path_factory.mktemp("longer")), TIME_LIMIT[-1])


def _losses(login: Login, *options: str) -> dict[int, float]:
    submission = login.run(*RUN, *options)
    login.wait_for_end(submission)
    assert result_of(submission.run_dir)["status"] == "ok"
    return steps_of(submission.run_dir)


def by_a_user(login: Login, job: str) -> None:
    login.cluster.run("scancel", "--signal=USR2", job)


def by_a_higher_priority_job(login: Login, job: str) -> None:
    login.cluster.run("sbatch", "--partition=high", "--nodes=8", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")


KINDS = (by_a_user, by_a_higher_priority_job)
TIME_LIMIT = ("cluster.time=1", "cluster.signal_lead_seconds=30", "training.max_steps=1500")
"""Slurm checks time limits every 30 s: the signal arrives about 35 s after a start, and the run needs 2 or 3 starts."""


def in_a_step(run: Path, draw: random.Random) -> None:
    await_step(run, draw.randrange(1, STEPS // 2))


def in_an_evaluation(run: Path, draw: random.Random) -> None:
    until(lambda: _lines(run, "eval_loss") >= 1, lambda: log_of(run))
    eval_step = draw.choice((40, 80))
    until(lambda: _lines(run, "loss") >= eval_step - 1, lambda: log_of(run))


def in_a_save(run: Path, draw: random.Random) -> None:
    until(lambda: list((run / "checkpoints").glob("step_*")) != [], lambda: log_of(run))


def at_the_start(run: Path, draw: random.Random) -> None:
    until((run / "logs" / "attempt_0" / "rank_0.log").exists, lambda: log_of(run))
    time.sleep(draw.uniform(0, 6))


MOMENTS = (in_a_step, in_an_evaluation, in_a_save, at_the_start)


def _stop(
    login: Login, kind: Callable[[Login, str], None], moment: Callable[[Path, random.Random], None], seed: int
) -> Callable[[CommandResult], None]:
    """Return a function that waits for the moment in a run and then stops it."""

    def stop(submission: CommandResult) -> None:
        moment(submission.run_dir, random.Random(seed))
        kind(login, submission.job)

    return stop


def await_step(run: Path, step: int) -> None:
    """Wait until a run has logged this many steps."""
    until(lambda: _lines(run, "loss") >= step, lambda: log_of(run))


def _lines(run: Path, key: str) -> int:
    file = run / "metrics.jsonl"
    return sum(f'"{key}"' in line for line in file.read_text().splitlines()) if file.exists() else 0


def _stop_and_compare(
    login: Login,
    undisturbed: dict[int, float],
    stop: Callable[[CommandResult], None],
    *options: str,
) -> CommandResult:
    submission = login.run(*RUN, *options)
    assert submission.status == 0, submission.errors
    login.cluster.wait_for(submission.job, "RUNNING")
    stop(submission)
    job = login.wait_for_end(submission)
    run = submission.run_dir
    assert int(job["Restarts"]) >= 1, log_of(run)
    assert (run / "logs" / "attempt_1").is_dir()
    assert result_of(run)["status"] == "ok"
    assert steps_of(run) == undisturbed
    return submission


def test_run_that_is_killed_stopped_and_cancelled_has_the_losses_of_an_undisturbed_one(login: Login) -> None:
    """A killed rank is started again in its job, a stopped job is requeued, a cancelled one is not.

    After that, the same command resumes the run.
    """
    undisturbed = login.run(*RUN, *LONG, "cluster.nodelist='n5,n6'")
    submission = login.run(*RUN, *LONG, "run.dir=mine")
    run, logs = submission.run_dir, submission.run_dir / "logs"
    await_step(run, 25)
    login.kill_rank("n2")
    until(lambda: "resumed from" in _text(logs / "attempt_1" / "rank_0.log"), lambda: log_of(run))
    assert _text(logs / "job.log").count("starting the ranks again in this job") == 1
    await_step(run, 50)
    by_a_user(login, submission.job)
    until((logs / "attempt_1" / "result.json").exists, lambda: log_of(run))
    before = json.loads((logs / "attempt_1" / "result.json").read_text())
    assert (before["status"], before["restarts"]) == ("preempted", 1)
    assert 25 < before["steps"] < 240
    await_step(run, before["steps"] + 10)
    assert "resumed from" in _text(logs / "attempt_2" / "rank_0.log")
    login.cluster.cancel(submission.job)
    assert login.wait_for_end(submission, "CANCELLED")["Restarts"] == "1"
    assert result_of(run)["status"] == "cancelled"
    assert not (run / "requeue").exists()
    again = login.run(*RUN, *LONG, "run.dir=mine")
    login.wait_for_end(again)
    login.wait_for_end(undisturbed)
    result = result_of(run)
    assert result["status"] == "ok"
    assert 0 < result["lost_steps"] < 240
    assert steps_of(run) == steps_of(undisturbed.run_dir)


@pytest.mark.skipif(not TORTURE, reason="two minutes; test_submit.py runs under torchrun: make torture")
def test_run_preempted_under_torchrun_resumes_with_the_same_losses(login: Login, undisturbed: dict[int, float]) -> None:
    stop = _stop(login, by_a_higher_priority_job, in_a_step, random.randrange(2**32))
    _stop_and_compare(login, undisturbed, stop, TORCHRUN)


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def reachable_stores(login: Login, node: str) -> list[int]:
    """Return the ports of a node on which a port scan from another host can list the keys of a store."""
    pid = login.cluster.processes(node)[0]
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    fields = [line.split() for table in tables for line in table.splitlines()]
    ports = {int(each[1].rpartition(":")[2], 16) for each in fields if each[3] == "0A"}
    body = f"""
import datetime, sys, threading
from torch.distributed import TCPStore
def scan(port):
    soon = datetime.timedelta(seconds=2)
    store = TCPStore("{login.cluster.subnet}.{node[1:]}", port, is_master=False, timeout=soon, wait_for_workers=False)
    if store.num_keys() > 0:
        print(port, flush=True)
threads = [threading.Thread(target=scan, args=(port,), daemon=True) for port in {sorted(ports)}]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(8)
import os; os._exit(0)
"""
    scanned = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert len(ports) > 1
    return [int(port) for port in scanned.stdout.split()]


@in_torture
def test_store_of_a_run_cannot_be_read_from_another_host(login: Login) -> None:
    submission = login.run(*RUN, "training.max_steps=4000")
    await_step(submission.run_dir, 1)
    assert reachable_stores(login, "n1") == []
    login.cluster.cancel(submission.job)
    login.wait_for_end(submission, "CANCELLED")


@in_torture
def test_number_of_requeues_is_limited(login: Login) -> None:
    submission = login.run(*RUN, "cluster.requeue.max=0")
    in_a_step(submission.run_dir, random.Random(0))
    by_a_user(login, submission.job)
    login.wait_for_end(submission, "FAILED")
    assert "submit the same command again" in (submission.run_dir / "logs" / "job.log").read_text()
    assert result_of(submission.run_dir)["status"] == "preempted"


@pytest.mark.skipif(not TORTURE, reason="twenty stops take twenty minutes: make torture")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(20))
def test_run_stopped_at_any_moment_resumes_with_the_same_losses(
    login: Login, undisturbed: dict[int, float], undisturbed_for_longer: dict[int, float], number: int
) -> None:
    options = [TORCHRUN] if number % 2 else []
    if number % 3 == 2:
        _stop_and_compare(login, undisturbed_for_longer, lambda submission: None, *TIME_LIMIT, *options)
        return
    kind, moment = KINDS[number % 3], MOMENTS[number // 3 % len(MOMENTS)]
    _stop_and_compare(login, undisturbed, _stop(login, kind, moment, number), *options)


@in_torture
def test_job_without_progress_ends_after_three_attempts(login: Login) -> None:
    """A run that is preempted after a step without a save: three attempts, then an error with the limit."""
    recipe = login.write_recipe(
        """
        (HERE / "logs" / "first_step").touch()
        (HERE / "result.json").write_text(json.dumps({"status": "preempted"}))
        """
    )
    submission = login.run("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK, recipe=recipe)
    job = login.wait_for_end(submission, "FAILED")
    assert job["Restarts"] == "2"
    assert "(cluster.requeue.without_progress=3): save more often" in log_of(submission.run_dir)


@in_torture
def test_cancelled_run_is_recorded_even_if_the_batch_script_hangs(login: Login) -> None:
    """On a busy machine the batch script may be killed (KillWait) before its last command; here that command hangs."""
    slow = login.folder / "python"
    slow.write_text(f'#!/bin/sh\ncase "$*" in *conclude*) sleep 300;; esac\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    recipe = login.write_recipe(
        """
        import signal, time
        ended = []
        signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
        (HERE / "logs" / "listening").touch()
        while not ended:
            time.sleep(0.1)
        time.sleep(2)
        (HERE / "result.json").write_text(json.dumps({"status": "preempted", "steps": 9}))
        """
    )
    one = ("cluster=slurm_1node", "cluster.procs_per_node=1", f"cluster.python={slow}", "cluster.health_check=false")
    submission = login.run(*one, *CPU, *QUICK, recipe=recipe)
    until((submission.run_dir / "logs" / "listening").exists, lambda: log_of(submission.run_dir))
    login.cluster.cancel(submission.job)
    login.wait_for_end(submission, "CANCELLED")
    until(lambda: not login.cluster.processes("n1"), lambda: log_of(submission.run_dir))
    assert result_of(submission.run_dir) == {"status": "cancelled", "steps": 9}
    assert not (submission.run_dir / "requeue").exists()
