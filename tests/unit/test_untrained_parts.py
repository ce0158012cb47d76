"""Exports of checkpoints whose files hold more than text trains: encoders of images, MTP layers, processor files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import deserialize
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from components.config.schema.model import DOCUMENTS, LONGEST_DOCUMENT, Attention, DType, ModelConfig
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.run import PeftConfig, PeftExport, PeftMethod
from components.models import (
    add_adapters,
    build_on_meta,
    export_model,
    export_run,
    export_stored,
    fill_weights,
    load_tokenizer,
    materialize,
    read_anatomy,
)
from components.models.build import IMAGE_TEXT
from components.models.tokenizer import byte_tokenizer
from components.models.weights.untrained import file_notes
from components.protocol.errors import ConfigError
from components.training import build_optimizer
from components.training.step_cost import model_flops
from scripts.average import main as average
from tests.tiny_models import FAMILIES, SIZES, VOCAB, filled, tiny_folder

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
        values = json.loads((folder / "config.json").read_text())
        values["text_config"]["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(values))
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return folder


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def trained(cfg: ModelConfig, peft: PeftConfig | None = None) -> Any:
    """Load a model and take a step of AdamW, with weight decay and a gradient for all that has one in a run."""
    model = filled(cfg, peft)
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
    assert any(expected in note for note in file_notes(model))
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
    promised = [each["text_config"].get("mtp_num_hidden_layers") for each in configs]
    assert promised == [1 if kind.startswith("qwen3_5") else None] * 2
    whole, report = AutoModelForImageTextToText.from_pretrained(export, output_loading_info=True)
    assert not report["missing_keys"]
    text = (AutoModelForImageTextToText if kind in IMAGE_TEXT else AutoModelForCausalLM).from_pretrained(export).eval()
    ids = torch.arange(24).reshape(2, 12) + 1
    with torch.no_grad():
        ours = model.eval()(input_ids=ids, use_cache=False).logits
        for each in (whole.eval(), text):
            torch.testing.assert_close(each(input_ids=ids).logits, ours, rtol=1e-5, atol=1e-5)
    loaded = filled(ModelConfig(path=str(export), tokenizer="bytes")).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


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
    (merged,) = export_run(model, byte_tokenizer(), tmp_path, peft)
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


def test_an_export_has_the_older_names_of_its_base(tmp_path: Path) -> None:
    """Gemma 3 was published with names that transformers renames at load."""
    folder = multimodal_folder(tmp_path / "base", "gemma3")
    older = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in stored(folder).items()}
    save_file(older, folder / "model.safetensors", {"format": "pt"})
    after = stored(export_model(trained(ModelConfig(path=str(folder))), byte_tokenizer(), tmp_path / "export"))
    assert after.keys() == older.keys()
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not report["missing_keys"]


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


LAYER = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "input_layernorm",
         "self_attn.o_proj", "mlp.gate", "mlp.experts.0.gate_proj", "mlp.experts.1.gate_proj")  # fmt: skip
"""Modules of an MTP layer in the files of DeepSeek V3 and GLM-4.5, numbered after the last decoder layer."""
BLOCK = ("fc", "norm", "pre_fc_norm_hidden", "layers.0.self_attn.q_proj", "layers.0.mlp.experts.0.up_proj")
"""Modules below `mtp` in the files of Qwen3-Next and Qwen 3.5."""
SPARSE = {
    **EXPERTS, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "shared_expert_intermediate_size": 16,
    "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 1,
}  # fmt: skip
"""Sizes of all families; each takes those that its config has."""
MTP_NAMES: dict[str, tuple[str, ...]] = {
    **{f"{kind} {last}": tuple(f"model.layers.{last}.{name}" for name in LAYER) for kind, last in (
        ("deepseek_v3", 61), ("deepseek_v32", 61), ("glm4_moe", 46), ("glm4_moe", 92), ("glm4_moe_lite", 47),
        ("glm_moe_dsa", 78), ("hy_v3", 80), ("bailing_hybrid", 42), ("dots3_note_text", 46),
        # Numbers that the class does not list, and classes that list none.
        ("deepseek_v3", 2), ("glm4_moe", 2), ("dots1", 2), ("solar_open", 2), ("minimax_m2", 2), ("kimi_linear", 2),
    )},
    **{f"{kind} {prefix}": tuple(f"{prefix}.{name}" for name in BLOCK) for kind, prefix in (
        ("qwen3_next", "mtp"), ("qwen3_5_text", "mtp"), ("qwen3_5_moe_text", "mtp"), ("exaone_moe", "mtp"),
        ("nemotron_h", "mtp"), ("mellum", "mtp"), ("longcat_flash", "model.mtp"), ("mimo_v2_flash", "model.mtp"),
        ("inkling_text", "model.mtp"), ("hy_v4", "model.mtp_layers.0"), ("minimax_m3_vl_text", "model.mtp"),
        ("qwen2", "model.mtp_layers.0"), ("llama", "mtp"),  # whose classes list none
    )},
    "ernie4_5_moe": ("model.mtp_block.0.mlp.experts.0.up_proj", "model.mtp_emb_norm.0", "model.mtp_linear_proj.0"),
    "deepseek_v4": ("mtp.0.attn.wq_a", "mtp.0.e_proj", "mtp.0.enorm", "mtp.0.ffn.experts.0.w1", "mtp.0.norm"),
}  # fmt: skip
"""Model type, and where its layers that predict further tokens are -> their modules, as in published files."""
PROMISES = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1, "mtp_hybrid_override_pattern": "*E"}


def contents(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return the dtype, the shape and the bytes of each tensor; check the index, if there is one."""
    tensors, file_of = {}, {}
    for file in folder.glob("*.safetensors"):
        for name, entry in deserialize(file.read_bytes()):
            tensors[name] = (entry["dtype"], entry["shape"], bytes(entry["data"]))
            file_of[name] = file.name
    if (index := folder / "model.safetensors.index.json").exists():
        sizes = sum(len(data) for _, _, data in tensors.values())
        assert json.loads(index.read_text()) == {"metadata": {"total_size": sizes}, "weight_map": file_of}
    return tensors


def text_folder(folder: Path, kind: str, further: dict[str, torch.Tensor], **values: Any) -> Path:
    """Save a text model in several files, with further tensors in a file of their own, and keys in its config."""
    cls, keys = CONFIG_MAPPING[kind], {field.name for field in fields(CONFIG_MAPPING[kind])}
    sizes = {**TEXT, **LINEAR, **SPARSE, "num_hidden_layers": 2, **values}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(cls(**{key: value for key, value in sizes.items() if key in keys}))
    model.save_pretrained(folder, max_shard_size="50KB")
    weights = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    if further:
        save_file(further, folder / "mtp.safetensors", {"format": "pt"})
        weights |= dict.fromkeys(further, "mtp.safetensors")
    if len(set(weights.values())) > 1 and (folder / "model.safetensors").exists():
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        weights |= {name: "model-1.safetensors" for name in weights if weights[name] == "model.safetensors"}
    size = sum(each.nbytes for each in stored(folder).values())
    body = {"metadata": {"total_size": size}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **PROMISES}))
    return folder


def mixed(names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return a weight of each module, in turns in bfloat16 and float32, and quantized modules beside the last."""
    weights = {
        f"{name}.weight": torch.randn(8, 4).to(torch.bfloat16 if number % 2 else torch.float32)
        for number, name in enumerate(names)
    }
    last = list(weights)[-1].removesuffix("weight")
    return weights | {
        f"{last}float8.weight": torch.randn(8, 4).to(torch.float8_e4m3fn),
        f"{last}float8.weight_scale_inv": torch.rand(2, 1),
        f"{last}e8m0.scale": torch.arange(1, 9, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        f"{last}packed.qweight": torch.arange(8).to(torch.uint32),
        f"{last}packed.tokens": torch.arange(8),
    }


@pytest.mark.parametrize("case", MTP_NAMES)
def test_layers_that_predict_further_tokens_are_copied_byte_for_byte(case: str, tmp_path: Path) -> None:
    kind, further = case.split()[0], mixed(MTP_NAMES[case])
    base = text_folder(tmp_path / "base", kind, further)
    cfg = ModelConfig(path=str(base), tokenizer="bytes", attention=Attention.eager)
    model, before = trained(cfg), contents(base)
    export = export_model(model, byte_tokenizer(), tmp_path / "export", shard_bytes=40_000)
    after = contents(export)
    assert before.keys() == after.keys()
    assert {name: before[name] for name in further} == {name: after[name] for name in further}
    assert sum(int(count) for count in re.findall(r"\((\d+) tensor", " ".join(file_notes(model)))) == len(further)
    assert any(before[name] != after[name] for name in before.keys() - further.keys())
    config = json.loads((export / "config.json").read_text())
    assert {key: config[key] for key in PROMISES} == PROMISES
    again = trained(ModelConfig(path=str(export), tokenizer="bytes", attention=Attention.eager))
    second = contents(export_model(again, byte_tokenizer(), tmp_path / "second"))
    assert {name: before[name] for name in further} == {name: second[name] for name in further}


def test_a_requested_dtype_rounds_copied_tensors_but_those_of_quantized_modules(tmp_path: Path) -> None:
    further = mixed(MTP_NAMES["deepseek_v3 2"])
    model = trained(ModelConfig(path=str(text_folder(tmp_path / "base", "deepseek_v3", further))))
    for dtype in (torch.bfloat16, torch.float32):
        after = stored(export_model(model, byte_tokenizer(), tmp_path / str(dtype), dtype=dtype))
        for name, value in further.items():
            is_rounded = dtype == torch.bfloat16 and value.dtype == torch.float32 and "float8" not in name
            assert after[name].dtype == (dtype if is_rounded else value.dtype)
            assert torch.equal(after[name].view(torch.uint8), value.to(after[name].dtype).view(torch.uint8))


def whole_layer(number: int, of: Path) -> dict[str, torch.Tensor]:
    """Return an MTP layer with all tensors that the last of two decoder layers has."""
    layer = {name: each for name, each in stored(of).items() if name.startswith("model.layers.1.")}
    further = {f"model.layers.1.{name}.weight": torch.randn(32) for name in ("enorm", "hnorm")}
    return {name.replace(".1.", f".{number}.", 1): each.clone() for name, each in {**layer, **further}.items()}


@pytest.mark.parametrize("kind", ["solar_open", "glm4_moe"])
def test_a_deeper_model_does_not_load_an_mtp_layer_as_a_decoder_layer(kind: str, tmp_path: Path) -> None:
    further = whole_layer(2, text_folder(tmp_path / "plain", kind, {}))
    base = text_folder(tmp_path / "base", kind, further)
    with pytest.raises(ConfigError, match=r"its files lack tensors of .*: model\.layers\.2\.") as error:
        trained(ModelConfig(path=str(base), config={"num_hidden_layers": 3}))
    assert "contain tensors" not in str(error.value)


def test_layers_that_a_smaller_model_leaves_out_are_refused(tmp_path: Path) -> None:
    """The class of GLM-4.5 ignores layer 46, the MTP layer of GLM-4.5 Air, and a decoder layer of GLM-4.5."""
    base = text_folder(tmp_path / "base", "glm4_moe", {}, num_hidden_layers=47, n_routed_experts=2)
    with pytest.raises(ConfigError, match=r"that Glm4MoeForCausalLM does not have: model\.layers\.46\."):
        trained(ModelConfig(path=str(base), config={"num_hidden_layers": 46}))


def test_decoder_layers_that_the_config_does_not_count_are_refused(tmp_path: Path) -> None:
    base = text_folder(tmp_path / "base", "glm4_moe", {}, num_hidden_layers=3)
    config = {**json.loads((base / "config.json").read_text()), "num_hidden_layers": 2}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"contain tensors that Glm4MoeForCausalLM does not have: model\.layers\.2\."):
        trained(ModelConfig(path=str(base)))


@pytest.mark.parametrize("name", ["model.layers.1.mtp.weight", "model.extra.weight", "smtp.weight"])
def test_an_unexpected_tensor_in_the_decoder_is_refused(name: str, tmp_path: Path) -> None:
    base = text_folder(tmp_path / "base", "llama", {name: torch.ones(2), "mtp.norm.weight": torch.ones(2)})
    with pytest.raises(ConfigError, match=rf"LlamaForCausalLM does not have: {re.escape(name)}$"):
        trained(ModelConfig(path=str(base)))


def test_two_stored_tensors_of_one_parameter_are_refused(tmp_path: Path) -> None:
    """transformers renames both, and the last one would win."""
    base = text_folder(tmp_path / "base", "axk1", {"model.layers.1.mlp.post_mlp_layernorm.weight": torch.randn(32)})
    with pytest.raises(ConfigError, match=r"does not have: model\.layers\.1\.post_mlp_layernorm\.weight$"):
        trained(ModelConfig(path=str(base), attention=Attention.eager))


def test_only_constants_of_modules_of_the_model_are_left_out(tmp_path: Path) -> None:
    """Masks of old GPT-2 files are computed today; a bias of the same name may be a weight elsewhere."""
    owned = {f"mtp.0.{name}": torch.randn(4) for name in ("attn.bias", "rotary_emb.inv_freq", "version")}
    masks = {f"h.{number}.attn.bias": torch.ones(1, 1, 4, 4) for number in range(2)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES["gpt2"]))
    model.save_pretrained(tmp_path / "base")
    base = {name.removeprefix("transformer."): each for name, each in stored(tmp_path / "base").items()}
    save_file({**base, **masks, **owned}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    export = export_model(trained(ModelConfig(path=str(tmp_path / "base"))), byte_tokenizer(), tmp_path / "export")
    assert stored(export).keys() == {*base, *owned}
    assert all(torch.equal(stored(export)[name], value) for name, value in owned.items())


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
@pytest.mark.parametrize("fault", ["gone", "damaged"])
def test_without_the_files_of_the_base_the_weights_are_exported(
    kind: str, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of a run; a script fails, because it can be repeated."""
    base = multimodal_folder(tmp_path / "base", kind)
    model = trained(ModelConfig(path=str(base)))
    values = {name: each.clone() for name, each in model.state_dict().items()}
    if fault == "gone":
        shutil.rmtree(base)
    else:
        (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=str(base)):
        export_stored(model, byte_tokenizer(), tmp_path / "stored", lambda name, index: values[name][index])
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("stored")]
    export = export_model(model, byte_tokenizer(), tmp_path / "export")
    assert "scripts/export.py" in caplog.text
    assert "## Not copied" in (export / "README.md").read_text()
    auto_class = AutoModelForCausalLM if kind == "qwen3_5" else AutoModelForImageTextToText
    plain, report = auto_class.from_pretrained(export, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(torch.equal(each, plain.state_dict()[name]) for name, each in values.items())


def test_a_base_that_announces_nothing_is_not_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = tiny_folder(tmp_path / "base", "llama")
    model = trained(ModelConfig(path=str(base)))
    (base / "model.safetensors").unlink()
    assert "Not copied" not in (export_model(model, byte_tokenizer(), tmp_path / "out") / "README.md").read_text()
    assert not caplog.text


def test_the_average_of_exports_holds_what_is_not_trained_in_its_dtype(tmp_path: Path) -> None:
    """Float32 tensors beside a model in bfloat16."""
    further = mixed(MTP_NAMES["glm4_moe 46"])
    cfg = ModelConfig(path=str(text_folder(tmp_path / "base", "glm4_moe", further)), dtype=DType.bfloat16)
    for name in ("a", "b"):
        export_model(trained(cfg), byte_tokenizer(), tmp_path / name)
    assert average([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")]) == 0
    before, after = contents(tmp_path / "a"), contents(tmp_path / "out")
    assert {name: after[name] for name in further} == {name: before[name] for name in further}
    assert {name: each[0] for name, each in after.items()} == {name: each[0] for name, each in before.items()}
