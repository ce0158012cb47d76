"""Loading a checkpoint restores every value on any mesh; test_checkpoint_exact.py compares resumed runs bitwise."""

from __future__ import annotations

import json
import math
import pickle
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoModelForCausalLM, PreTrainedModel

from components.checkpoint import find_checkpoint, load_checkpoint, load_model_weights, save_checkpoint, tensors
from components.config.schema.run import CheckpointConfig
from components.protocol.errors import ConfigError
from tests.distributed.test_models_sharded import shard
from tests.harness import run_ranks
from tests.tiny_models import VOCAB, tiny_config

Run = tuple[PreTrainedModel, torch.optim.Optimizer]


def start(layout: str | None, seed: int) -> Run:
    """Build a model on a mesh (None: a single process), and its AdamW."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    if layout is not None:
        shard(model, layout)
    # Under plain torch TP norm weights are plain tensors, and the fused kernel cannot mix those with DTensors.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=layout != "tp2")


def train(run: Run, steps: int) -> None:
    model, optimizer = run
    for _ in range(steps):
        ids = torch.randint(VOCAB, (2, 12))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def full_tensors(run: Run) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state with their global shapes."""
    model, optimizer = run
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in [("value", parameter), *optimizer.state[parameter].items()]:
            value = value.detach()
            tensors[f"{name} {key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return tensors


READERS: dict[str | None, dict[int, list[str]]] = {
    None: {4: ["fsdp2_tp2"], 2: []},
    "fsdp4": {4: ["fsdp2_tp2"], 2: ["tp2", "fsdp2"]},
    "fsdp2_tp2": {4: ["fsdp4"], 2: ["tp2"]},
    "hsdp2x2": {4: [], 2: ["fsdp2"]},
}
"""Layout that writes -> world size -> layouts that read; a single process reads all of them too."""


def test_checkpoint_of_any_mesh_loads_on_any_other(tmp_path: Path) -> None:
    def write(rank: int, written: str | None) -> None:
        run, folder = start(written, 0), tmp_path / str(written)
        train(run, 2)
        save_checkpoint(folder, 2, *run, {}, CheckpointConfig(keep=1))
        tensors = full_tensors(run)
        if rank == 0:
            torch.save(tensors, folder / "expected.pt")

    def read(rank: int, written: str | None, layout: str | None) -> None:
        run, folder = start(layout, 1), tmp_path / str(written)
        before = torch.get_rng_state()
        load_checkpoint(find_checkpoint(folder, "auto"), *run)
        assert torch.equal(torch.get_rng_state(), before) == (layout != written)
        expected = torch.load(folder / "expected.pt")
        assert any("exp_avg_sq" in name for name in expected)
        tensors = full_tensors(run)
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(tensors[name], value), name
        train(run, 1)
        weights = start(layout, 2)[0]
        load_model_weights(folder / "checkpoints" / "step_2", weights)
        for name, parameter in weights.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(full, expected[f"{name} value"])

    def read_all(rank: int, world: int) -> None:
        for written, layouts in READERS.items():
            for layout in layouts[world]:
                read(rank, written, layout)

    write(0, None)
    run_ranks(4, lambda rank: [write(rank, written) for written in READERS if written])
    for world in (4, 2):
        run_ranks(world, read_all, world)
    for written in READERS:
        read(0, written, None)


def test_ddp_checkpoint_has_the_names_of_the_inner_model(tmp_path: Path) -> None:
    def body(rank: int) -> float:
        model, _ = start(None, 0)
        replica = torch.nn.parallel.DistributedDataParallel(model)
        run = replica, torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True)
        train(run, 1)
        save_checkpoint(tmp_path, 1, *run, extra, CheckpointConfig(keep=1))
        return model.model.norm.weight.sum().item()

    extra = {"state": {"step": 3, "loss": 0.1 + 0.2}, "data": {"epoch": 0, "index": 2**60 + 1}}
    expected = run_ranks(2, body)[0]
    run = start(None, 1)
    assert load_checkpoint(find_checkpoint(tmp_path, "auto"), *run) == extra
    assert run[0].model.norm.weight.sum().item() == expected != 32.0


def test_replicated_tensors_are_written_once(tmp_path: Path) -> None:
    def body(rank: int) -> int:
        run = start(None, 0)
        train(run, 1)
        save_checkpoint(tmp_path, 1, *run, {}, CheckpointConfig(keep=1))
        return sum(value.numel() * value.element_size() for value in full_tensors(run).values())

    size = run_ranks(2, body)[0]
    files = list((tmp_path / "checkpoints" / "step_1").glob("*.safetensors"))
    assert len(files) == 2  # each rank writes a part
    assert size < sum(file.stat().st_size for file in files) < 1.2 * size + 30_000  # headers


def test_checkpoint_contains_no_pickle_and_loads_without_unpickling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int) -> None:
        run = start("fsdp2", 0)
        train(run, 1)
        save_checkpoint(tmp_path, 1, *run, {"state": {}}, CheckpointConfig(keep=1))

    run_ranks(2, body)
    files = sorted((tmp_path / "checkpoints" / "step_1").rglob("*"))
    assert [path.name for path in files] == [
        "manifest.json",
        "random-00000.json",
        "random-00001.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
        "state.json",
    ]
    for path in files:
        data = path.read_bytes()
        assert not data.startswith((b"\x80", b"PK", b"\x1f\x8b")), path  # pickle, torch.save's zip, gzip
        if path.suffix == ".json":
            json.loads(data)
        else:
            with safe_open(path, framework="pt") as opened:
                assert len(opened.keys()) > 10

    def reject(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a file was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, reject)
    monkeypatch.setattr(torch, "load", reject)
    load_checkpoint(find_checkpoint(tmp_path, "auto"), *start(None, 1))


def test_checkpoint_of_another_model_is_rejected_with_the_tensor_names(tmp_path: Path) -> None:
    run = start(None, 0)
    train(run, 1)
    path = save_checkpoint(tmp_path, 1, *run, {}, CheckpointConfig(keep=1))

    def reject(change: Any, message: str) -> None:
        other, _ = start(None, 0)
        other = change(other) or other
        with pytest.raises(ConfigError, match=message):
            load_checkpoint(path, other, torch.optim.AdamW(other.parameters(), fused=True))

    reject(
        lambda model: model.double(),
        r"lm_head.weight|norm.weight is .*float32 in the checkpoint and .*float64 in this model",
    )
    reject(lambda model: model.model.layers.pop(1) and None, r"holds tensors that this model does not have: .*layers.1")
    reject(
        lambda model: model.model.layers.append(start(None, 0)[0].model.layers[0]) and None,
        r"lacks tensors of this model: model.layers.2",
    )


def test_state_that_another_optimizer_does_not_use_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = start(None, 0)
    train(run, 1)
    path = save_checkpoint(tmp_path, 1, *run, {}, CheckpointConfig())
    model, _ = start(None, 1)
    changed = model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    load_checkpoint(path, *changed)
    assert "does not use is dropped: exp_avg (SGD), exp_avg_sq (SGD), step (SGD)" in caplog.text
    train(changed, 1)
    path = save_checkpoint(tmp_path, 2, *changed, {}, CheckpointConfig())
    run = start(None, 2)
    load_checkpoint(path, *run)
    assert not any(run[1].state.values())  # neither the momentum of SGD nor the moments of step 1
    train(run, 1)


def test_optimizers_whose_state_is_known_exist() -> None:
    assert all(issubclass(pkgutil.resolve_name(name), torch.optim.Optimizer) for name in tensors._USED_STATE)


def test_state_of_an_own_optimizer_with_the_name_of_another_is_kept(tmp_path: Path) -> None:
    def step(self: torch.optim.Optimizer) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["velocity"] = self.state[parameter].get("velocity", 0) + parameter.grad

    own = type("Muon", (torch.optim.Optimizer,), {"step": step})
    model, _ = start(None, 0)
    saved = own(model.parameters(), {"lr": 1e-2})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    path = save_checkpoint(tmp_path, 1, model, saved, {}, CheckpointConfig())
    model, _ = start(None, 1)
    loaded = own(model.parameters(), {"lr": 1e-2})
    load_checkpoint(path, model, loaded)
    assert all(torch.equal(loaded.state[each]["velocity"], torch.ones_like(each)) for each in model.parameters())


def two_level_shards(split: str) -> Run:
    """A matrix sharded over four ranks: FSDP over TP shards of uneven size (5 rows), or over a fused projection (12
    rows: three matrices, each of which TP shards separately)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    placement = Shard(0) if split == "uneven" else _StridedShard(0, split_factor=3)
    full_tensors = torch.arange(60.0).view(12, 5) if split == "fused" else torch.arange(35.0).view(5, 7)
    model = torch.nn.Linear(*reversed(full_tensors.shape), bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(full_tensors, mesh["tp"], [placement]))
    fully_shard(model, mesh=mesh["fsdp"])
    return model, torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize("split", ["uneven", "fused"])
def test_strided_and_uneven_shards_are_stored_at_their_global_offsets(split: str, tmp_path: Path) -> None:
    """torch.distributed.checkpoint alone would silently store the wrong rows."""

    def body(rank: int) -> int:
        run = two_level_shards(split)
        save_checkpoint(tmp_path, 1, *run, {}, CheckpointConfig(keep=1))
        blank = two_level_shards(split)
        with torch.no_grad():
            blank[0].weight.mul_(0)
        load_checkpoint(find_checkpoint(tmp_path, "auto"), *blank)
        assert torch.equal(blank[0].weight.to_local(), run[0].weight.to_local())
        return run[0].weight.to_local().numel()

    sizes = run_ranks(4, body)
    shape = (12, 5) if split == "fused" else (5, 7)
    assert sum(sizes) == math.prod(shape)
    assert len(set(sizes)) == (1 if split == "fused" else 2)
    plain = torch.nn.Linear(*reversed(shape), bias=False)
    load_model_weights(tmp_path / "checkpoints" / "step_1", plain)
    assert torch.equal(plain.weight, torch.arange(float(sum(sizes))).view(shape))


def test_state_of_parameters_that_are_frozen_now_is_dropped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(None, 0)
    train(run, 1)
    path = save_checkpoint(tmp_path, 1, *run, {}, CheckpointConfig(keep=1))
    model, _ = start(None, 0)
    norm = model.get_parameter("model.norm.weight").requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
    load_checkpoint(path, model, optimizer)
    assert "optimizer state of parameters that are frozen now is dropped: model.norm.weight" in caplog.text
    assert norm not in optimizer.state
    expected = {name: run[1].state[each]["exp_avg"] for name, each in run[0].named_parameters()}
    for name, parameter in model.named_parameters():
        assert name == "model.norm.weight" or torch.equal(optimizer.state[parameter]["exp_avg"], expected[name]), name
