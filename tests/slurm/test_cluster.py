"""The test cluster: eight nodes that run jobs, fail, recover and leave no processes behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from components.distributed import init
from tests.distributed.contrast import alone
from tests.harness import run_ranks
from tests.slurm import processes
from tests.slurm.cluster import IDENTITIES, Cluster, ClusterError, ClusterInUse, until
from tests.slurm.configuration import GPUS, NODES, job_ids
from tests.suites import TORTURE

ROOT = Path(__file__).resolve().parents[2]


def test_job_spans_eight_nodes_that_resolve_each_others_names(cluster: Cluster) -> None:
    command = 'echo $(hostname) $SLURM_PROCID $CUDA_VISIBLE_DEVICES $(getent ahostsv4 n8 | head -n1 | cut -d" " -f1)'
    output = cluster.run("srun", "--nodes=8", f"--gpus-per-node={GPUS}", "sh", "-c", command).stdout
    gpus = ",".join(map(str, range(GPUS)))
    assert sorted(output.split("\n")[:-1]) == [f"{n} {rank} {gpus} {cluster.subnet}.8" for rank, n in enumerate(NODES)]


def test_only_the_tasks_of_a_step_are_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """get_world_info in the environments of tasks, batch shells and allocations, also without SLURM_STEP_ variables."""

    def world_info(rank: int, exported: bool) -> tuple[int, int, int]:
        found = init.get_world_info()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        assert tuple(os.environ.get(name) for name in names) == (tuple(map(str, found)) if exported else (None,) * 3)
        return found

    def world_infos(name: str, exported: bool) -> set[tuple[int, int, int]]:
        found = set()
        for file in tmp_path.glob(name):
            variables = dict(each.split("=", 1) for each in file.read_text().split("\0") if each.startswith("SLURM_"))
            job = {name: value for name, value in variables.items() if name not in steps}
            for exported_variables in (variables, job) if exported else (variables,):
                found |= set(run_ranks(1, world_info, exported, init=False, env=alone(**exported_variables)))
        return found

    steps = [f"SLURM_STEP_{name}" for name in ("NUM_TASKS", "NUM_NODES", "TASKS_PER_NODE", "NODELIST")]
    tasks = ("--nodes=2", "--ntasks-per-node=2")
    cluster.run("srun", *tasks, "sh", "-c", f"env -0 > {tmp_path}/task.$SLURM_PROCID")
    assert world_infos("task.*", exported=True) == {(0, 0, 4), (1, 1, 4), (2, 0, 4), (3, 1, 4)}
    (tmp_path / "job.sh").write_text(
        f"#!/bin/sh\nenv -0 > {tmp_path}/shell\nsrun -n1 -N1 env -0 > {tmp_path}/one_task\n"
    )
    cluster.run("sbatch", "--wait", *tasks, f"--chdir={tmp_path}", f"{tmp_path}/job.sh")
    cluster.run("salloc", *tasks, "sh", "-c", f"env -0 > {tmp_path}/allocation")
    for name, number in {
        "shell": "SLURM_NTASKS=4",
        "one_task": "SLURM_STEP_ID",
        "allocation": "SLURM_NTASKS=4",
    }.items():
        assert number in (tmp_path / name).read_text()
        assert world_infos(name, exported=False) == {(0, 0, 1)}


def test_requests_beyond_the_cluster_are_rejected(cluster: Cluster) -> None:
    for option, error in {
        "--nodes=9": "Node count specification invalid",
        "--gpus-per-node=9": "Requested node configuration is not available",
        "--partition=low": "Invalid partition name specified",
    }.items():
        done = cluster.run("srun", "--immediate=1", option, "true", check=False)
        assert done.returncode
        assert error in done.stderr


def test_batch_job_passes_through_its_states(fresh_cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "job with=.sh"
    script.write_text("#!/bin/sh\nsleep 300 & wait\n")
    submitted = fresh_cluster.run("sbatch", "--parsable", "--chdir", str(tmp_path), "-w", "n2", str(script), "Big=1 x")
    job = fresh_cluster.wait_for(submitted.stdout.strip(), "RUNNING")
    assert [job[name] for name in ("NodeList", "WorkDir", "Restarts")] == ["n2", str(tmp_path), "0"]
    until(lambda: len(fresh_cluster.processes("n2")) >= 3, lambda: "stepd, shell and sleep did not start")
    assert not fresh_cluster.processes("n1")
    with pytest.raises(ClusterError, match="is not .'COMPLETED'. after 0"):
        fresh_cluster.wait_for(job["JobId"], "COMPLETED", seconds=0)
    fresh_cluster.cancel(job["JobId"])
    with pytest.raises(ClusterError, match="did not get"):
        fresh_cluster.wait_for(job["JobId"], "COMPLETED")
    until(lambda: not fresh_cluster.processes("n2"), lambda: f"{fresh_cluster.processes('n2')} remain")


def test_cut_cable_makes_a_node_unreachable_until_it_is_healed(fresh_cluster: Cluster) -> None:
    reach = ["bash", "-c", f"exec 3<>/dev/tcp/{fresh_cluster.subnet}.5/6818"]
    fresh_cluster.run(*reach)
    fresh_cluster.cut("n5")
    assert (
        fresh_cluster.run("timeout", "3", *reach, check=False).returncode == 124
    )  # a timeout, not a refused connection
    fresh_cluster.heal("n5")
    fresh_cluster.run(*reach)


@pytest.mark.skipif(not TORTURE, reason="test_nodes.py crashes a node during a run: make torture")
def test_crashed_node_is_detected_and_recovers_and_a_requeued_job_restarts(
    fresh_cluster: Cluster, tmp_path: Path
) -> None:
    fresh_cluster.crash("n7")
    assert not fresh_cluster.processes("n7")
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n[ -z $SLURM_RESTART_COUNT ] || exit 0\nexec sleep 300\n")
    job = fresh_cluster.run("sbatch", "--parsable", "--requeue", "--output=/dev/null", str(script)).stdout.strip()
    fresh_cluster.wait_for(job, "RUNNING")
    fresh_cluster.run("scontrol", "requeue", job)
    assert fresh_cluster.wait_for(job, "COMPLETED")["Restarts"] == "1"
    fresh_cluster.wait_for_nodes(["idle*", "down*"], nodes=["n7"])
    fresh_cluster.wait_for_nodes("idle", nodes=set(NODES) - {"n7"})
    fresh_cluster.boot("n7")
    fresh_cluster.wait_for_nodes("idle")
    assert fresh_cluster.run("srun", "-w", "n7", "hostname").stdout == "n7\n"


def test_two_clusters_coexist_and_a_stopped_one_leaves_nothing_behind(cluster: Cluster) -> None:
    mounts = Path("/proc/mounts").read_text()
    other = Cluster.started()
    with pytest.raises(ClusterInUse):
        Cluster(other.identity).start()
    job = other.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=setsid sleep 299 & wait").stdout
    assert int(job) == job_ids(other.identity)[0] > job_ids(cluster.identity)[1]  # they share the freezer
    until(lambda: _processes_of(other) != [] and "sleep" in _commands(other), lambda: "the job did not start")
    assert "sleep" not in _commands(cluster)
    assert _job_cgroups(other) != [] or not (other.base / "cgroup").exists()
    other.stop()
    assert _processes_of(other) == []
    assert other.link not in os.listdir("/sys/class/net")
    assert Path("/proc/mounts").read_text() == mounts
    assert _job_cgroups(other) == []
    assert set(cluster.node_states().values()) == {"idle"}


def _commands(cluster: Cluster) -> list[str]:
    return [processes.all_commands()[process][0] for node in NODES for process in cluster.processes(node)]


def _job_cgroups(cluster: Cluster) -> list[str]:
    """Return the freezer directories of the cluster's jobs; empty if jobs are not tracked by cgroup."""
    root, (first, last) = cluster.base / "cgroup" / "freezer", job_ids(cluster.identity)
    command = f"mount -t cgroup -o freezer cgroup {root} && find {root}/slurm_n* -name 'job_*'"
    found = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, check=False
    ).stdout
    return [job for job in found.split() if first <= int(job.rpartition("_")[2]) <= last]


def _processes_of(cluster: Cluster) -> list[str]:
    """Return the command lines of processes whose arguments or environment contain the cluster's folder."""
    found = []
    for process, command in processes.all_commands().items():
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes()
        except OSError:
            continue
        if str(cluster.base).encode() in variables or str(cluster.base) in " ".join(command):
            found.append(" ".join(command))
    return found


def test_cluster_ends_with_the_process_that_started_it(slurm: None) -> None:
    code = (
        "import os; from tests.slurm.cluster import Cluster; print(Cluster.started().identity, flush=True); os.abort()"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGABRT
    abandoned = Cluster(int(done.stdout))
    try:
        until(lambda: not _processes_of(abandoned), lambda: f"still running: {_processes_of(abandoned)}")
    finally:
        abandoned.stop()
    assert abandoned.link not in os.listdir("/sys/class/net")


def test_cluster_started_by_hand_outlives_its_shell(slurm: None) -> None:
    free = max(IDENTITIES) + 1 + os.getpid() % 200  # not used by any other process

    def by_hand(*arguments: str) -> str:
        command = [sys.executable, "-m", "tests.slurm.cluster", *arguments, f"--id={free}"]
        return subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=True, text=True).stdout

    try:
        setting = by_hand("up")
        command = f"{setting}sinfo -h -p main -o '%D %t'"
        assert subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True).stdout == b"8 idle\n"
        by_hand("crash", "3")
        assert not Cluster(free).processes("n3")
        by_hand("boot", "n3")
    finally:
        by_hand("down")
    assert not _processes_of(Cluster(free))
    shutil.rmtree(Cluster(free).base)
