"""Dry runs against real gloo ranks: bytes of parameters, gradients and optimizer state, peak of a step, traffic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.config.schema.model import Attention, DType, LossMethod
from components.config.schema.optimizer import LionConfig, MuonConfig, SGDConfig
from components.config.schema.recipes import FinetuneConfig, TrainConfig
from components.planning.formulas.memory import estimate_memory
from components.planning.formulas.workload import build_workload
from components.planning.simulation import SimulatedRank, _ranks_to_simulate, _simulate_ranks
from components.protocol.errors import ConfigError
from tests.distributed.simulation_cases import (
    Measured,
    classify,
    distill,
    dpo,
    finetune,
    measure_ranks,
    save_teacher,
    simulate_each,
)
from tests.optional import SHARDS_BYTES, runnable
from tests.suites import in_parity

MIB = 2**20
TOLERANCE = 0.03
"""Largest relative difference of a figure of a simulation."""
FORMULA_TOLERANCE = 0.08
"""Largest relative difference of the peak of the fullest rank by closed formulas."""
Make = Callable[[int], TrainConfig]
SCHEDULES = runnable(["GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])


def _llama(world: int, **values: Any) -> tuple[int, Make]:
    return world, lambda world: finetune(world=world, **values)


def _moe(world: int, **values: Any) -> tuple[int, Make]:
    return world, lambda world: finetune("MoE", world=world, **values)


BFLOAT16 = {"compute_dtype": DType.bfloat16}
EAGER = {"attention": Attention.eager}
CASES: dict[str, tuple[int, Make]] = {
    "Llama single": _llama(1, strategy="single"),
    "Llama single, bfloat16": _llama(1, strategy="single", model_values=BFLOAT16),
    "Llama ddp 2": _llama(2, strategy="ddp", dp_replicate=2),
    "Llama dp_shard 2": _llama(2, dp_shard=2),
    "Llama dp_shard 2, bfloat16": _llama(2, dp_shard=2, model_values=BFLOAT16),
    "Llama single, eager attention": _llama(1, strategy="single", seq_len=1024, rows=1, model_values=EAGER),
    "Llama dp_shard 4": _llama(4, dp_shard=4),
    "Llama dp_replicate 2 x dp_shard 2": _llama(4, dp_replicate=2, dp_shard=2),
    "Llama dp_shard 2, not resharded": _llama(2, dp_shard=2, reshard_after_forward=False),
    "Llama dp_shard 2, full recompute": _llama(2, dp_shard=2, activation_checkpointing="full"),
    "Llama single, selective recompute": _llama(1, strategy="single", activation_checkpointing="selective"),
    "Llama single, chunked loss": _llama(1, strategy="single", model_values={"loss": LossMethod.chunked}),
    "Llama dp_shard 2 x tp 2, chunked loss": _llama(4, dp_shard=2, tp=2, model_values={"loss": LossMethod.chunked}),
    "Llama single, packed": _llama(1, strategy="single", pack=True),
    "Llama tp 2": _llama(2, tp=2),
    "Llama tp 4": _llama(4, tp=4),
    "Llama tp 2, sequence parallel": _llama(2, tp=2, sequence_parallel=True),
    "Llama cp 2, ulysses": _llama(2, cp=2, cp_attention="ulysses", seq_len=1024, rows=1),
    "Llama cp 2, all_gather": _llama(2, cp=2, cp_attention="all_gather", seq_len=1024, rows=1),
    "Llama pp 2, 1F1B": _llama(2, pp=2),
    **{f"Llama pp 2, {each}": _llama(2, pp=2, pp_schedule=each) for each in SCHEDULES},
    "Llama pp 4, 1F1B": _llama(4, pp=4),
    "Llama pp 2 x dp_shard 2": _llama(4, pp=2, dp_shard=2),
    "Llama pp 2 x tp 2": _llama(4, pp=2, tp=2),
    "MoE single": _moe(1, strategy="single"),
    "MoE dp_shard 2": _moe(2, dp_shard=2),
    "MoE tp 2": _moe(2, tp=2),
    "MoE ep 2": _moe(2, ep=2),
    "MoE ep 2 x dp_shard 2": _moe(4, ep=2, dp_shard=2),
    "MoE pp 2": _moe(2, pp=2),
    "LoRA single": _llama(1, strategy="single", peft="lora"),
    "LoRA dp_shard 2": _llama(2, dp_shard=2, peft="lora"),
    "LoRA tp 2": _llama(2, tp=2, peft="lora"),
    "LoRA pp 2": _llama(2, pp=2, peft="lora"),
    "DoRA dp_shard 2": _llama(2, dp_shard=2, peft="dora"),
    "QLoRA single": _llama(1, strategy="single", peft="qlora", model_values=BFLOAT16),
    "QLoRA dp_shard 2": _llama(2, dp_shard=2, peft="qlora", model_values=BFLOAT16),
    "SGD dp_shard 2": _llama(2, dp_shard=2, optimizer=SGDConfig()),
    "Lion dp_shard 2": _llama(2, dp_shard=2, optimizer=LionConfig()),
    "Muon dp_shard 2": _llama(2, dp_shard=2, optimizer=MuonConfig()),
    "EMA dp_shard 2": _llama(2, dp_shard=2, training={"ema_decay": 0.9}),
    "DPO dp_shard 2, precomputed": (2, lambda world: dpo(world=world, reference="precomputed", dp_shard=2)),
    "DPO dp_shard 2, frozen copy": (2, lambda world: dpo(world=world, reference="frozen_copy", dp_shard=2)),
    "DPO single, adapters off": (
        1,
        lambda world: dpo(world=world, reference="adapters_off", method="lora", strategy="single"),
    ),
    "classifier dp_shard 2": (2, lambda world: classify(world=world, dp_shard=2)),
    "reward model single": (1, lambda world: classify(world=world, reward=True, strategy="single")),
}
"""Name -> number of ranks, and the config of a run.

Without parallelism.defer_grad_sync=false: its many reductions leave the profiler's sum too far off (343 to 378 MiB in
equal steps of a rank whose simulation has 331).
"""


@in_parity
@pytest.mark.parametrize("name", [each for each in CASES if SHARDS_BYTES or each != "QLoRA dp_shard 2"])
def test_dry_run_agrees_with_real_ranks_on_memory_and_traffic(name: str) -> None:
    world, config = CASES[name]
    _compare(name, config(world), world)


@in_parity
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_dry_run_counts_the_teacher(tmp_path: Path, axes: dict[str, int]) -> None:
    cfg = distill(world=2, teacher=save_teacher(tmp_path), **axes)
    simulated = _compare(f"distillation {axes}", cfg, 2)
    assert simulated.frozen > 10 * MIB


def _compare(name: str, cfg: TrainConfig, world: int) -> SimulatedRank:
    """Compare the ranks that differ with their simulations; return that of rank 0."""
    ranks = _ranks_to_simulate(cfg, world) if cfg.parallelism.pp > 1 else [0]  # without stages, all ranks hold as much
    real, runs = measure_ranks(cfg, world), simulate_each(cfg, world, ranks)
    for rank, simulated in zip(ranks, runs, strict=True):
        print(f"\n| {name} | {rank} | {_cells(simulated, real[rank])} |")
        for figure in ("parameters", "gradients", "optimizer"):
            assert getattr(simulated, figure) == pytest.approx(getattr(real[rank], figure), rel=TOLERANCE), figure
        routes = "num_experts" in cfg.model.config and max(cfg.parallelism.ep, cfg.parallelism.tp) > 1
        if not routes:  # routing, which decides the bytes sent to other ranks' experts, is not known before
            traffic = {(each.group, each.operation): (each.calls, each.bytes) for each in simulated.traffic}
            assert traffic == real[rank].traffic
        # A buffer that gloo has not freed yet may be part of a step's peak or not.
        assert any(simulated.peak == pytest.approx(peak, rel=TOLERANCE) for peak in real[rank].peaks), real[rank].peaks
    if isinstance(cfg, FinetuneConfig):
        formula = estimate_memory(build_workload(cfg, cfg.parallelism.resolve(world), on_gpu=False), "cpu").peak
        fullest = max(max(real[rank].peaks) for rank in ranks)
        assert formula == pytest.approx(fullest, rel=FORMULA_TOLERANCE)
    return runs[0]


def _cells(simulated: SimulatedRank, real: Measured) -> str:
    """Return the cells of a table row: MiB of the simulation and of the real rank, and the difference of the peaks."""
    figures = [
        (getattr(simulated, name), getattr(real, name)) for name in ("parameters", "gradients", "optimizer", "saved")
    ]
    nearest = min(real.peaks, key=lambda peak: abs(peak - simulated.peak))
    pairs = [*figures, (simulated.peak, nearest)]
    text = " | ".join(f"{ours / MIB:.1f} / {theirs / MIB:.1f}" for ours, theirs in pairs)
    return f"{text} | {100 * (simulated.peak / nearest - 1):+.2f} %"


@in_parity
def test_children_play_ranks_of_a_world_that_this_machine_could_not_start() -> None:
    cfg = finetune(world=64, pp=4, dp_shard=8, tp=2)
    first, last = _simulate_ranks(cfg, 64, [0, 63])
    assert (first.world, first.rank, last.rank) == (64, 0, 63)
    assert {each.axes: each.size for each in first.groups} == {"pp": 4, "dp_shard": 8, "tp": 2, "world": 64}
    embedding = 4 * 4096 * 512 // 16  # float32, sharded over dp_shard and tp
    assert first.optimizer - last.optimizer == pytest.approx(2 * embedding, rel=0.01)  # of the tied head there is none
    assert first.peak > first.parameters + first.optimizer + first.saved
    assert {each.operation for each in first.traffic if each.group == "pp"} >= {"send", "recv"}
    assert first.resident_bytes < 2 * 2**30  # most of it is the code of the imported libraries, up to 1.1 GiB


def test_child_reports_the_config_errors_of_a_run() -> None:
    cfg = finetune(world=16, pp=16, rows=16)
    with pytest.raises(ConfigError, match=r"parallelism\.pp=16"):
        _simulate_ranks(cfg, 16, [0])
