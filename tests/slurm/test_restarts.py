"""Ranks that are started again in their job after a crash, and jobs that go on with fewer nodes.

`make torture` kills ten ranks in a row, and takes nodes from a job and gives them back. At each commit test_stops.py
kills one.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, until
from tests.slurm.login import CPU, QUICK, Login, log_of, result_of, steps_of
from tests.suites import in_torture

KILLS = 10
NODES_OF_KILLED_RUN = 4
UP = {"idle", "alloc", "mix", "comp"}
SECONDS = 20.0
"""Most seconds from a kill to the first step, without the time that the first start took until then."""
RUN = (
    *("cluster=slurm_1node", "cluster.procs_per_node=1", "parallelism=fsdp2", *CPU, *QUICK, "checkpoint.every=10"),
    *("training.global_batch_size=8", "training.micro_batch_size=8", f"training.max_steps={30 * KILLS}"),
    *("training.log_every=1", "run.deterministic=true"),
)


@in_torture
def test_killed_rank_is_started_again_in_its_job(login: Login) -> None:
    """The losses are those of an undisturbed run to the bit, and result.json counts the lost work."""
    nodes = f"cluster.nodes={NODES_OF_KILLED_RUN}"
    undisturbed = login.run(*RUN, nodes)
    login.wait_for_end(undisturbed)
    submission = login.run(*RUN, nodes)
    run, durations = submission.run_dir, []
    for kill in range(KILLS):
        _await_step(run, 30 * kill + 12)
        began = time.monotonic()
        node = NODES[kill % NODES_OF_KILLED_RUN]
        login.kill_rank(node)
        until(lambda attempt=kill + 1: _first_step(run, attempt), lambda: log_of(run))
        durations.append(time.monotonic() - began)
    job = login.wait_for_end(submission)
    print(f"seconds from a kill to the first step after it: {[round(each, 1) for each in durations]}")
    result = result_of(run)
    assert (job["Restarts"], result["status"], result["restarts"]) == ("0", "ok", KILLS), log_of(run)
    assert steps_of(run) == steps_of(undisturbed.run_dir)
    # With nothing else on the machine:
    assert max(durations) < SECONDS + result_of(undisturbed.run_dir)["seconds_to_first_step"], durations
    assert 0 < result["lost_steps"] < 30 * KILLS
    assert 0 < result["lost_seconds"] < sum(durations) + 30 * KILLS
    log = (run / "logs" / "job.log").read_text()
    assert log.count("starting the ranks again in this job") == KILLS


@in_torture
def test_rank_killed_under_torchrun_is_started_again(login: Login) -> None:
    submission = login.run(*RUN, "cluster.nodes=2", "cluster.launcher=torchrun")
    run = submission.run_dir
    _await_step(run, 15)
    login.kill_rank("n2")
    job = login.wait_for_end(submission)
    assert (job["Restarts"], result_of(run)["status"], result_of(run)["restarts"]) == ("0", "ok", 1), log_of(run)


def test_rank_that_raises_is_not_started_again(login: Login) -> None:
    # Both ranks start before either fails: the failure of one ends the other.
    recipe = login.write_recipe(
        """\
        (HERE / f'started_{RANK}').open('a').write('x')
        while len(list(HERE.glob('started_*'))) < 2:
            time.sleep(0.1)
        raise ValueError('boom')
        """
    )
    submission = login.run(*RUN, "cluster.nodes=2", recipe=recipe)
    login.wait_for_end(submission, "FAILED")
    assert (submission.run_dir / "started_0").read_text() == "x"
    assert not (submission.run_dir / "restart").exists()


@in_torture
def test_job_with_a_range_of_nodes_uses_those_that_are_up(login: Login) -> None:
    """Of 7 nodes a global batch of 8 rows allows 4: the others stay idle, and the curve is that of one process."""
    steps = "training.max_steps=20"
    login.cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        submission = login.run(*RUN, "cluster.nodes=4-8", steps)
        assert submission.field("nodes") == "each attempt uses 4 or 8"
        job = login.wait_for_end(submission)
    finally:
        login.cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    run = submission.run_dir
    assert (job["NumNodes"], result_of(run)["status"], result_of(run)["processes"]) == ("7", "ok", 4), log_of(run)
    assert (run / "logs" / "attempt_0" / "nodes").read_text().split() == ["n1", "n3", "n4", "n5"]
    assert "n6, n7, n8 stay idle: the run can use 4 or 8 nodes" in (run / "logs" / "job.log").read_text()
    _assert_same_curve(login, run, steps)


@in_torture
def test_job_goes_on_with_fewer_nodes_and_takes_them_back(login: Login) -> None:
    """A node crashes: Slurm requeues the job, which goes on with four; after the next requeue it has eight again."""
    steps = "training.max_steps=300"
    submission = login.run(*RUN, "cluster.nodes=4-8", steps)
    run, cluster = submission.run_dir, login.cluster
    _await_step(run, 15)
    cluster.crash("n3")
    until(lambda: _nodes_of_running_attempt(run) == 4, lambda: log_of(run), 600)
    cluster.boot("n3")
    cluster.wait_for_nodes(UP, ["n3"])
    for node, state in cluster.node_states().items():
        if state not in UP:  # Slurm drains a node on which it cannot end a process in time
            cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    cluster.wait_for_nodes(UP)
    cluster.run("scancel", "--signal=USR2", submission.job)
    job = login.wait_for_end(submission)
    result, log = result_of(run), (run / "logs" / "job.log").read_text()
    assert (job["Restarts"], job["NumNodes"], result["status"], result["processes"]) == ("2", "8", "ok", 8), log_of(run)
    assert result["restarts"] == len(list((run / "logs").glob("attempt_*"))) - 1
    assert "node n3 of the previous attempt is down" in log
    _assert_same_curve(login, run, steps)


def _assert_same_curve(login: Login, run: Path, steps: str) -> None:
    """The losses are those of one process without a stop, up to the order of additions in float32."""
    alone = login.run(*RUN, "cluster=local", "cluster.procs_per_node=1", "run.dir=alone", steps)
    assert alone.status == 0, alone.errors
    losses, expected = steps_of(run), steps_of(login.folder / "alone")
    assert losses.keys() == expected.keys()
    assert list(losses.values()) == pytest.approx(list(expected.values()), rel=1e-4)


def _nodes_of_running_attempt(run: Path) -> int:
    """Return the number of nodes of the newest attempt that has taken a step."""
    stepped = [number for number in range(9) if _first_step(run, number)]
    return len((run / "logs" / f"attempt_{max(stepped)}" / "nodes").read_text().split())


def _await_step(run: Path, step: int) -> None:
    until(lambda: (run / "metrics.jsonl").exists() and max(steps_of(run), default=0) >= step, lambda: log_of(run))


def _first_step(run: Path, attempt: int) -> bool:
    file = run / "logs" / f"attempt_{attempt}" / "progress.json"
    return file.exists() and "first_step" in file.read_text()
