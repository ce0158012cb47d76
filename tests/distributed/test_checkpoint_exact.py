"""A resumed run equals the uninterrupted run bit for bit, on every kind of mesh, with dropout.

With `make torture` each of the meshes is resumed after each of twenty steps. (Batches are collated in the training
process, so there is no number of data workers to vary.)
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from components import distributed
from components.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from components.checkpoint.save import random_state
from components.config.schema.run import CheckpointConfig
from tests.distributed.tiny_runs import TinyRun, build, cell_named, start
from tests.harness import run_ranks
from tests.suites import TORTURE

pytestmark = pytest.mark.timeout(3600)
RESUMES, AFTER = (20, 20) if TORTURE else (1, 4)
"""Number of resumes on each mesh, and of steps that are compared after each."""
DROPOUT = 0.1
DEFAULT_CASES = {
    2: [("gpt2", "dp_shard2"), ("qwen3_moe", "ep2"), ("llama", "pp2")],
    4: [("llama", "dp_shard2_tp2")],
}
ALL_CASES = {
    1: [("llama", "fsdp2")],
    2: [*DEFAULT_CASES[2], ("llama", "ddp2"), ("llama", "cp2"), ("phi3", "tp2")],
    4: [*DEFAULT_CASES[4], ("qwen3_moe", "dp_shard2_ep2"), ("llama", "dp_replicate2_dp_shard2")],
}
"""World size -> models and meshes."""
CASES = [(world, *each) for world, cases in (ALL_CASES if TORTURE else DEFAULT_CASES).items() for each in cases]


def build_with_dropout(model: str) -> torch.nn.Module:
    built = build(model)
    for module in built.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = DROPOUT
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = DROPOUT
    return built


def bits(run: TinyRun) -> str:
    """Hash of this rank's state: parameters, optimizer, counters, data cursor, RNG states."""
    digest = hashlib.sha256(json.dumps([run.extra(), random_state()]).encode())
    for name, parameter in run.model.named_parameters():
        for key, value in [("value", parameter), *sorted(run.optimizer.state[parameter].items())]:
            local = value.to_local() if isinstance(value, DTensor) else value
            digest.update(f"{name} {key} {local.dtype} {tuple(local.shape)}".encode())
            digest.update(local.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(("world", "model", "mesh"), CASES)
def test_resumed_run_equals_the_uninterrupted_run_bitwise(world: int, model: str, mesh: str, tmp_path: Path) -> None:
    cell, built = cell_named(model, mesh, world), build_with_dropout(model)

    def uninterrupted(rank: int) -> list[Any]:
        """Return losses, samples and the state hash after each step; save after the first RESUMES steps."""
        run = start(cell, built)
        results: list[Any] = []
        for step in range(1, RESUMES + AFTER + 1):
            results.append((run.train(1), bits(run)))
            if step <= RESUMES:
                folder = tmp_path / str(step)
                save_checkpoint(folder, step, run.model, run.optimizer, run.extra(), CheckpointConfig(keep=1))
        return results

    def resumed(rank: int, step: int) -> list[Any]:
        run = start(cell, built)
        distributed.seed_ranks(99, run.mesh)
        run.train(1)  # different RNG states, weights and data position
        found = find_checkpoint(tmp_path / str(step), "auto")
        assert found is not None
        run.take(load_checkpoint(found, run.model, run.optimizer))
        return [bits(run), *((run.train(1), bits(run)) for _ in range(AFTER))]

    expected = run_ranks(world, uninterrupted, timeout=600)
    assert len({digest for of_rank in expected for _, digest in of_rank}) == world * (RESUMES + AFTER)
    results = run_ranks(world, lambda rank: [resumed(rank, step) for step in range(1, RESUMES + 1)], timeout=1800)
    for rank, of_rank in enumerate(results):
        for step, (loaded, *after) in enumerate(of_rank, start=1):
            assert loaded == expected[rank][step - 1][1], f"rank {rank} after step {step}"
            assert after == expected[rank][step : step + AFTER], f"rank {rank} after step {step}"
