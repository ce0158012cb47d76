"""Save on one mesh, go on on any other: the same bits, the same samples, the same curve.

Every ordered pair of the meshes below: of a dense model, of one with fused projections, and of a mixture of experts.
Their vocabulary of 97 and their heads divide by little, so that uneven shards are met. A few pairs here, all of them
with `make torture`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from components.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from components.config.schema.checkpoint import CheckpointConfig
from tests.distributed.tiny_runs import build, cell_named, global_order, start, whole
from tests.harness import run_ranks

TORTURE = os.environ.get("MESHBOOK_TORTURE") == "1"
pytestmark = pytest.mark.timeout(3600)
BEFORE, AFTER = 3, 5
"""Steps before the save, and after it."""

SOME = {
    "llama": {2: ["pp2 ZBVZeroBubble"], 4: ["dp_shard2_tp2"]},
    "phi3": {1: ["fsdp2"], 4: ["dp_shard2_tp2"]},
    "qwen3_moe": {2: ["dp_shard2"], 4: ["pp2_ep2"]},
}
ALL = {
    "qwen3_moe": {
        1: ["fsdp2"],
        2: ["ep2", "dp_shard2", "tp2"],
        4: ["ep4", "dp_shard2_ep2", "dp_replicate2_ep2", "ep2_cp2", "ep2_tp2", "pp2_ep2"],
        8: ["ep8", "pp2_ep2_tp2"],
    },
    "llama": {
        1: ["fsdp2"],
        2: ["dp_shard2", "ddp2", "cp2", "pp2 ZBVZeroBubble"],
        3: ["tp3"],
        4: ["dp_replicate2_dp_shard2", "pp4"],
        6: ["pp2_tp3_sp"],
    },
    "phi3": {1: ["fsdp2"], 2: ["tp2", "pp2"], 4: ["dp_shard2_tp2", "dp_shard4"], 8: ["pp2_dp_shard2_tp2_sp"]},
}
"""Model -> number of processes -> meshes."""


@pytest.mark.parametrize("model", ALL if TORTURE else ["llama", "qwen3_moe"])
def test_every_mesh_goes_on_from_every_mesh(model: str, tmp_path: Path) -> None:
    meshes = (ALL if TORTURE else SOME)[model]
    pairs = every_pair(model, meshes, tmp_path)
    assert pairs == sum(map(len, meshes.values())) ** 2


def every_pair(model: str, meshes: dict[int, list[str]], folder: Path) -> int:
    """Save on each mesh, go on on each; return the number of pairs."""
    built = build(model)
    other = build(model)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)  # all of which must be replaced

    def write(rank: int, name: str) -> None:
        run = start(cell_named(model, name, world), built)
        run.train(BEFORE)
        save_checkpoint(folder / name, BEFORE, run.model, run.optimizer, run.extra(), CheckpointConfig(keep=1))
        tensors = whole(run)
        losses, read = run.train(AFTER)
        order = global_order(run, read)
        if rank == 0:
            torch.save(tensors, folder / f"{name}.pt")
            (folder / f"{name}.json").write_text(json.dumps({"losses": losses, "order": order}))

    def go_on(rank: int, name: str, written: list[str]) -> int:
        run = start(cell_named(model, name, world), other)
        run.train(1)
        for saved in written:
            check(run, saved, f"{model}: {saved} -> {name}")
        return len(written)

    def check(run: Any, saved: str, what: str) -> None:
        found = find_checkpoint(folder / saved, "auto")
        assert found is not None
        run.take(load_checkpoint(found, run.model, run.optimizer))
        expected, tensors = torch.load(folder / f"{saved}.pt"), whole(run)
        assert tensors.keys() == expected.keys(), what
        different = [key for key, value in expected.items() if not torch.equal(tensors[key], value)]
        assert not different, (what, different)
        assert any(key.endswith("exp_avg_sq") for key in tensors)
        losses, read = run.train(AFTER)
        undisturbed = json.loads((folder / f"{saved}.json").read_text())
        assert global_order(run, read) == undisturbed["order"], what
        assert losses == pytest.approx(undisturbed["losses"], rel=1e-5, abs=0), what

    names = [name for of_world in meshes.values() for name in of_world]
    for world, of_world in meshes.items():  # the processes are forked in the loop, and see its variables
        run_ranks(world, lambda rank, these: [write(rank, name) for name in these], of_world, timeout=300)
    done = 0
    for world, of_world in meshes.items():
        told = run_ranks(world, lambda rank, these: [go_on(rank, name, names) for name in these], of_world, timeout=900)
        done += sum(told[0])
    return done
