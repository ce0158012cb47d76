"""Load, export, checkpoints and parameter counts with ranks that hold different parameters, as in pipeline stages.

The stages are built by hand: modules of the other stage are replaced by placeholders without parameters.
"""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM, PreTrainedModel

from components.batch import Batch
from components.checkpoint import find_checkpoint, load_checkpoint, load_model_weights, save_checkpoint, stored_tensors
from components.checkpoint.manifest import Manifest
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.run import CheckpointConfig
from components.models import (
    build_on_meta,
    checkpoint_activations,
    count_parameters,
    decoder_layers,
    export_model,
    fill_weights,
    load_tokenizer,
    materialize,
)
from components.models.weights.shards import fill, local_part
from components.protocol.errors import ConfigError
from tests.distributed.test_models_sharded import TP_PLAN, fsdp
from tests.harness import run_ranks
from tests.suites import TORTURE
from tests.tiny_models import reference, tiny_config

LAYERS = 3
SPLITS = {"halves": ([0], [1, 2]), "interleaved": ([0, 2], [1])}
"""Layers of the first and the second stage."""
LAYOUTS = {2: ["fsdp", "plain"], 4: ["fsdp", "plain", "tp"]}
Run = tuple[PreTrainedModel, torch.optim.Optimizer]


class Placeholder(nn.Module):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


def saved_model(folder: Path, family: str, layers: int = LAYERS) -> ModelConfig:
    """Save a transformers model with random parameters in a folder named after its family."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config.num_hidden_layers = layers
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.1)
    model.save_pretrained(folder / family)
    return ModelConfig(path=str(folder / family), tokenizer="bytes")


def staged(cfg: ModelConfig, layout: str, split: str = "halves", seed: int = 5) -> PreTrainedModel:
    """Build this rank's stage of two, parallelize it over the other mesh axes, and load its weights."""
    world = dist.get_world_size()
    sizes = {"fsdp": (2, world // 2, 1), "plain": (2, world // 2, 1), "tp": (2, 1, world // 2)}[layout]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_shard", "tp"))
    model = build_on_meta(cfg)
    keep_stage(model, mesh.get_local_rank("pp"), split)
    if layout == "tp":
        modules = dict(model.named_modules())
        plan = {path: style for path, style in TP_PLAN.items() if not isinstance(modules.get(path), Placeholder)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # plan entries for modules of the other stage match nothing
            parallelize_module(model, mesh["tp"], plan)
    if layout != "plain":
        for layer in decoder_layers(model):
            if not isinstance(layer, Placeholder):
                fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    materialize(model, "cpu")
    fill_weights(model, cfg, seed)
    return model


def keep_stage(model: PreTrainedModel, stage: int, split: str) -> None:
    """Replace the modules of the other stage with placeholders.

    A tied head has no parameter of its own, so neither stage keeps it.
    """
    tied = model.config.tie_word_embeddings
    for index in SPLITS[split][1 - stage]:
        model.model.layers[index] = Placeholder()
    if stage == 0:
        model.model.norm, model.lm_head = Placeholder(), Placeholder()
    else:
        model.model.embed_tokens = Placeholder()
        if tied:
            model.lm_head = Placeholder()


def unstaged(cfg: ModelConfig, seed: int = 5) -> PreTrainedModel:
    model = build_on_meta(cfg)
    if dist.is_initialized():
        fsdp(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",)))
    materialize(model, "cpu")
    fill_weights(model, cfg, seed)
    return model


def start(model: PreTrainedModel, steps: int = 2) -> Run:
    """Take `steps` AdamW steps with gradients that depend only on the parameter name and the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(steps):
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
            parameter.grad = torch.empty_like(parameter)
            fill(parameter.grad, name, torch.randn(parameter.shape, generator=generator).__getitem__)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full_state(run: Run) -> dict[str, torch.Tensor]:
    """Return the full parameters and optimizer state of all ranks, gathered by torch."""
    model, optimizer = run
    local = {}
    for name, parameter in model.named_parameters():
        for key, value in [("value", parameter), *optimizer.state[parameter].items()]:
            value = value.detach()
            local[f"{name} {key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    if not dist.is_initialized():
        return local
    gathered: list[Batch] = [local] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return {name: value for state in gathered for name, value in state.items()}


def assert_equal_tensors(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def names_of_stage(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 4] if TORTURE else [2])
def test_stage_loads_its_own_weights_and_counts_the_full_model(world: int, tmp_path: Path) -> None:
    cfgs = {family: saved_model(tmp_path, family) for family in ("llama", "llama3", "mixtral")}
    random_cfg = ModelConfig(path=cfgs["llama3"].path, init=WeightInit.random)
    random_values = dict(unstaged(random_cfg).named_parameters())

    def body(rank: int) -> dict[str, int]:
        local_bytes = {}
        for layout in LAYOUTS[world]:
            for family, cfg in cfgs.items():
                expected = reference(Path(str(cfg.path)))
                model = staged(cfg, layout) if family != "mixtral" or layout != "tp" else staged(cfg, "fsdp")
                for name, parameter in model.named_parameters():
                    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                    assert torch.equal(value, expected.get_parameter(name)), name
                for name, buffer in model.named_buffers():
                    assert torch.equal(buffer, expected.get_buffer(name)), name
                counts = count_parameters(model)
                assert counts.total == counts.trainable == sum(each.numel() for each in expected.parameters())
                assert counts.local_bytes == sum(4 * local_part(each).numel() for each in model.parameters())
                local_bytes[f"{family} {layout}"] = counts.local_bytes
            for name, parameter in staged(random_cfg, layout).named_parameters():
                value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                assert torch.equal(value, random_values[name]), name
        return local_bytes

    results = run_ranks(world, body)
    full_bytes = 4 * sum(each.numel() for each in reference(tmp_path / "llama3").parameters())
    assert sum(each["llama3 fsdp"] for each in results) == full_bytes
    assert sum(each["llama3 plain"] for each in results) == full_bytes * world // 2


def test_activation_checkpointing_skips_layers_of_other_stages(tmp_path: Path) -> None:
    model = build_on_meta(saved_model(tmp_path, "llama"))
    keep_stage(model, 1, "halves")  # keeps layers 1 and 2
    checkpoint_activations(model, ActivationCheckpointing.alternate)
    assert [isinstance(layer.forward, partial) for layer in decoder_layers(model)] == [False, False, True]


@pytest.mark.parametrize("world", [2, 4] if TORTURE else [2])
def test_stages_are_exported_as_one_model(world: int, tmp_path: Path) -> None:
    cfgs = {family: saved_model(tmp_path, family) for family in ("llama", "llama3")}
    cases = [(family, layout, split) for family in cfgs for layout in LAYOUTS[world] for split in SPLITS]
    tokenizer = load_tokenizer(cfgs["llama"])
    for family, cfg in cfgs.items():
        export_model(unstaged(cfg), tokenizer, tmp_path / f"{family} unstaged", shard_bytes=20_000)

    def body(rank: int) -> list[int]:
        counts = []
        for family, layout, split in cases:
            model = staged(cfgs[family], layout, split)
            counts.append(len(names_of_stage(model)))
            export_model(model, tokenizer, tmp_path / f"{family} {layout} {split}", shard_bytes=20_000)
        return counts

    for counts in run_ranks(world, body):
        assert all(9 < count < 25 for count in counts)  # no rank held the full model
    for family, layout, split in cases:
        exported, expected = tmp_path / f"{family} {layout} {split}", tmp_path / f"{family} unstaged"
        files = {file.name: file.read_bytes() for file in expected.glob("*.safetensors")}
        assert len(files) > 2
        assert {file.name: file.read_bytes() for file in exported.glob("*.safetensors")} == files
        values = {name: value for file in exported.glob("*.safetensors") for name, value in load_file(file).items()}
        assert_equal_tensors(values, load_file(tmp_path / family / "model.safetensors"))
        index = json.loads((exported / "model.safetensors.index.json").read_text())
        in_order = [name for name in reference(tmp_path / family).state_dict() if name in values]
        assert list(index["weight_map"]) == in_order  # independent of the stages
        assert ("lm_head.weight" in values) == (family == "llama3")
        for name, parameter in reference(exported).named_parameters():
            assert torch.equal(parameter, reference(tmp_path / family).get_parameter(name)), name


def test_export_error_of_one_rank_is_raised_on_every_rank(tmp_path: Path) -> None:
    cfg = saved_model(tmp_path, "llama3")
    tokenizer = load_tokenizer(cfg)

    def partial_sum(rank: int) -> None:
        model = staged(cfg, "fsdp")
        if rank == 1:
            norm = model.model.norm
            value = DTensor.from_local(torch.ones(32), norm.weight.device_mesh, [Partial()], run_check=False)
            norm.weight = nn.Parameter(value)
        export_model(model, tokenizer, tmp_path / "export")

    def unsharded_parameter(rank: int) -> None:
        model = unstaged(cfg)
        if rank == 1:
            model.model.norm.weight = nn.Parameter(torch.ones(32))  # unsharded, while rank 0 holds a half
        export_model(model, tokenizer, tmp_path / "export")

    def body(rank: int, export: Any) -> str:
        with pytest.raises(NotImplementedError) as caught:
            export(rank)
        return str(caught.value)

    first, second = run_ranks(2, body, partial_sum)
    assert first == second
    assert "model.norm.weight: holds a partial sum" in first
    first, second = run_ranks(2, body, unsharded_parameter)
    assert first == second == "model.norm.weight: the ranks hold 48 of the 32 values of (32,)"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama3"]


@pytest.mark.parametrize(
    ("world", "family"), [(2, "llama3"), *([(2, "llama"), (4, "llama"), (4, "llama3")] if TORTURE else [])]
)
def test_checkpoints_load_across_pipeline_layouts(
    world: int, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = saved_model(tmp_path, family)
    monkeypatch.setattr(stored_tensors, "_FILE_BYTES", 20_000)

    def write(rank: int, layout: str | None, split: str = "halves") -> None:
        run = start(staged(cfg, layout, split) if layout else unstaged(cfg))
        save_checkpoint(tmp_path / str(layout), 2, *run, {"step": 2}, CheckpointConfig(keep=1))
        tensors = full_state(run)
        if rank == 0:
            torch.save(tensors, tmp_path / f"{layout}.pt")

    def read(rank: int, written: str, layout: str | None, split: str = "halves") -> None:
        other = ModelConfig(path=cfg.path, init=WeightInit.random)  # the checkpoint must replace all of these weights
        run = start(staged(other, layout, split) if layout else unstaged(other), steps=0)
        expected = torch.load(tmp_path / f"{written}.pt")
        found = find_checkpoint(tmp_path / written, "auto")
        assert found is not None
        assert load_checkpoint(found, *run) == {"step": 2}
        assert_equal_tensors(full_state(run), expected)
        weights = staged(other, layout, split) if layout else unstaged(other)
        load_model_weights(found, weights)
        assert_equal_tensors(
            full_state(start(weights, steps=0)), {name: each for name, each in expected.items() if "value" in name}
        )

    run_ranks(2, write, None)
    names = dict(reference(tmp_path / family).named_parameters())
    quantities = ("value", "step", "exp_avg", "exp_avg_sq")
    for layout in LAYOUTS[world] if family == "llama3" else ["fsdp"]:
        split = "interleaved" if layout == "fsdp" else "halves"
        run_ranks(world, write, layout, split)
        written = torch.load(tmp_path / f"{layout}.pt")
        assert written.keys() == {f"{name} {quantity}" for name in names for quantity in quantities}
        folder = tmp_path / layout / "checkpoints" / "step_2"
        assert Manifest.read(folder).mesh.items() >= (
            {"pp": 2}.items() if layout != "plain" else {"world": world}.items()
        )
        assert max(file.stat().st_size for file in folder.glob("*.safetensors")) < 100_000
        run_ranks(2, read, layout, None)  # read without stages, then with other stages
        run_ranks(world, read, "None", layout, split)
        run_ranks(world, read, layout, "fsdp", "halves")


def test_checkpoint_error_of_one_stage_is_raised_on_all_stages(tmp_path: Path) -> None:
    cfg = saved_model(tmp_path, "llama3")
    save_checkpoint(
        tmp_path / "other",
        2,
        *start(unstaged(saved_model(tmp_path / "two", "llama3", 2))),
        {},
        CheckpointConfig(keep=1),
    )
    save_checkpoint(tmp_path / "same", 2, *start(unstaged(cfg)), {}, CheckpointConfig(keep=1))

    def body(rank: int) -> list[str]:
        messages = []
        for written in ("other", "same"):
            model = staged(cfg, "fsdp")
            if rank == 1:
                model.model.norm.weight.requires_grad_(False)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(trained, fused=True)
            with pytest.raises(ConfigError) as caught:
                load_checkpoint(tmp_path / written / "checkpoints" / "step_2", model, optimizer)
            messages.append(str(caught.value))
        return messages

    first, second = run_ranks(2, body)
    assert first == second
    assert "lacks tensors of this model: model.layers.2.self_attn.q_proj.weight" in first[0]
    assert first[1].startswith("the checkpoint holds optimizer state of model.norm.weight")
