"""Runs with adapters are saved, resumed, moved between meshes and exported; base weights are in no checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from components import checkpoint, distributed, models, training
from components.checkpoint.base_fingerprint import base_fingerprint
from components.config.compose.frozen import to_yaml
from components.config.errors import ConfigError
from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.checkpoint import CheckpointConfig
from components.config.schema.data import DocsDataConfig
from components.models.lora import adapted_layers
from components.parity.shapes import layout_of
from scripts.export import main as export
from tests.distributed.adapted import DORA, QLORA, WIDE, Adapted, build, ours, rounded_to_nf4
from tests.distributed.tiny_runs import TinyRun, cell_named, start, whole
from tests.harness import run_ranks
from tests.tiny_models import logits, reference, tiny_folder

CASE = Adapted("llama", "", torch.float32, DORA)
PACKED = Adapted("llama", "", torch.float32, QLORA, config=WIDE)
TORTURE = os.environ.get("MESHBOOK_TORTURE") == "1"
MESHES = {4: ["dp_shard2_tp2", "pp2_tp2", "tp4"], 2: ["ddp2", "pp2"], 1: ["fsdp2"]} if TORTURE else {2: ["tp2", "pp2"]}
KEEP = CheckpointConfig(keep=1)


def save(run: TinyRun, folder: Path) -> None:
    checkpoint.save_checkpoint(folder, run.state.step, run.model, run.optimizer, run.extra(), KEEP)


def load(run: TinyRun, folder: Path) -> None:
    found = checkpoint.find_checkpoint(folder, "auto")
    assert found is not None
    run.take(checkpoint.load_checkpoint(found, run.model, run.optimizer))


def trained(run: TinyRun) -> dict[str, torch.Tensor]:
    return {name: value for name, value in whole(run).items() if "lora_" in name}


@pytest.mark.parametrize("case", [CASE, *([PACKED] if TORTURE else [])], ids=lambda case: case.peft.method)
def test_a_run_goes_on_bit_for_bit_and_on_any_mesh(case: Adapted, tmp_path: Path) -> None:
    model, elsewhere = ours(case), ours(case)
    for parameter in elsewhere.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)  # all of which must be replaced
    largest = max(MESHES)
    first = MESHES[largest][0]

    def write(rank: int) -> Any:
        run = start(cell_named("llama", first, largest), model)
        run.train(2)
        save(run, tmp_path)
        then = trained(run)
        return base_fingerprint(run.model), then, run.train(2)[0], trained(run)

    fingerprint, then, losses, after = run_ranks(largest, write)[0]
    assert fingerprint == base_fingerprint(model)
    names = {name for file in tmp_path.rglob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118
    assert names
    assert all("lora_" in name for name in names)

    def go_on(rank: int, world: int, meshes: list[str]) -> Any:
        told = []
        for mesh in meshes:
            run = start(cell_named("llama", mesh, world), elsewhere)
            load(run, tmp_path)
            told.append((base_fingerprint(run.model), trained(run), run.train(2)[0], trained(run)))
        return told

    for world, meshes in MESHES.items():
        for mesh, told in zip(meshes, run_ranks(world, go_on, world, meshes)[0], strict=True):
            assert told[0] == fingerprint, mesh
            assert told[1].keys() == then.keys()
            assert all(torch.equal(told[1][name], value) for name, value in then.items()), mesh
            assert told[2] == (losses if mesh == first else pytest.approx(losses, rel=1e-5, abs=0)), mesh
            if mesh == first:
                assert all(torch.equal(told[3][name], value) for name, value in after.items())


def test_a_forward_leaves_the_fingerprint_of_the_frozen_weights() -> None:
    """An evaluation leaves FSDP's last units whole, in the type of the products, and a stage's on its ranks."""
    model = ours(CASE)

    def body(rank: int) -> list[tuple[str | None, str | None]]:
        told = []
        for mesh in ("dp_shard2_tp2", "pp2_dp_shard2"):
            run = start(cell_named("llama", mesh, 4), model, dtype=torch.bfloat16)
            loaded = base_fingerprint(run.model)
            training.evaluate(training.Prepared(run.model, run.settings, run.called), next(run.batches))
            told.append((loaded, base_fingerprint(run.model)))
        return told

    assert run_ranks(4, body) == [[(base_fingerprint(model),) * 2] * 2] * 4


def test_other_base_weights_and_other_parameters_are_refused(tmp_path: Path) -> None:
    full, model, permuted = build(CASE), ours(CASE), ours(CASE)
    with torch.no_grad():
        weight = permuted.get_parameter("model.layers.1.self_attn.q_proj.weight")
        weight.copy_(weight.flip(0))  # the same values in other places

    def body(rank: int) -> list[str]:
        cell = cell_named("llama", "fsdp2", 1)
        runs = {name: start(cell, each) for name, each in (("full", full), ("lora", model), ("permuted", permuted))}
        for name in ("full", "lora"):
            runs[name].train(1)
            save(runs[name], tmp_path / name)
        problems = []
        for name, folder in (("permuted", "lora"), ("full", "lora"), ("lora", "full")):
            with pytest.raises(ConfigError) as caught:
                load(runs[name], tmp_path / folder)
            problems.append(str(caught.value))
            with pytest.raises(ConfigError):
                checkpoint.load_model_weights(tmp_path / folder / "checkpoints" / "step_1", runs[name].model)
        return problems

    other_base, lacks, holds = run_ranks(1, body)[0]
    assert "its adapters were trained on other base weights" in other_base
    assert "lacks tensors of this model: model.embed_tokens.weight" in lacks
    assert "lacks tensors of this model" in holds
    assert "lora_A" in holds


def config(tmp_path: Path, method: str) -> FinetuneConfig:
    """A run directory over base weights in a folder."""
    cfg = FinetuneConfig(
        model=ModelConfig(path=str(tiny_folder(tmp_path / "base", "llama")), tokenizer="bytes"),
        data=DocsDataConfig(),
        peft=PeftConfig(method=method, rank=3, dora=True, targets=["q_proj", "v_proj", "down_proj"]),
    )
    cfg.run.dir = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(cfg))
    return cfg


def recipe_model(cfg: FinetuneConfig, mesh: str | None) -> Any:
    """Built and filled as the recipe does it."""
    model = models.build_on_meta(cfg.model)
    models.add_adapters(model, cfg.peft)
    layout = layout_of(mesh, ParallelismConfig()) if mesh else None
    if layout is not None:
        distributed.parallelize(model, distributed.build_mesh(layout, "cpu"), layout, torch.float32)
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg.model, cfg.run.seed)
    return model


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The adapters of all ranks, whole."""
    mine = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    mine = {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in mine.items()}
    everyone: list[Any] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: value for held in everyone for name, value in held.items()}


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_what_a_mesh_exports_is_what_its_checkpoint_gives(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters start alike on every mesh; both exports are those of scripts/export.py, and peft loads them.

    Those of QLoRA belong to weights as they come out of 4 bits, and are merged into these.
    """
    cfg = config(tmp_path, method)
    run_dir = tmp_path / "run"

    def body(rank: int) -> Any:
        model = recipe_model(cfg, "pp2")
        at_start = gathered(model)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().sign() + 0.5
        optimizer.step()
        checkpoint.save_checkpoint(run_dir, 1, model, optimizer, {"state": {}}, KEEP)
        models.export_run(model, models.load_tokenizer(cfg.model), run_dir, cfg.model, cfg.peft)
        return at_start, gathered(model)

    at_start, now = run_ranks(2, body)[0]
    alone = recipe_model(cfg, None)
    for name, value in at_start.items():
        exact = {} if name.endswith("lora_magnitude_vector") else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(alone.get_parameter(name).detach(), value, **exact)
    assert len(at_start) == 2 * 3 * 3
    for name, value in now.items():
        alone.get_parameter(name).data.copy_(value)
    expected = logits(alone.eval())
    base = reference(tmp_path / "base")
    for layer in adapted_layers(alone) if method == "qlora" else ():
        weight = base.get_submodule(layer).weight
        weight.data = rounded_to_nf4(weight)
    theirs = PeftModel.from_pretrained(base, run_dir / "adapter").eval()
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-5, atol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "export").eval()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)

    monkeypatch.setattr("components.models.weights.weight_files.BLOCK_BYTES", 1500)
    assert export([str(run_dir)]) == export([str(run_dir), "--adapter"]) == 0
    for kind, file in (("export", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        mine, stored = load_file(run_dir / kind / file), load_file(run_dir / f"{kind}-step_1" / file)
        assert mine.keys() == stored.keys()
        for name, value in mine.items():
            torch.testing.assert_close(stored[name], value, rtol=1e-6, atol=1e-6)
    assert json.loads((run_dir / "adapter-step_1" / "adapter_config.json").read_text())["use_dora"] is True

    tiny_folder(tmp_path / "base", "llama", seed=1)
    assert export([str(run_dir), "--out", str(tmp_path / "other")]) == 2
    assert "its adapters were trained on other base weights" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
