"""The cluster of these tests is real: eight nodes that run jobs, fail, come back and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm import processes
from tests.slurm.cluster import Cluster, ClusterError, ClusterInUse, until
from tests.slurm.configuration import GPUS, NODES


def test_a_job_spans_eight_nodes_that_know_each_other(cluster: Cluster) -> None:
    ask = 'echo $(hostname) $SLURM_PROCID $CUDA_VISIBLE_DEVICES $(getent ahostsv4 n8 | head -n1 | cut -d" " -f1)'
    said = cluster.run("srun", "--nodes=8", f"--gpus-per-node={GPUS}", "sh", "-c", ask).stdout
    gpus = ",".join(map(str, range(GPUS)))
    assert sorted(said.split("\n")[:-1]) == [f"{n} {rank} {gpus} {cluster.subnet}.8" for rank, n in enumerate(NODES)]


def test_more_than_the_cluster_has_is_refused(cluster: Cluster) -> None:
    for wrong, why in {
        "--nodes=9": "Node count specification invalid",
        "--gpus-per-node=9": "Requested node configuration is not available",
        "--partition=low": "Invalid partition name specified",
    }.items():
        done = cluster.run("srun", "--immediate=1", wrong, "true", check=False)
        assert done.returncode
        assert why in done.stderr


def test_a_batch_job_by_its_states(fresh_cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "job with=.sh"
    script.write_text("#!/bin/sh\nsleep 300 & wait\n")
    submitted = fresh_cluster.run("sbatch", "--parsable", "--chdir", str(tmp_path), "-w", "n2", str(script), "Big=1 x")
    job = fresh_cluster.wait_for(submitted.stdout.strip(), "RUNNING", seconds=10)
    assert job["NodeList"] == "n2"
    assert job["WorkDir"] == str(tmp_path)
    assert job["Restarts"] == "0"
    until(lambda: len(fresh_cluster.processes("n2")) >= 3, 5, lambda: "stepd, shell and sleep never ran")
    assert not fresh_cluster.processes("n1")
    with pytest.raises(ClusterError, match="is not .'COMPLETED'. after 0"):
        fresh_cluster.wait_for(job["JobId"], "COMPLETED", seconds=0)
    fresh_cluster.cancel(job["JobId"])
    with pytest.raises(ClusterError, match="did not get"):
        fresh_cluster.wait_for(job["JobId"], "COMPLETED", seconds=10)
    until(lambda: not fresh_cluster.processes("n2"), 5, lambda: f"{fresh_cluster.processes('n2')} remain")


def test_a_requeued_job_starts_again(fresh_cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n[ -z $SLURM_RESTART_COUNT ] || exit 0\nexec sleep 300\n")
    job = fresh_cluster.run("sbatch", "--parsable", "--requeue", "--output=/dev/null", str(script)).stdout.strip()
    fresh_cluster.wait_for(job, "RUNNING", seconds=10)
    fresh_cluster.run("scontrol", "requeue", job)
    assert fresh_cluster.wait_for(job, "COMPLETED", seconds=30)["Restarts"] == "1"


def test_a_cut_cable_silences_a_node_until_it_is_healed(fresh_cluster: Cluster) -> None:
    reach = ["timeout", "1", "bash", "-c", f"exec 3<>/dev/tcp/{fresh_cluster.subnet}.5/6818"]
    fresh_cluster.run(*reach)
    fresh_cluster.cut("n5")
    assert fresh_cluster.run(*reach, check=False).returncode == 124  # nobody refuses: silence
    fresh_cluster.heal("n5")
    fresh_cluster.run(*reach)


def test_a_crashed_node_is_noticed_and_comes_back(fresh_cluster: Cluster) -> None:
    fresh_cluster.crash("n7")
    assert not fresh_cluster.processes("n7")
    fresh_cluster.wait_for_nodes(["idle*", "down*"], seconds=40, nodes=["n7"])
    assert set(fresh_cluster.node_states().values()) <= {"idle", "idle*", "down*"}
    fresh_cluster.boot("n7")
    fresh_cluster.wait_for_nodes("idle", seconds=10)
    assert fresh_cluster.run("srun", "-w", "n7", "hostname").stdout == "n7\n"


def test_two_clusters_coexist_and_nothing_is_left_of_one(cluster: Cluster) -> None:
    mounts = Path("/proc/mounts").read_text()
    other = Cluster.started()
    with pytest.raises(ClusterInUse):
        Cluster(other.identity).start()
    other.run("sbatch", "--output=/dev/null", "--wrap=setsid sleep 299 & wait")
    until(lambda: _naming(other) != [] and "sleep" in _commands(other), 10, lambda: "the job never ran")
    assert "sleep" not in _commands(cluster)
    other.stop()
    assert _naming(other) == []
    assert other.link not in os.listdir("/sys/class/net")
    assert Path("/proc/mounts").read_text() == mounts
    assert set(cluster.node_states().values()) == {"idle"}


def _commands(cluster: Cluster) -> list[str]:
    return [processes.all_commands()[process][0] for node in NODES for process in cluster.processes(node)]


def _naming(cluster: Cluster) -> list[str]:
    """Every process that names the cluster's files in its command or variables."""
    found = []
    for process, command in processes.all_commands().items():
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes()
        except OSError:
            continue
        if str(cluster.base).encode() in variables or str(cluster.base) in " ".join(command):
            found.append(" ".join(command))
    return found


def test_a_cluster_ends_with_the_process_that_started_it() -> None:
    code = "import os, signal; from tests.slurm.cluster import Cluster; c = Cluster.started(); print(c.identity)"
    done = subprocess.run(
        [sys.executable, "-c", code + "; os.kill(os.getpid(), signal.SIGKILL)"], stdout=subprocess.PIPE, check=False
    )
    print(done.returncode)
