"""scripts/plan.py --measure, and what is simulated, refused and returned from another process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.config.schema.cluster import Device, LocalClusterConfig, SlurmClusterConfig
from components.config.schema.model import Attention, DType, Float8, LossMethod
from components.config.schema.parallelism import ActivationCheckpointing
from components.planning import simulation
from components.planning.formulas.hardware import find_hardware, read_hardware
from components.planning.simulated_step import _runs_on_gpus
from components.planning.simulation import (
    SimulatedGroup,
    SimulatedRank,
    SimulatedTraffic,
    _ranks_to_simulate,
    _simulate_ranks,
    simulated_config,
)
from components.protocol.errors import ConfigError
from scripts._plan.device_file import check_file, default_name, file_text, find_known_device, write_file
from tests.distributed.simulation_cases import finetune

ROOT = Path(__file__).resolve().parents[2]
CPU: dict[str, Any] = {
    "device": "cpu", "name": "cpu", "ranks": 2, "threads": 1, "fp32_alone": 1.0e11, "fp32_shared": 0.8e11,
    "bf16_shared": 3.2e11, "attention_shared": 0.3e11, "copy_alone": 2.0e10, "copy_shared": 1.5e10,
    "operator_shared": 3.0e-6, "gather_bandwidth": 1.0e9, "reduce_bandwidth": 1.0e9, "latency": 1.25e-4,
}  # fmt: skip
H100: dict[str, Any] = {
    "device": "cuda", "name": "NVIDIA H100 80GB HBM3", "memory": 84_900_000_000, "ranks": 4, "threads": 4,
    "fp32_shared": 50.0e12, "bf16_shared": 700.0e12, "fp8_shared": 1200.0e12, "attention_shared": 350.0e12,
    "copy_shared": 2.8e12, "operator_shared": 4.0e-6, "host_copy_shared": 5.3e10, "gather_bandwidth": 3.6e11,
    "reduce_bandwidth": 3.6e11, "latency": 7.0e-6,
}  # fmt: skip


def write(figures: dict[str, Any], file: Path) -> str:
    text = file_text(figures, find_known_device(figures))
    write_file(file, text, force=False)
    assert all(line.split("# ", 1)[1].strip() for line in text.splitlines())
    return text


def test_the_file_of_a_cpu_gives_the_planner_the_measured_rates(tmp_path: Path) -> None:
    text = write(CPU, tmp_path / "cpu_mine.yaml")
    hardware = read_hardware(tmp_path / "cpu_mine.yaml")

    assert not hardware.is_gpu
    assert hardware.matmul_flops(4) == pytest.approx(0.8e11, rel=1e-3)
    assert hardware.matmul_flops(2) == pytest.approx(3.2e11, rel=1e-3)
    assert hardware.matmul_share == pytest.approx(0.8)
    assert hardware.copy_bandwidth == pytest.approx(1.5e10)
    assert hardware.attention_share * hardware.fp32_flops == pytest.approx(0.3e11)
    assert hardware.node_bandwidth * hardware.node_share == pytest.approx(1.0e9)
    assert (hardware.node_latency, hardware.launch_seconds) == (1.25e-4, 3.0e-6)
    assert "not measured, copied from conf/gpu/cpu.yaml" in text.split("network_bandwidth:")[1].splitlines()[0]


def test_the_file_of_a_known_gpu_has_shares_of_its_data_sheet(tmp_path: Path) -> None:
    write(H100, tmp_path / "h100_mine.yaml")
    hardware = read_hardware(tmp_path / "h100_mine.yaml")
    sheet = find_hardware("h100_80")

    assert (hardware.bf16_flops, hardware.fp8_flops) == (pytest.approx(989.4e12), pytest.approx(1979e12, rel=1e-3))
    assert hardware.network_bandwidth == sheet.network_bandwidth
    assert hardware.matmul_flops(2) == pytest.approx(700e12, rel=1e-3)
    assert hardware.matmul_flops(1) == pytest.approx(1200e12, rel=1e-3)
    assert hardware.matmul_flops(4) == pytest.approx(50e12, rel=1e-3)
    assert hardware.copy_bandwidth == pytest.approx(2.8e12, rel=1e-3)
    assert hardware.node_share == pytest.approx(0.8)
    assert hardware.gpus_per_node == 4


def test_an_unknown_single_gpu_has_measured_peaks_and_marked_guesses(tmp_path: Path) -> None:
    figures = {name: value for name, value in H100.items() if name not in ("latency", "fp8_shared")}
    text = write(figures | {"name": "NVIDIA Quadro X1", "ranks": 1}, tmp_path / "x1.yaml")
    hardware = read_hardware(tmp_path / "x1.yaml")

    assert (hardware.bf16_flops, hardware.matmul_share, hardware.fp8_flops) == (700e12, 1.0, None)
    assert text.count("# guess") == 9


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("", "cpu_measured"), ("NVIDIA H100 80GB HBM3", "h100_measured"), ("NVIDIA A100-SXM4-40GB", "a100_measured"),
     ("NVIDIA GeForce RTX 4090", "rtx_4090_measured")],
)  # fmt: skip
def test_default_names(gpu: str, name: str) -> None:
    assert default_name(gpu) == name


def test_the_memory_selects_among_files_of_one_gpu() -> None:
    known = find_known_device({"device": "cuda", "name": "NVIDIA A100-SXM4-40GB", "memory": 42_000_000_000})
    assert known is not None
    assert known.hardware.name == "a100_40"


@pytest.mark.parametrize(
    ("name", "on_gpu", "rule"),
    [("../x", False, "lower-case letters"), ("mine", False, "must begin with cpu"), ("cpu_x", True, "must not begin"),
     ("cpu", False, "is a file of the project")],
)  # fmt: skip
def test_a_name_that_is_not_allowed_is_rejected(tmp_path: Path, name: str, on_gpu: bool, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        check_file(name, tmp_path, on_gpu=on_gpu, force=True)


def test_a_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    file = tmp_path / "new" / "cpu_x.yaml"
    write_file(file, "a", force=False)
    with pytest.raises(ConfigError, match="--force"):
        check_file("cpu_x", file.parent, on_gpu=False, force=False)
    with pytest.raises(ConfigError, match="--force"):  # created while the device was measured
        write_file(file, "b", force=False)
    assert file.read_text() == "a"
    write_file(file, "b", force=True)
    assert file.read_text() == "b"
    assert [each.name for each in file.parent.iterdir()] == ["cpu_x.yaml"]


@pytest.mark.parametrize(
    "options", [("--force",), ("--measure", "--json"), ("--measure", "Bad name"), ("--measure", "cpu_x", "model=tiny")]
)
def test_wrong_options_exit_with_2(options: tuple[str, ...]) -> None:
    command = [sys.executable, "scripts/plan.py", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_two_processes_measure_this_cpu(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "_plan" / "measure.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, script, "2", "--tiny"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=160)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert (figures["device"], figures["ranks"]) == ("cpu", 2)
    write(figures, tmp_path / "cpu_tiny.yaml")
    hardware = read_hardware(tmp_path / "cpu_tiny.yaml")
    assert 1e8 < hardware.matmul_flops(4) < 1e13
    assert 1e-7 < hardware.launch_seconds < 1e-2
    assert 1e-6 < hardware.node_latency < 10


RESULT = SimulatedRank(
    rank=1, world=4, mesh="dp_shard=4", coordinates="dp_shard 1", parameters=10, gradients=10, optimizer=20, average=0,
    frozen=0, buffers=1, saved=5, peak=50, peak_operator="aten::mm", peak_phase="backward",
    groups=(SimulatedGroup("dp_shard = world", 4),), traffic=(SimulatedTraffic("dp_shard", "all_gather", 3, 12),),
    micro_batches=2, micro_batch_rows=1, cpu_seconds=1.5, resident_bytes=7, notes=("balanced",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "world", "expected"),
    [
        ({"strategy": "single"}, 1, [0]),
        ({"dp_shard": 8, "tp": 4}, 32, [0, 31]),
        ({"pp": 2, "tp": 2}, 4, [0, 2, 3]),
        ({"pp": 4, "dp_shard": 4}, 16, [0, 8, 12, 15]),
    ],
)
def test_one_rank_of_each_kind_of_stage_is_played(axes: dict[str, Any], world: int, expected: list[int]) -> None:
    assert _ranks_to_simulate(finetune(world=world, **axes), world) == expected


def test_result_survives_json() -> None:
    assert SimulatedRank.from_json(json.loads(json.dumps(RESULT.as_json()))) == RESULT


@pytest.mark.parametrize(
    ("model", "axes", "message"),
    [
        ({}, {"activation_checkpointing": "auto"}, "parallelism.activation_checkpointing=auto: "),
        ({"attention": Attention.flash_attention_2}, {}, "model.attention=flash_attention_2: "),
        ({"float8": Float8.rowwise}, {}, "model.float8=rowwise: "),
    ],
)
def test_config_that_cannot_be_played_is_refused(model: dict[str, Any], axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        simulated_config(finetune(world=2, dp_shard=2, model_values=model, **axes), 2, on_gpu=True)


def test_played_config_states_what_it_changes() -> None:
    values = {"compile": "true", "loss": LossMethod.liger, "compute_dtype": DType.auto}
    cfg = finetune(world=2, dp_shard=2, rows=4, model_values=values)
    cfg.training.micro_batch_size = 3  # 4 rows of a rank are no multiple of it
    cfg.training.batch_size_ramp = [{"until_step": 2, "global_batch_size": 4}]
    simulated, notes = simulated_config(cfg, 2, on_gpu=True)
    assert simulated.training.micro_batch_size in (1, 2)
    assert simulated.training.batch_size_ramp == []
    assert (simulated.model.compile, simulated.model.loss) == ("false", LossMethod.chunked)
    assert simulated.model.compute_dtype == DType.bfloat16
    for key in ("model.compile=true", "model.loss=liger", "model.compute_dtype=auto"):
        assert any(note.startswith(key) for note in notes), key
    assert simulated_config(cfg, 2, on_gpu=False)[0].model.compute_dtype == DType.auto
    for policy in set(ActivationCheckpointing) - {ActivationCheckpointing.auto}:
        cfg = finetune(world=1, strategy="single", activation_checkpointing=policy)
        assert simulated_config(cfg, 1, on_gpu=False)[0].parallelism.activation_checkpointing == policy


def test_ranks_of_batch_jobs_run_on_gpus_unless_told_otherwise() -> None:
    cfg = finetune(world=1, strategy="single")
    assert not _runs_on_gpus(replace(cfg, cluster=LocalClusterConfig(device=Device.cpu)))
    assert _runs_on_gpus(replace(cfg, cluster=LocalClusterConfig(device=Device.cuda)))
    assert _runs_on_gpus(replace(cfg, cluster=SlurmClusterConfig(procs_per_node="8")))
    assert not _runs_on_gpus(replace(cfg, cluster=SlurmClusterConfig(procs_per_node="8", device=Device.cpu)))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ('print(\'{"problems": ["model.path=x: is wrong; set another"]}\')', "model.path=x: "),
        ("import sys; sys.exit('no torch here')", "simulation of rank 3 of 4: exited with status 1: no torch here"),
        ("import time; time.sleep(60)", "simulation of rank 3 of 4: was stopped after 0.5 seconds"),
    ],
)
def test_failure_of_a_child_is_a_config_error(monkeypatch: pytest.MonkeyPatch, program: str, message: str) -> None:
    run = simulation.subprocess.run
    child = lambda command, **options: run([command[0], "-c", program], **options)  # noqa: E731
    monkeypatch.setattr(simulation.subprocess, "run", child)
    timeout = 0.5 if "sleep" in program else 60
    with pytest.raises(ConfigError, match=re.escape(message)):
        _simulate_ranks(finetune(world=4, dp_shard=4), 4, [3], timeout)
