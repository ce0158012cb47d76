"""Exports of checkpoints whose files hold more than text trains: encoders of images, MTP layers, processor files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from components.config.schema.model import DOCUMENTS, LONGEST_DOCUMENT, ModelConfig
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.run import PeftConfig, PeftExport, PeftMethod
from components.models import (
    add_adapters,
    build_on_meta,
    export_model,
    export_run,
    fill_weights,
    load_tokenizer,
    materialize,
    read_anatomy,
)
from components.models.build import IMAGE_TEXT
from components.models.tokenizer import byte_tokenizer
from components.models.weights.untrained import untrained_note
from components.training import build_optimizer
from components.training.flops import model_flops
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
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
CHECKPOINTS |= {
    "mistral3": (
        {**TEXT, "model_type": "ministral3"},
        {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14},
        "vision_tower.* (20 tensors)",
    ),
    "qwen3_vl": (
        TEXT,
        {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "model.visual.* (27 tensors)",
    ),
    "qwen2_5_vl": ({**TEXT, **SECTIONS, "head_dim": None}, QWEN_VISION, "visual.* (18 tensors)"),
    "llava": (
        {**TEXT, "model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        "vision_tower.* (39 tensors)",
    ),
    "internvl": (
        {**TEXT, "model_type": "qwen3"},
        {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        "vision_tower.* (34 tensors)",
    ),
    "glm4v": ({**TEXT, **SECTIONS}, QWEN_VISION, "model.visual.* (20 tensors)"),
}
MTP = {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,), "mtp.layers.0.mlp.up_proj.weight": (48, 32)}
BUILT = ("gemma3", "gemma4", "mistral3", "qwen3_vl", "qwen2_5_vl")


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
        ("model.visual", "visual.", "mtp.", "vision_", "model.vision_", "multi_modal", "model.embed_vision")
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
    text = (AutoModelForImageTextToText if kind in IMAGE_TEXT else AutoModelForCausalLM).from_pretrained(export).eval()
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


@pytest.mark.parametrize("stored_dtype", [torch.bfloat16, torch.float32])
def test_an_export_copies_tensors_in_their_dtype_unless_it_is_asked_for_a_narrower_one(
    stored_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Of a base in several files, with adapters merged into the trained part."""
    folder = multimodal_folder(tmp_path / "base", "qwen3_5_moe", stored_dtype)
    AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").save_pretrained(folder, max_shard_size="50KB")
    (folder / "model.safetensors").unlink()
    cfg, peft = ModelConfig(path=str(folder)), PeftConfig(method=PeftMethod.lora, export=PeftExport.merged)
    model = trained(cfg, peft)
    before = stored(folder)
    assert len(list(folder.glob("*.safetensors"))) > 3
    (merged,) = export_run(model, byte_tokenizer(), tmp_path, cfg, peft)
    narrow = export_model(model, byte_tokenizer(), tmp_path / "narrow", dtype=torch.bfloat16)
    for name, value in before.items():
        if not is_trained(name):
            assert stored(merged)[name].dtype == stored_dtype
            assert torch.equal(stored(merged)[name], value)
        assert stored(narrow)[name].dtype == torch.bfloat16
    adapted = "model.language_model.layers.3.self_attn.q_proj.weight"
    assert not torch.equal(stored(merged)[adapted], before[adapted].float())
    for export, dtype in ((merged, torch.float32), (narrow, torch.bfloat16)):
        whole, report = AutoModelForImageTextToText.from_pretrained(export, dtype="auto", output_loading_info=True)
        assert (whole.dtype, report["missing_keys"], report["unexpected_keys"]) == (dtype, set(), set())


def test_mtp_layers_of_a_text_model_are_copied(tmp_path: Path) -> None:
    """GLM-4.5's are decoder layers after the last one, which transformers ignores by their number."""
    config = AutoConfig.for_model(
        "glm4_moe", **TEXT, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    mtp = {"model.layers.46.eh_proj.weight": torch.randn(32, 64), "model.layers.46.enorm.weight": torch.randn(32)}
    add_tensors(tmp_path / "base", mtp)
    cfg = ModelConfig(path=str(tmp_path / "base"))
    model = trained(cfg)
    assert untrained_note(model).endswith("model.layers.46.* (2 tensors)")
    after = stored(export_model(model, byte_tokenizer(), tmp_path / "export"))
    assert after.keys() == stored(tmp_path / "base").keys()
    assert all(torch.equal(after[name], value) for name, value in mtp.items())


def test_an_export_has_the_older_names_of_its_base(tmp_path: Path) -> None:
    """Gemma 3 was published with names that transformers renames at load."""
    folder = multimodal_folder(tmp_path / "base", "gemma3")
    older = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in stored(folder).items()}
    save_file(older, folder / "model.safetensors", {"format": "pt"})
    after = stored(export_model(trained(ModelConfig(path=str(folder))), byte_tokenizer(), tmp_path / "export"))
    assert after.keys() == older.keys()
    assert not AutoModelForImageTextToText.from_pretrained(tmp_path / "export", output_loading_info=True)[1][
        "missing_keys"
    ]


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_score_models_keep_encoders_and_score_padded_batches(kind: str, tmp_path: Path) -> None:
    folder = multimodal_folder(tmp_path / "base", kind)
    cfg = ModelConfig(path=str(folder))
    model = build_on_meta(cfg, labels=["no", "yes"])
    materialize(model, "cpu")
    fill_weights(model, cfg, 0)
    export = export_model(model, byte_tokenizer(), tmp_path / "export")
    copied = {name: each for name, each in stored(folder).items() if not is_trained(name)}
    assert all(torch.equal(stored(export)[name], each) for name, each in copied.items())
    plain = AutoModelForSequenceClassification.from_pretrained(export)
    rows = torch.tensor([[5, 6, 7, 8], [9, 10, 258, 258]])  # 258 is the tokenizer's pad token
    with torch.no_grad():
        scores = model.eval()(input_ids=rows).logits
        expected = torch.stack([scores[0, 3], scores[1, 1]])
        torch.testing.assert_close(plain(input_ids=rows).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", BUILT)
def test_encoders_that_are_built_are_frozen_and_do_not_prevent_packing(kind: str, tmp_path: Path) -> None:
    model = build_on_meta(ModelConfig(path=str(multimodal_folder(tmp_path, kind)), tokenizer="bytes"))
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    text = ("model.language_model.", "lm_head.")
    assert frozen == {name for name, _ in model.named_parameters() if not name.startswith(text)}
    assert len(frozen) > 15
    anatomy = read_anatomy(model)
    assert (anatomy.needs_unpacked_rows, anatomy.needs_unsharded_rows) == ("", "")
    optimizer = build_optimizer(model, AdamWConfig())
    in_optimizer = {id(each) for group in optimizer.param_groups for each in group["params"]}
    assert in_optimizer == {id(each) for name, each in model.named_parameters() if name not in frozen}
    add_adapters(model, PeftConfig(method=PeftMethod.lora))
    assert not [name for name, each in model.named_parameters() if each.requires_grad and "vision" in name]


@pytest.mark.parametrize("kind", BUILT)
def test_packed_documents_of_a_multimodal_checkpoint_are_computed_like_single_ones(kind: str, tmp_path: Path) -> None:
    cfg = ModelConfig(path=str(multimodal_folder(tmp_path, kind)), tokenizer="bytes")
    model = build_on_meta(cfg)
    if kind == "gemma3":  # the FLOPs of Gemma 4 are not counted
        head = 6 * 32 * VOCAB
        assert model_flops(model).per_token == model_flops(model.get_decoder()).per_token + head
    materialize(model, "cpu")
    fill_weights(model, cfg, 0)
    documents = [torch.arange(length) + 7 for length in (3, 11, 1)]
    positions = torch.cat([torch.arange(len(each)) for each in documents])[None]
    bounds = torch.tensor([[0, 3, 14, 15]], dtype=torch.int32)
    keywords = {DOCUMENTS: bounds, LONGEST_DOCUMENT: 11, "use_cache": False}
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path)
    with torch.no_grad():
        packed = model(input_ids=torch.cat(documents)[None], position_ids=positions, **keywords).logits[0]
        single = torch.cat([plain(input_ids=each[None]).logits[0] for each in documents])
    torch.testing.assert_close(packed, single, rtol=1e-5, atol=1e-5)
