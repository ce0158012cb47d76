"""Nodes that fail under a run: it goes on elsewhere or ends, as the policy says; the node is named; nobody is left."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.slurm.cluster import until
from tests.slurm.login import CPU, QUICK, TORTURE, Login, log_of, result_of

RUN = (
    *("cluster=slurm_2node", "cluster.procs_per_node=1", "parallelism=fsdp2", *CPU, *QUICK),
    *("training.max_steps=4000", "checkpoint.every=10"),
)


def test_a_run_goes_on_without_the_node_that_crashed(login: Login) -> None:
    """From its last checkpoint, on nodes that are up."""
    answer = login.type(*RUN, "training.max_steps=100")
    run, cluster = answer.run_dir, login.cluster
    _await_checkpoint(run)
    cluster.crash("n2")
    job = login.ended(answer)
    assert (job["Restarts"], result_of(run)["status"], result_of(run)["steps"]) == ("1", "ok", 100)
    assert "n2" not in cluster.run("scontrol", "show", "hostnames", job["NodeList"]).stdout.split()
    assert "node n2 of the previous attempt is down" in (run / "logs" / "job.log").read_text()
    assert "resumed from" in (run / "logs" / "latest" / "rank_0.log").read_text()
    assert nobody_is_left(login, "n1", "n2")


@pytest.mark.skipif(not TORTURE, reason="two time limits are waited for: make torture")
def test_a_run_whose_cable_is_pulled_ends_where_nothing_may_start_it_again(login: Login) -> None:
    """collective_timeout_minutes ends the wait of the other ranks; with requeue.node_failure=false that is the end."""
    answer = login.type(*RUN, "cluster.requeue.node_failure=false", "cluster.collective_timeout_minutes=0.1")
    run, cluster = answer.run_dir, login.cluster
    _await_checkpoint(run)
    cluster.cut("n2")
    job = login.ended(answer, {"FAILED", "NODE_FAIL"})
    assert job["Restarts"] == "0"
    until(lambda: "srun: error: Node failure on n2" in _job_log(run), lambda: log_of(run))
    assert re.search("^rank (0 on n1|1 on n2) exited with status 1", _job_log(run), re.MULTILINE), log_of(run)
    assert "Timed out" in _job_log(run)
    cluster.heal("n2")
    until(lambda: nobody_is_left(login, "n1", "n2"), lambda: f"{cluster.processes('n1')} {cluster.processes('n2')}")
    assert list((run / "checkpoints").glob("step_*[0-9]"))


def test_a_bad_node_is_named_before_the_ranks_start(login: Login) -> None:
    """The job asks for two GPUs and a rank for each, but the nodes show the processes only one."""
    recipe = login.write_recipe("(HERE / 'started').touch()")
    answer = login.type(
        *("cluster=slurm_2node", "cluster.procs_per_node=2", *CPU, *QUICK, "training.micro_batch_size=1"),
        *("cluster.device=auto", "cluster.gpu_request=none"),
        recipe=recipe,
    )
    login.ended(answer, "FAILED")
    told = (answer.run_dir / "logs" / "job.log").read_text()
    assert "node n1: sees 0 GPUs where cluster.procs_per_node=2" in told
    assert "node n2: sees 0 GPUs where cluster.procs_per_node=2" in told
    assert not (answer.run_dir / "started").exists()
    assert result_of(answer.run_dir)["status"] == "failed"


def nobody_is_left(login: Login, *nodes: str) -> bool:
    return not any(login.cluster.processes(node) for node in nodes)


def _await_checkpoint(run: Path) -> None:
    until(lambda: any(".tmp" not in found.name for found in (run / "checkpoints").glob("step_*")), lambda: log_of(run))


def _job_log(run: Path) -> str:
    return (run / "logs" / "job.log").read_text()


def test_a_run_that_hangs_goes_on_without_the_node_that_hung(login: Login) -> None:
    """A rank is stopped once there is a checkpoint: the others end the run, and it starts again on other nodes."""
    answer = login.type(*RUN, "training.max_steps=60", "training.step_timeout_seconds=4")
    run, cluster = answer.run_dir, login.cluster
    _await_checkpoint(run)
    for process in cluster.processes("n2"):
        if "finetune.py" in Path(f"/proc/{process}/cmdline").read_text():
            os.kill(process, signal.SIGSTOP)
    job = login.ended(answer)
    assert (job["Restarts"], job["ExcNodeList"], result_of(run)["status"]) == ("1", "n2", "ok"), log_of(run)
    assert "n2" not in cluster.run("scontrol", "show", "hostnames", job["NodeList"]).stdout.split()
    assert json.loads((run / "logs" / "attempt_0" / "result.json").read_text())["status"] == "hung"
    assert "requeued without n2" in _job_log(run)
    assert not (run / "logs" / "latest" / "store.json").exists()
    assert "resumed from" in (run / "logs" / "latest" / "rank_0.log").read_text()
