"""Number of processes of a run, determined without initializing CUDA, and variables that they get by default."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from components.config.rules import legal_node_counts
from components.config.schema import (
    Device,
    FinetuneConfig,
    LocalClusterConfig,
    ModelConfig,
    ParallelismConfig,
    SlurmClusterConfig,
    WeightInit,
)
from components.config.schema.data import DocsDataConfig
from components.launch.local import allocator_defaults
from components.launch.machine import device_problems, processes_of, usable_cores, visible_gpus
from components.launch.run_checks import problems_before_start
from tests.config.composed import config_of


def config(procs: str = "auto", device: Device = Device.auto, **degrees: int) -> FinetuneConfig:
    return FinetuneConfig(
        cluster=LocalClusterConfig(procs_per_node=procs, device=device),
        parallelism=ParallelismConfig(**degrees),
        model=ModelConfig(init=WeightInit.random, config={"model_type": "llama"}, tokenizer="bytes"),
        data=DocsDataConfig(),
    )


def job(nodes: str, procs: str) -> FinetuneConfig:
    cfg = config()
    cfg.cluster = SlurmClusterConfig(nodes=nodes, procs_per_node=procs)
    return cfg


@pytest.mark.parametrize(
    ("cfg", "gpus", "processes"),
    [
        pytest.param(config(), 0, 1, id="no GPU: -1 counts as 1"),
        pytest.param(config(tp=2), 0, 2, id="product of the explicit degrees"),
        pytest.param(config(dp_replicate=2, dp_shard=3, tp=2), 0, 12, id="product over all axes"),
        pytest.param(config(), 8, 8, id="one per GPU"),
        pytest.param(config(tp=2), 8, 8, id="GPUs decide, not the degrees"),
        pytest.param(config(device=Device.cpu, tp=2), 8, 2, id="unused GPUs"),
        pytest.param(config("3", tp=2), 8, 3, id="explicit count"),
        pytest.param(job(nodes="3", procs="8"), 2, 24, id="GPUs of the login node do not count"),
        pytest.param(job(nodes="4-6", procs="8"), 0, 48, id="the largest number of nodes"),
    ],
)
def test_process_count_follows_gpus_degrees_and_explicit_counts(cfg: FinetuneConfig, gpus: int, processes: int) -> None:
    assert processes_of(cfg, gpus) == processes


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        *(("0", 1), ("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,1", 1), ("NoDevFiles", 0), (" 3, 5", 2), ("0,1,x,3", 2)),
        *(("0,1,0", 0), ("GPU-1a,GPU-2b", 2), ("GPU-1a,GPU-1a", 0), ("GPU-1a,2", 1), ("0,GPU-1a", 1), ("MIG-x", 1)),
        *(("MIG-GPU-1a/1/0,MIG-GPU-1a/2/0", 2), ("MIG-x,GPU-1a", 1), ("gpu0", 0), ("(null)", 0), ("0,", 1)),
    ],
)
def test_cuda_visible_devices_sets_the_gpu_count(
    tmp_path: Path, value: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch reads the variable, which does as CUDA does."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, tmp_path) == gpus
    if value.strip() == value:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert len(torch.cuda._parse_visible_devices()) == gpus


def test_ranks_on_several_mig_devices_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert device_problems(config("1"), 1, gpus=2) == []
    (problem,) = device_problems(config("2"), 2, gpus=2)
    assert problem.startswith("CUDA_VISIBLE_DEVICES=MIG-a,MIG-b: 2 processes on MIG devices")


def test_gpus_are_counted_by_device_files_without_cuda_visible_devices(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert visible_gpus({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, tmp_path) == 2


def test_gpus_are_counted_by_the_driver_list_without_device_files(tmp_path: Path) -> None:
    for bus in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
    assert visible_gpus({}, tmp_path) == 3


def test_each_process_requires_its_own_gpu() -> None:
    assert device_problems(config("2"), 2, gpus=2) == []
    assert device_problems(config("2"), 2, gpus=0) == []
    assert device_problems(config("2", Device.cpu), 2, gpus=1) == []
    assert "2 processes, but 1 visible GPUs" in device_problems(config("2"), 2, gpus=1)[0]
    assert "no GPU is visible" in device_problems(config(device=Device.cuda), 1, gpus=0)[0]


def test_cpu_processes_are_limited_to_four_per_core_and_by_memory() -> None:
    cores = usable_cores()
    assert device_problems(config(str(4 * cores)), 4 * cores, gpus=0, memory=2**50) == []
    (many,) = device_problems(config("99"), 4 * cores + 1, gpus=0, memory=2**50)
    assert many.startswith(
        f"cluster.procs_per_node=99: {4 * cores + 1} processes on this machine; the limit is 4 per core"
    )
    assert many.endswith("set cluster.oversubscribe=true")
    (degree,) = device_problems(config(tp=2, cp=9999), 19998, gpus=0)
    assert degree.startswith("parallelism.cp=9999: 19998 processes on this machine")
    assert device_problems(config("2"), 2, gpus=0, memory=2**29) == []
    (large,) = device_problems(config("3"), 3, gpus=0, memory=2**29)
    assert "they need 0.8 GiB before loading a model, but only 0.5 GiB are usable" in large
    for few_gpus in (0, 8):
        cfg = config("9999", Device.cpu)
        assert len(device_problems(cfg, 9999, gpus=few_gpus, memory=2**50)) == 1
        cfg.cluster.oversubscribe = True
        assert device_problems(cfg, 9999, gpus=few_gpus, memory=2**20) == []
    shared = config("2")
    shared.cluster.oversubscribe = True
    assert "2 processes, but 1 visible GPUs" in device_problems(shared, 2, gpus=1)[0]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_allocator_grows_segments_unless_the_user_decides(environ: dict[str, str], expected: str) -> None:
    assert allocator_defaults(environ) == {"PYTORCH_ALLOC_CONF": expected}


def test_node_counts_are_those_of_the_config_that_the_ranks_read() -> None:
    """On five nodes a micro-batch of 5 is reduced to 3, of which one node has no legal number."""
    cfg = config_of(
        *("finetune", "model=llama_2m", "parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B"),
        *("cluster=slurm", "cluster.nodes=1-5", "cluster.procs_per_node=2", "cluster.device=cpu"),
        *("training.global_batch_size=15", "training.micro_batch_size=5"),
    )
    requested, _ = legal_node_counts(cfg, [])
    counts: list[int] = []
    (problem,) = problems_before_start(cfg, 10, node_counts=counts)
    assert (requested, counts) == ([1, 3, 5], [5])
    assert problem.startswith("cluster.nodes=1-5: on 1 nodes: training.global_batch_size=15: leaves 15 micro-batches")
