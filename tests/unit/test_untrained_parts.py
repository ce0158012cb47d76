"""Exports of checkpoints whose files hold more than text trains: encoders of images, MTP layers, processor files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from components.config.schema.model import ModelConfig
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.peft import PeftConfig, PeftMethod
from components.models import (
    add_adapters,
    build_on_meta,
    export_model,
    fill_weights,
    load_tokenizer,
    materialize,
    read_anatomy,
)
from components.models.weights.untrained import untrained_note
from components.training import build_optimizer
from tests.tiny_models import SIZES, VOCAB

TEXT = {**SIZES, "head_dim": 8, "pad_token_id": 0, "max_position_embeddings": 64}
LINEAR = {
    "num_hidden_layers": 4,  # three of linear and one of full attention
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA4_VISION = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "image_size": 28}
CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "qwen3_5": ({**TEXT, **LINEAR}, {**QWEN_VISION, "num_position_embeddings": 16}, "model.visual.* (21 tensors)"),
    "qwen3_5_moe": (
        {**TEXT, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
        {**QWEN_VISION, "num_position_embeddings": 16},
        "model.visual.* (21 tensors)",
    ),
    "gemma3": (TEXT, {**VISION, "image_size": 28, "patch_size": 14}, "vision_tower.* (48 tensors)"),
    "gemma4": (
        {**TEXT, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
        {**VISION, "num_key_value_heads": 2, "head_dim": 16},
        "model.vision_tower.* (28 tensors)",
    ),
    "llama4": (
        {**TEXT, "num_local_experts": 2, "intermediate_size_mlp": 48},
        {**VISION, **LLAMA4_VISION, "intermediate_size": 64, "patch_size": 14},
        "vision_model.* (41 tensors)",
    ),
}
"""Model type -> text config, vision config, and what the banner says. Gemma's encoders are built, the others not."""
MTP = {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,), "mtp.layers.0.mlp.up_proj.weight": (48, 32)}
BUILT = ("gemma3", "gemma4")


def multimodal_folder(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a multimodal checkpoint of transformers, with a processor file, and MTP layers for Qwen 3.5."""
    text, vision, _ = CHECKPOINTS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config, dtype=dtype).save_pretrained(folder)
    if kind.startswith("qwen3_5"):
        add_tensors(folder, {name: torch.randn(shape, dtype=dtype) for name, shape in MTP.items()})
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return folder


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def trained(cfg: ModelConfig, peft: PeftConfig | None = None) -> Any:
    """Load a model and take a step of AdamW, with weight decay and a gradient for all that has one in a run."""
    model = build_on_meta(cfg)
    add_adapters(model, peft or PeftConfig())
    materialize(model, "cpu")
    fill_weights(model, cfg, 0)
    optimizer = build_optimizer(model, AdamWConfig(lr=0.1, weight_decay=0.5))
    for each in (each for group in optimizer.param_groups for each in group["params"]):
        each.grad = torch.ones_like(each)
    optimizer.step()
    return model


def is_trained(name: str) -> bool:
    """Whether text trains a tensor."""
    return not name.endswith("layer_scalar") and not name.startswith(  # Gemma 4: a constant
        ("model.visual", "mtp.", "vision_", "model.vision_", "multi_modal", "model.embed_vision")
    )


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_an_export_of_a_multimodal_checkpoint_holds_all_of_it(kind: str, tmp_path: Path) -> None:
    folder = multimodal_folder(tmp_path / "base", kind)
    cfg = ModelConfig(path=str(folder), tokenizer="bytes")
    model = trained(cfg)
    expected = CHECKPOINTS[kind][2]
    assert expected in untrained_note(model)
    export = export_model(model, load_tokenizer(cfg), tmp_path / "export", shard_bytes=40_000)
    before, after = stored(folder), stored(export)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        assert torch.equal(value, after[name]) != is_trained(name), name
    assert (export / "preprocessor_config.json").read_text() == '{"size": 28}'
    assert expected in (export / "README.md").read_text()
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, export)]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert configs[0]["vision_config"] == configs[1]["vision_config"]
    whole, report = AutoModelForImageTextToText.from_pretrained(export, output_loading_info=True)
    assert not report["missing_keys"]
    text = AutoModelForCausalLM.from_pretrained(export).eval()
    ids = torch.arange(24).reshape(2, 12) + 1
    with torch.no_grad():
        ours = model.eval()(input_ids=ids, use_cache=False).logits
        for each in (whole.eval(), text):
            torch.testing.assert_close(each(input_ids=ids).logits, ours, rtol=1e-5, atol=1e-5)
    again = ModelConfig(path=str(export), tokenizer="bytes")
    loaded = build_on_meta(again)
    materialize(loaded, "cpu")
    fill_weights(loaded, again, 0)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", BUILT)
def test_encoders_that_are_built_are_frozen_and_do_not_prevent_packing(kind: str, tmp_path: Path) -> None:
    model = build_on_meta(ModelConfig(path=str(multimodal_folder(tmp_path, kind)), tokenizer="bytes"))
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if not name.startswith("model.language_model.")}
    assert len(frozen) > 20
    anatomy = read_anatomy(model)
    assert (anatomy.needs_unpacked_rows, anatomy.needs_unsharded_rows) == ("", "")
    optimizer = build_optimizer(model, AdamWConfig())
    in_optimizer = {id(each) for group in optimizer.param_groups for each in group["params"]}
    assert in_optimizer == {id(each) for name, each in model.named_parameters() if name not in frozen}
    add_adapters(model, PeftConfig(method=PeftMethod.lora))
    assert not [name for name, each in model.named_parameters() if each.requires_grad and "vision" in name]
