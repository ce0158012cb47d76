"""LoRA runs are saved, resumed, moved between meshes and exported; their checkpoints contain no base weights."""

from __future__ import annotations

import json
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
from components.checkpoint.stored_tensors import base_fingerprint
from components.config.compose.frozen import frozen_text
from components.config.mesh_rules import layout_of
from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.run import CheckpointConfig
from components.models.lora import adapted_layers
from components.protocol.errors import ConfigError
from scripts.export import main as export
from tests.distributed.adapted import DORA, QLORA, WIDE, Adapted, build, ours, rounded_to_nf4
from tests.distributed.tiny_runs import TinyRun, cell_named, start, whole
from tests.harness import run_ranks
from tests.optional import SHARDS_BYTES
from tests.suites import TORTURE
from tests.tiny_models import logits, reference, tiny_folder

CASE = Adapted("llama", "", torch.float32, DORA)
QUANTIZED = Adapted("llama", "", torch.float32, QLORA, config=WIDE)
MESHES = {4: ["dp_shard2_tp2", "pp2_tp2", "tp4"], 2: ["ddp2", "pp2"], 1: ["fsdp2"]} if TORTURE else {2: ["tp2", "pp2"]}
KEEP = CheckpointConfig(keep=1)


def save(run: TinyRun, folder: Path) -> None:
    checkpoint.save_checkpoint(folder, run.state.step, run.model, run.optimizer, run.extra(), KEEP)


def load(run: TinyRun, folder: Path) -> None:
    found = checkpoint.find_checkpoint(folder, "auto")
    assert found is not None
    run.take(checkpoint.load_checkpoint(found, run.model, run.optimizer))


def adapter_state(run: TinyRun) -> dict[str, torch.Tensor]:
    return {name: value for name, value in whole(run).items() if "lora_" in name}


@pytest.mark.parametrize("case", [CASE, *([QUANTIZED] if TORTURE else [])], ids=lambda case: case.peft.method)
def test_lora_run_resumes_bitwise_on_the_same_mesh_and_on_any_other(case: Adapted, tmp_path: Path) -> None:
    model, other = ours(case), ours(case)
    for parameter in other.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)  # loading must replace all of them
    largest = max(MESHES)
    first = MESHES[largest][0]

    def write(rank: int) -> Any:
        run = start(cell_named("llama", first, largest), model)
        run.train(2)
        save(run, tmp_path)
        saved = adapter_state(run)
        return base_fingerprint(run.model), saved, run.train(2)[0], adapter_state(run)

    expected_fingerprint, saved, losses, after = run_ranks(largest, write)[0]
    assert expected_fingerprint == base_fingerprint(model)
    names = {name for file in tmp_path.rglob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118
    assert names
    assert all("lora_" in name for name in names)

    def resume(rank: int, world: int, meshes: list[str]) -> Any:
        results = []
        for mesh in meshes:
            run = start(cell_named("llama", mesh, world), other)
            load(run, tmp_path)
            results.append((base_fingerprint(run.model), adapter_state(run), run.train(2)[0], adapter_state(run)))
        return results

    for world, meshes in MESHES.items():
        if case is QUANTIZED:  # its 128 inputs are quantized 64 at a time, so they cannot be divided by 4
            meshes = [mesh for mesh in meshes if mesh != "tp4"]
        for mesh, results in zip(meshes, run_ranks(world, resume, world, meshes)[0], strict=True):
            assert results[0] == expected_fingerprint, mesh
            assert results[1].keys() == saved.keys()
            assert all(torch.equal(results[1][name], value) for name, value in saved.items()), mesh
            assert results[2] == (losses if mesh == first else pytest.approx(losses, rel=1e-5, abs=0)), mesh
            if mesh == first:
                assert all(torch.equal(results[3][name], value) for name, value in after.items())


def test_evaluation_does_not_change_the_base_fingerprint() -> None:
    """After an evaluation FSDP's last units are still unsharded, in the compute dtype; with pp only on one stage."""
    model = ours(CASE)

    def body(rank: int) -> list[tuple[str | None, str | None]]:
        results = []
        for mesh in ("dp_shard2_tp2", "pp2_dp_shard2"):
            run = start(cell_named("llama", mesh, 4), model, dtype=torch.bfloat16)
            loaded = base_fingerprint(run.model)
            training.evaluate(training.Prepared(run.model, run.settings, run.called), next(run.batches))
            results.append((loaded, base_fingerprint(run.model)))
        return results

    assert run_ranks(4, body) == [[(base_fingerprint(model),) * 2] * 2] * 4


def test_other_base_weights_and_other_parameters_are_rejected(tmp_path: Path) -> None:
    full, model, permuted_model = build(CASE), ours(CASE), ours(CASE)
    with torch.no_grad():
        weight = permuted_model.get_parameter("model.layers.1.self_attn.q_proj.weight")
        weight.copy_(weight.flip(0))  # the same values in another order

    def body(rank: int) -> list[str]:
        cell = cell_named("llama", "fsdp2", 1)
        runs = {
            name: start(cell, each) for name, each in (("full", full), ("lora", model), ("permuted", permuted_model))
        }
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


def config(tmp_path: Path, method: str, family: str) -> FinetuneConfig:
    """Create base weights and a run directory that uses them."""
    cfg = FinetuneConfig(
        model=ModelConfig(path=str(tiny_folder(tmp_path / "base", family)), tokenizer="bytes"),
        data=DocsDataConfig(),
        peft=PeftConfig(method=method, rank=3, dora=True, targets=EXPORTED_TARGETS.get(family, ["all-linear"])),
    )
    cfg.run.dir = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(frozen_text(cfg))
    return cfg


def recipe_model(cfg: FinetuneConfig, mesh: str | None) -> Any:
    """Build, parallelize and initialize the model as the recipe does."""
    model = models.build_on_meta(cfg.model)
    models.add_adapters(model, cfg.peft)
    layout = layout_of(mesh, ParallelismConfig()) if mesh else None
    if layout is not None:
        distributed.parallelize(model, distributed.build_mesh(layout, "cpu"), layout, torch.float32)
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg.model, cfg.run.seed)
    return model


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Adapter parameters of all ranks with their global shapes."""
    mine = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    mine = {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in mine.items()}
    of_ranks: list[Any] = [mine] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return {name: value for of_rank in of_ranks for name, value in of_rank.items()}


EXPORTED_TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_fc", "mlp.c_proj"]}
EXPORTED = [
    ("lora", "llama", "pp2"),
    ("lora", "phi3", "tp2"),
    *([("lora", "gpt2", "dp_shard2")] if TORTURE else []),
    *([("qlora", "llama", "pp2"), ("qlora", "gpt2", "tp2")] if SHARDS_BYTES else []),
]


@pytest.mark.parametrize(("method", "family", "mesh"), EXPORTED)
def test_exports_of_a_mesh_equal_those_of_its_checkpoint(
    method: str, family: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Adapters are initialized equally on every mesh; scripts/export.py writes the same two exports; peft loads them.

    QLoRA adapters are trained on the dequantized base weights, and are merged into those.
    """
    cfg = config(tmp_path, method, family)
    run_dir = tmp_path / "run"

    def body(rank: int) -> Any:
        model = recipe_model(cfg, mesh)
        initial = gathered(model)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().sign() + 0.5
        optimizer.step()
        checkpoint.save_checkpoint(run_dir, 1, model, optimizer, {"state": {}}, KEEP)
        models.export_run(model, models.load_tokenizer(cfg.model), run_dir, cfg.peft)
        return initial, gathered(model)

    initial, now = run_ranks(2, body)[0]
    single = recipe_model(cfg, None)
    for name, value in initial.items():
        exact = {} if name.endswith("lora_magnitude_vector") else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(single.get_parameter(name).detach(), value, **exact)
    assert len(initial) == 3 * len(adapted_layers(single))
    for name, value in now.items():
        single.get_parameter(name).data.copy_(value)
    expected = logits(single.eval())
    base = reference(tmp_path / "base")
    for layer in adapted_layers(single) if method == "qlora" else ():
        weight = base.get_submodule(layer).weight
        weight.data = rounded_to_nf4(weight) if family == "llama" else rounded_to_nf4(weight.T).T.contiguous()
    peft_model = PeftModel.from_pretrained(base, run_dir / "adapter").eval()
    torch.testing.assert_close(logits(peft_model), expected, rtol=1e-5, atol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "export").eval()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)

    monkeypatch.setattr("components.models.weights.weight_files._BLOCK_BYTES", 1500)
    assert export([str(run_dir)]) == export([str(run_dir), "--adapter"]) == 0
    for kind, file in (("export", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        mine, stored = load_file(run_dir / kind / file), load_file(run_dir / f"{kind}-step_1" / file)
        assert mine.keys() == stored.keys()
        for name, value in mine.items():
            torch.testing.assert_close(stored[name], value, rtol=1e-6, atol=1e-6)
    assert json.loads((run_dir / "adapter-step_1" / "adapter_config.json").read_text())["use_dora"] is True

    tiny_folder(tmp_path / "base", family, seed=1)
    assert export([str(run_dir), "--out", str(tmp_path / "other")]) == 2
    assert "its adapters were trained on other base weights" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
