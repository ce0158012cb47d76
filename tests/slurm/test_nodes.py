"""Nodes that fail during a run: it is requeued on other nodes or ends, the node is named, and no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import until
from tests.slurm.login import CPU, QUICK, Login, log_of, result_of
from tests.suites import TORTURE, in_torture

RUN = (
    *("cluster=slurm_2node", "cluster.procs_per_node=1", "parallelism=fsdp2", *CPU, *QUICK),
    *("training.max_steps=4000", "checkpoint.every=10"),
)


@in_torture
def test_run_is_requeued_without_the_crashed_node(login: Login) -> None:
    """It resumes from its last checkpoint, on nodes that are up."""
    submission = login.run(*RUN, "training.max_steps=100")
    run, cluster = submission.run_dir, login.cluster
    _await_checkpoint(run)
    cluster.crash("n2")
    job = login.wait_for_end(submission)
    assert (job["Restarts"], result_of(run)["status"], result_of(run)["steps"]) == ("1", "ok", 100)
    assert "n2" not in cluster.run("scontrol", "show", "hostnames", job["NodeList"]).stdout.split()
    assert "node n2 of the previous attempt is down" in (run / "logs" / "job.log").read_text()
    assert "resumed from" in (run / "logs" / "latest" / "rank_0.log").read_text()
    assert no_process_is_left(login, "n1", "n2")


@pytest.mark.skipif(not TORTURE, reason="waits for two timeouts: make torture")
def test_run_with_an_unreachable_node_ends_if_requeue_is_disabled(login: Login) -> None:
    """The other ranks end after collective_timeout_minutes; with requeue.node_failure=false the job is not requeued."""
    submission = login.run(*RUN, "cluster.requeue.node_failure=false", "cluster.collective_timeout_minutes=0.1")
    run, cluster = submission.run_dir, login.cluster
    _await_checkpoint(run)
    cluster.cut("n2")
    job = login.wait_for_end(submission, {"FAILED", "NODE_FAIL"})
    assert job["Restarts"] == "0"
    until(lambda: "srun: error: Node failure on n2" in _job_log(run), lambda: log_of(run))
    assert re.search("^rank (0 on n1|1 on n2) exited with status 1", _job_log(run), re.MULTILINE), log_of(run)
    assert "Timed out" in _job_log(run)
    cluster.heal("n2")
    until(lambda: no_process_is_left(login, "n1", "n2"), lambda: f"{cluster.processes('n1')} {cluster.processes('n2')}")
    assert list((run / "checkpoints").glob("step_*[0-9]"))


def test_node_without_enough_gpus_is_named_before_the_ranks_start(login: Login) -> None:
    """The job needs two GPUs per node, one per rank, but no GPU is visible to the processes."""
    recipe = login.write_recipe("(HERE / 'started').touch()")
    submission = login.run(
        *("cluster=slurm_2node", "cluster.procs_per_node=2", *CPU, *QUICK, "training.micro_batch_size=1"),
        *("cluster.device=auto", "cluster.gpu_request=none"),
        recipe=recipe,
    )
    login.wait_for_end(submission, "FAILED")
    log = (submission.run_dir / "logs" / "job.log").read_text()
    assert "node n1: has 0 visible GPUs, but cluster.procs_per_node=2" in log
    assert "node n2: has 0 visible GPUs, but cluster.procs_per_node=2" in log
    assert not (submission.run_dir / "started").exists()
    assert result_of(submission.run_dir)["status"] == "failed"


@pytest.mark.parametrize(
    ("asked", "each"),
    [
        (("cluster.gpu_request=gpus_per_task",), ["0", "1"]),
        (("cluster.gpu_request=gres",), ["0,1", "0,1"]),
        pytest.param(
            ("cluster.gpu_request=none", "+cluster.sbatch_extra.gpus-per-task='1'"), ["0", "1"], marks=in_torture
        ),
        pytest.param(("cluster.srun_extra=['--gpu-bind=single:1']",), ["0", "1"], marks=in_torture),
        pytest.param(
            ("cluster.gpu_request=gpus_per_task", "cluster.launcher=torchrun"), ["0,1", "0,1"], marks=in_torture
        ),
    ],
)
def test_nodes_with_gpus_for_all_ranks_pass_the_check(login: Login, asked: tuple[str, ...], each: list[str]) -> None:
    """In every form of CUDA_VISIBLE_DEVICES that Slurm sets: one GPU of its own for a rank, or all of the node."""
    python = login.folder / "python"  # of its own, so that the CPU build of torch is no problem
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    recipe = login.write_recipe(
        """
        local = os.environ.get("LOCAL_RANK") or os.environ["SLURM_LOCALID"]
        (HERE / f"gpus_{RANK}").write_text(f"{local} {os.environ['CUDA_VISIBLE_DEVICES']}")
        """
    )
    submission = login.run(
        *("cluster=slurm_2node", "cluster.procs_per_node=2", *CPU, *QUICK, "training.micro_batch_size=1"),
        *("cluster.device=auto", f"cluster.python={python}", "cluster.nodelist='n[3,8]'", *asked),
        recipe=recipe,
    )
    login.wait_for_end(submission)
    seen = sorted(file.read_text() for file in submission.run_dir.glob("gpus_*"))
    assert seen == sorted(f"{number} {gpus}" for number, gpus in enumerate(each) for _ in range(2))
    assert (submission.run_dir / "logs" / "attempt_0" / "nodes").read_text().split() == ["n3", "n8"]


@pytest.mark.parametrize("devices", ["GPU-1a,GPU-2b", pytest.param("MIG-1a,MIG-2b", marks=in_torture)])
def test_names_of_devices_pass_the_check(login: Login, devices: str) -> None:
    """As Slurm writes them with AutoDetect=nvml and MIG; here the Python of the job sets them."""
    python = login.folder / "python"
    python.write_text(f'#!/bin/sh\nexport CUDA_VISIBLE_DEVICES={devices}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    submission = login.run(
        *("cluster=slurm_1node", "cluster.procs_per_node=2", *CPU, *QUICK, "training.micro_batch_size=1"),
        *("cluster.device=auto", "cluster.gpu_request=none", f"cluster.python={python}"),
        recipe=login.write_recipe("(HERE / 'seen').write_text(os.environ['CUDA_VISIBLE_DEVICES'])"),
    )
    login.wait_for_end(submission)
    assert (submission.run_dir / "seen").read_text() == devices


def no_process_is_left(login: Login, *nodes: str) -> bool:
    return not any(login.cluster.processes(node) for node in nodes)


def _await_checkpoint(run: Path) -> None:
    until(lambda: any(".tmp" not in found.name for found in (run / "checkpoints").glob("step_*")), lambda: log_of(run))


def _job_log(run: Path) -> str:
    return (run / "logs" / "job.log").read_text()


@in_torture
def test_hung_run_is_requeued_without_the_node_of_the_hung_rank(login: Login) -> None:
    """A rank is stopped after the first checkpoint: the others end the run, which is requeued on other nodes."""
    submission = login.run(*RUN, "training.max_steps=60", "training.step_timeout_seconds=4")
    run, cluster = submission.run_dir, login.cluster
    _await_checkpoint(run)
    for process in cluster.processes("n2"):
        if "finetune.py" in Path(f"/proc/{process}/cmdline").read_text():
            os.kill(process, signal.SIGSTOP)
    job = login.wait_for_end(submission)
    assert (job["Restarts"], job["ExcNodeList"], result_of(run)["status"]) == ("1", "n2", "ok"), log_of(run)
    assert "n2" not in cluster.run("scontrol", "show", "hostnames", job["NodeList"]).stdout.split()
    assert json.loads((run / "logs" / "attempt_0" / "result.json").read_text())["status"] == "hung"
    assert "requeued without n2" in _job_log(run)
    assert not (run / "logs" / "latest" / "store.json").exists()
    assert "resumed from" in (run / "logs" / "latest" / "rank_0.log").read_text()


@in_torture
def test_run_is_requeued_without_the_node_that_computes_wrong_numbers(login: Login) -> None:
    """A flipped bit after step 15 is found before the save of step 20; the job resumes from step 10 on other nodes."""
    fault = 'cluster.env.MESHBOOK_FAULT="flip=7:weights:rank1:15"'  # the second attempt takes 14 steps
    changes = ("cluster.nodes=3", "parallelism=ddp", "training.global_batch_size=6", "training.max_steps=24", fault)
    submission = login.run(*RUN, *changes)
    run = submission.run_dir
    job = login.wait_for_end(submission)
    assert (job["Restarts"], job["ExcNodeList"], result_of(run)["status"]) == ("1", "n2", "ok"), log_of(run)
    first = json.loads((run / "logs" / "attempt_0" / "result.json").read_text())
    assert first["status"] == "corrupted"
    assert first["error"].startswith("rank 1 on host n2 computes wrong numbers without an error")
    assert "which were equal after step 10" in first["error"]
    assert "requeued without n2" in _job_log(run)
    assert "step_10" in (run / "logs" / "latest" / "checkpoints").read_text().split()
    assert "step_20" not in (run / "logs" / "latest" / "checkpoints").read_text().split()
