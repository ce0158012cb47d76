"""Dry runs against real gloo ranks: bytes of parameters, gradients and optimizer state, peak of a step, traffic."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from components.config.schema.recipes import TrainConfig
from components.planning.dry_run.dry_run_children import ranks_to_play
from components.planning.dry_run.dry_run_result import DryRun
from tests.distributed.dry_run_cases import Measured, finetune, measure_ranks, play_ranks

EVERYTHING = os.environ.get("MESHBOOK_ALL_PARITY") == "1"
TOLERANCE = 0.03
"""Largest relative difference of a figure."""
CASES: dict[str, tuple[int, Callable[[int], TrainConfig]]] = {
    "single": (1, lambda world: finetune(world=world, strategy="single")),
    "dp_shard 2": (2, lambda world: finetune(world=world, dp_shard=2)),
    "tp 2, sequence parallel": (2, lambda world: finetune(world=world, tp=2, sequence_parallel=True)),
    "pp 2, 1F1B": (2, lambda world: finetune(world=world, pp=2)),
}
"""Name -> number of ranks, and the config of a run."""
QUICK = list(CASES)


@pytest.mark.parametrize("name", CASES if EVERYTHING else QUICK)
def test_dry_run_agrees_with_real_ranks_on_memory(name: str) -> None:
    world, config = CASES[name]
    cfg = config(world)
    real, ranks = measure_ranks(cfg, world), ranks_to_play(cfg, world)
    for rank, played in zip(ranks, play_ranks(cfg, world, ranks), strict=True):
        print(f"\n| {name} | {rank} | {_cells(played, real[rank])} |")
        for figure in ("parameters", "gradients", "optimizer"):
            assert getattr(played, figure) == pytest.approx(getattr(real[rank], figure), rel=TOLERANCE), figure
        # A buffer that gloo has not freed yet may be part of a step's peak or not.
        assert any(played.peak == pytest.approx(peak, rel=TOLERANCE) for peak in real[rank].peaks), real[rank].peaks


def _cells(played: DryRun, real: Measured) -> str:
    """Return the cells of a table row: MiB of the dry run and of the real rank, and the difference of the peaks."""
    figures = [
        (getattr(played, name), getattr(real, name)) for name in ("parameters", "gradients", "optimizer", "saved")
    ]
    nearest = min(real.peaks, key=lambda peak: abs(peak - played.peak))
    pairs = [*figures, (played.peak, nearest)]
    text = " | ".join(f"{ours / 2**20:.1f} / {theirs / 2**20:.1f}" for ours, theirs in pairs)
    return f"{text} | {100 * (played.peak / nearest - 1):+.2f} %"
