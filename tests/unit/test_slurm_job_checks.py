"""Preflight checks of a Slurm job: errors of sbatch in one sentence, and paths that nodes may not share."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest

from components.config.schema import FinetuneConfig, ModelConfig
from components.config.schema.cluster import Device, SlurmClusterConfig
from components.config.schema.data import MixtureDataConfig, SftDataConfig
from components.config.schema.schedulers import GpuRequest
from components.launch.slurm import submit
from components.launch.slurm.submit import _build_problems, _local_paths, refusal

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
    monkeypatch.setattr(submit, "torch_built_for_cpus", lambda: "2.8.0+cpu")
    problems = _build_problems(SlurmClusterConfig(procs_per_node="2", **settings))
    assert ["the job requests GPUs" in problem for problem in problems] == [True] * requests_gpus


def test_node_local_paths_are_reported_including_mixture_sources() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".jsonl") as file:
        path = SftDataConfig(path=file.name)
        for data, key in ((path, "data.path"), (MixtureDataConfig(sources={"a": path}), "data.sources.a.path")):
            (note,) = _local_paths(FinetuneConfig(model=ModelConfig(path="owner/model"), data=data))
            assert f"{key} (tmpfs)" in note
