"""Save on one mesh and resume on another: the state, the samples and the loss curve are the same.

Covers every ordered pair of the meshes below, for a dense model, one with fused projections, a mixture of experts, and
models with linear attention and Mamba-2.
The vocabulary size of 97 and the head counts are chosen so that shards are uneven. A few pairs by default, all of them
with `make torture`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors import safe_open

from components.checkpoint import find_checkpoint, load_checkpoint, load_model_weights, save_checkpoint, stored_tensors
from components.checkpoint.manifest import Manifest
from components.checkpoint.stored_tensors import find_checkpoint_tensors
from components.config.schema.run import CheckpointConfig
from tests.distributed.tiny_runs import build, cell_named, global_order, start, whole
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import TORTURE

pytestmark = pytest.mark.timeout(3600)
BEFORE, AFTER = 3, 5
"""Number of steps before and after the save."""

DEFAULT_MESHES = {
    "llama": {2: ["pp2 ZBVZeroBubble"], 4: ["dp_shard2_tp2"]},
    "phi3": {1: ["fsdp2"], 4: ["dp_shard2_tp2"]},
    "qwen3_moe": {2: ["dp_shard2"], 4: ["pp2_ep2"]},
    "qwen3_5_text": {2: ["tp2"], 4: ["dp_shard2_cp2"]},
}
ALL_MESHES = {
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
    "qwen3_5_text": {1: ["fsdp2"], 2: ["tp2", "cp2", "pp2", "ddp2"], 4: ["dp_shard2_tp2", "tp2_cp2"]},
    "nemotron_h": {1: ["fsdp2"], 2: ["tp2", "cp2", "pp2", "ep2"], 4: ["dp_shard2_tp2", "pp2_ep2"]},
    "kimi_linear": {1: ["fsdp2"], 2: ["tp2", "cp2"], 4: ["ep2_tp2"]},
}
"""Model -> world size -> meshes."""


@pytest.mark.parametrize("model", ALL_MESHES if TORTURE else ["qwen3_moe", "qwen3_5_text"])
def test_every_mesh_resumes_the_checkpoint_of_every_mesh(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "_FILE_BYTES", 20_000)  # several files per rank
    meshes = {world: runnable(names) for world, names in (ALL_MESHES if TORTURE else DEFAULT_MESHES)[model].items()}
    pairs = check_every_pair(model, meshes, tmp_path)
    assert pairs == sum(map(len, meshes.values())) ** 2


def check_every_pair(model: str, meshes: dict[int, list[str]], folder: Path) -> int:
    """Save on each mesh, resume each checkpoint on each mesh; return the number of pairs."""
    built = build(model)
    other = build(model)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)  # loading must replace all of them

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

    def resume(rank: int, name: str, sources: list[str]) -> int:
        run = start(cell_named(model, name, world), other)
        run.train(1)
        for saved in sources:
            check(run, saved, f"{model}: {saved} -> {name}")
        return len(sources)

    def check(run: Any, saved: str, case: str) -> None:
        found = find_checkpoint(folder / saved, "auto")
        assert found is not None
        run.take(load_checkpoint(found, run.model, run.optimizer))
        expected, tensors = torch.load(folder / f"{saved}.pt"), whole(run)
        assert tensors.keys() == expected.keys(), case
        different = [key for key, value in expected.items() if not torch.equal(tensors[key], value)]
        assert not different, (case, different)
        assert any(key.endswith("exp_avg_sq") for key in tensors)
        losses, read = run.train(AFTER)
        expected_run = json.loads((folder / f"{saved}.json").read_text())
        assert global_order(run, read) == expected_run["order"], case
        assert losses == pytest.approx(expected_run["losses"], rel=1e-5, abs=0), case
        load_model_weights(found, run.model)  # without the optimizer, after more steps
        tensors = whole(run)
        assert all(torch.equal(tensors[key], value) for key, value in expected.items() if key.endswith(" value")), case

    names = [name for world_names in meshes.values() for name in world_names]
    for world, world_names in meshes.items():  # ranks are forked in the loop body, with its variables
        run_ranks(
            world, lambda rank, names_of_world: [write(rank, name) for name in names_of_world], world_names, timeout=300
        )
        for name in world_names:
            path = find_checkpoint(folder / name, "auto")
            assert Manifest.read(path).mesh.get("pp", 1) == (2 if name.startswith("pp2") else 4 if name == "pp4" else 1)
            assert len(list(path.glob("*.safetensors"))) > world
    total = 0
    for world, world_names in meshes.items():
        counts = run_ranks(
            world,
            lambda rank, names_of_world: [resume(rank, name, names) for name in names_of_world],
            world_names,
            timeout=900,
        )
        total += sum(counts[0])
    return total


def test_ranks_read_the_header_of_each_file_once_together(tmp_path: Path) -> None:
    """A checkpoint has a file per rank at least: if every rank read all headers, a start would cost world squared."""
    built = build("llama")

    def write(rank: int) -> None:
        run = start(cell_named("llama", "dp_shard4", 4), built)
        run.train(1)
        save_checkpoint(tmp_path, 1, run.model, run.optimizer, run.extra(), CheckpointConfig())

    def resume(rank: int) -> list[str]:
        run = start(cell_named("llama", "dp_shard2", 2), built)
        found = find_checkpoint(tmp_path, "auto")
        assert found is not None
        opened: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                safetensors, "safe_open", lambda path, **options: opened.append(path) or safe_open(path, **options)
            )
            load_checkpoint(found, run.model, run.optimizer)
        return opened

    run_ranks(4, write, timeout=120)
    opened = run_ranks(2, resume, timeout=120)
    files = sorted(str(file) for file in tmp_path.glob("checkpoints/step_1/*.safetensors"))
    assert len(files) == 4
    assert sorted(opened[0] + opened[1]) == files


def test_block_that_no_file_holds_is_an_error(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    path = save_checkpoint(tmp_path, 1, model, optimizer, {}, CheckpointConfig())
    stored = find_checkpoint_tensors(path, Manifest.read(path))
    weight = stored.by_name["model/weight"]
    stored.by_name["model/weight"] = replace(weight, blocks=weight.blocks - [0, 0, 0, 1, 0])  # a row is missing
    with pytest.raises(OSError, match="model/weight has 12 of the 16 values of a block"):
        stored.fill([("model/weight", (slice(0, 4), slice(0, 4)), torch.empty(4, 4))])
