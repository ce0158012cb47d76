"""Which ranks are simulated, what a simulation changes in a config and refuses, and its result in another process."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from components.config.schema.cluster import Device, LocalClusterConfig, SlurmClusterConfig
from components.config.schema.model import Attention, DType, Float8, LossMethod
from components.config.schema.parallelism import ActivationCheckpointing
from components.planning import simulation
from components.planning.simulated_step import _runs_on_gpus
from components.planning.simulation import (
    SimulatedGroup,
    SimulatedRank,
    SimulatedTraffic,
    ranks_to_simulate,
    simulate_ranks,
    simulated_config,
)
from components.protocol.errors import ConfigError
from tests.distributed.simulation_cases import finetune

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
    assert ranks_to_simulate(finetune(world=world, **axes), world) == expected


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
        simulate_ranks(finetune(world=4, dp_shard=4), 4, [3], timeout)
