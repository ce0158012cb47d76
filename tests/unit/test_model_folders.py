"""Folders of models that are wrong, and the sizes and table of the ready models against transformers."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig

from components.config.compose.sources import CONF
from components.config.model_files import ModelFiles, check_settings
from components.config.schema.model import Attention, CausalLMConfig, RouterAux, WeightInit
from components.config.shape import CONFIG_NAMES, ModelShape, read_shape, size_problems
from components.models.anatomy import read_anatomy
from components.models.build import build_on_meta, load_config, model_shape
from components.models.tokenizer import byte_tokenizer, load_tokenizer
from components.models.weights.loading import load_weights, weight_reader
from components.models.weights.weight_sources import SafetensorsTensors, find_safetensors, require_finite, saved_tensors
from components.planning.formulas.architecture import read_architecture
from components.planning.simulation import buildable
from components.protocol.errors import ConfigError
from components.protocol.safe_parsing import load_yaml
from tests import model_table
from tests.config.ready import HUB_MODELS
from tests.distributed import test_lora, test_tp_plan
from tests.tiny_models import tiny_folder

DEEP = "[" * 100_000 + "]" * 100_000
SIZES = {
    "hidden_size": [0, -1, 10**12, 64.0, "64", None, True, float("nan"), [64]],
    "num_hidden_layers": [0, -2, 10**9, None, "two"],
    "num_attention_heads": [0, -4, 2.5, True],
    "num_key_value_heads": [0, 3, -1, 10**6],
    "vocab_size": [0, -1, 10**15, None],
    "intermediate_size": [0, -1, "wide", [64, -1]],
    "head_dim": [0, -16, "16"],
    "max_position_embeddings": [0, -1, 10**12],
    "rms_norm_eps": [-1e-6, float("nan"), float("inf"), "small", True],
    "initializer_range": [-1, float("nan")],
    "attention_dropout": [-0.1, 1.5, "x"],
    "sliding_window": [-1, "x", 2.5],
    "num_experts_per_tok": [-1, 2**40, "x"],
    "rope_theta": [-1.0, float("inf"), "10000"],
    "rope_parameters": [7, {"rope_type": "linear", "factor": -2}, {"full_attention": {"rope_theta": float("nan")}}],
    "rope_scaling": ["yarn", {"rope_type": "yarn", "factor": "four"}],
    "layer_types": [["full_attention"], [1, 2], "full_attention"],
    "tie_word_embeddings": [1, "no"],
    "model_type": [3],
    "text_config": [[1], "x"],
}


def llama(**values: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {"model_type": "llama", **sizes, "vocab_size": 264, "intermediate_size": 96, **values}


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("nested", [False, True])
def test_wrong_number_in_a_config_is_named_before_torch(key: str, nested: bool, tmp_path: Path) -> None:
    for value in SIZES[key]:
        config = {"model_type": "x", "text_config": llama(**{key: value})} if nested else llama(**{key: value})
        (tmp_path / "config.json").write_text(json.dumps(config))
        if nested and key == "text_config":
            continue
        with pytest.raises(ConfigError) as error:
            read_shape(CausalLMConfig(path=str(tmp_path)))
        (problem,) = error.value.problems
        assert problem.startswith(f"model.path={tmp_path}: config.json: {key}="), problem
        assert "must" in problem
        assert len(problem) < 300 + len(str(tmp_path))


def test_wrong_override_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    overrides = {"model_type": "llama", "num_hidden_layers": -1}
    for place in ({"path": str(tmp_path)}, {"path": None, "init": WeightInit.random, "tokenizer": "bytes"}):
        model = CausalLMConfig(config=overrides, **place)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="^model.config.num_hidden_layers=-1: must be a whole number from 1 to"):
            read_shape(model)


def test_default_configs_of_transformers_are_accepted() -> None:
    """All of decoders; lists per layer, null and the infinite limits of Mamba among them."""
    for kind in (
        *("llama", "gpt2", "gemma3_text", "gemma3", "gemma3n", "mamba2", "deepseek_v3", "gpt_oss", "qwen3_moe"),
        *("phi3", "falcon", "bloom", "opt", "nemotron_h", "lfm2", "qwen3_next", "glm4_moe", "openelm"),
    ):
        if kind in CONFIG_MAPPING:
            assert size_problems(CONFIG_MAPPING[kind]().to_dict(), kind) == []
    assert size_problems(LlamaConfig(num_hidden_layers=4).to_dict(), "x", {"num_hidden_layers": 2}) == []


@pytest.mark.parametrize(
    "change", [{"hidden_size": 62}, {"hidden_act": "no such"}, {"rope_parameters": {"rope_type": "x"}}]
)
def test_what_only_transformers_knows_is_a_config_error(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama(**change)))
    with pytest.raises(ConfigError, match="model"):
        build_on_meta(CausalLMConfig(path=str(tmp_path), dtype="float32"))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json", "added_tokens.json"]
)
@pytest.mark.parametrize("content", [DEEP, "{", "[1]", b"\xff\xfe", '{"a": "\\ud800"}', ""])
def test_settings_that_are_no_object_are_named(name: str, content: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (problem,) = check_settings(str(tmp_path))
    assert problem.startswith(f"model.path={tmp_path}: {name} ")


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "chat_template.jinja", "x.model"])
def test_pipe_in_a_folder_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    assert check_settings(str(tmp_path)) == []
    os.mkfifo(tmp_path / name)
    assert check_settings(str(tmp_path)) == [
        f"model.path={tmp_path}: {name} is a pipe or a device; replace it by a regular file"
    ]


def gguf(key: bytes, kind: int, value: bytes) -> bytes:
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry


@pytest.mark.parametrize(
    "content",
    [
        gguf(b"llama.block_count", 4, struct.pack("<I", 0)),
        gguf(b"llama.embedding_length", 11, struct.pack("<q", -64)),
        gguf(b"llama.vocab_size", 10, struct.pack("<Q", 2**60)),
        gguf(b"a", 8, struct.pack("<Q", 2**62)),
        gguf(b"a", 9, struct.pack("<IQ", 7, 2**50)),
        gguf(b"a", 9, struct.pack("<IQ", 9, 1) * 5000),
        gguf(b"a", 99, b""),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63) + b"\0" * 100,
        b"GGUX" + b"\0" * 40,
        b"",
    ],
)
def test_gguf_header_that_lies_is_a_config_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"m\.gguf: (its header|the GGUF header cannot be read)"):
        read_shape(CausalLMConfig(path=str(tmp_path / "m.gguf")))


def head_as(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)

    return change


def holding(value: float, name: str = "model.layers.1.mlp.up_proj.weight") -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return change


def read_all(model: torch.nn.Module, cfg: CausalLMConfig) -> None:
    read = weight_reader(model, cfg, 0)
    for name, tensor in saved_tensors(model).items():
        read(name, tuple(slice(0, size) for size in tensor.shape))


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (head_as(torch.int64), r"hold 1 parameters that are not floating-point numbers: lm_head.weight \(I64\)"),
        (head_as(torch.bool), r"hold 1 parameters that are not floating-point numbers: lm_head.weight \(BOOL\)"),
        (
            holding(float("nan"), "model.norm.weight"),
            "the stored tensor model.norm.weight holds NaN or infinite values",
        ),
        (holding(float("inf"), "lm_head.weight"), "the stored tensor lm_head.weight holds NaN or infinite values"),
        (holding(-float("inf"), "model.embed_tokens.weight"), "model.embed_tokens.weight holds NaN or infinite"),
    ],
)
def test_weights_that_cannot_be_trained_are_named(
    family: str, change: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path, family)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    cfg = CausalLMConfig(path=str(folder), dtype="float32")
    model = build_on_meta(cfg).to_empty(device="cpu")
    with pytest.raises(ConfigError, match=message):
        load_weights(model, cfg)
    with pytest.raises(ConfigError, match=message):
        read_all(model, cfg)


def test_largest_finite_weights_are_accepted() -> None:
    """Their sum overflows."""
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    for values in (
        largest,
        torch.full((1000,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.int64),
        torch.ones(3).to(torch.float8_e4m3fn),
    ):
        assert require_finite(values, "x") is values


def lying(change: Callable[[dict[str, Any]], None]) -> bytes:
    header = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]},
    }
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 32


@pytest.mark.parametrize(
    "content",
    [
        lying(lambda header: header["b"].update(data_offsets=[16, 2**40])),
        lying(lambda header: header["b"].update(data_offsets=[8, 24])),
        lying(lambda header: header["b"].update(dtype="F64")),
        lying(lambda header: header["b"].update(dtype="Q4")),
        lying(lambda header: header["b"].update(shape=[2**62, 4])),
        lying(lambda header: header["b"].update(shape=[-4])),
        lying(lambda header: header["b"].update(data_offsets=[32, 16])),
        lying(lambda header: header.update(c=header["b"])),
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", len(DEEP)) + DEEP.encode(),
        struct.pack("<Q", 2) + b"[]",
        b"\0" * 4,
        b"",
    ],
)
def test_safetensors_header_that_lies_is_a_config_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a readable safetensors file"):
        SafetensorsTensors([tmp_path / "model.safetensors"])


def test_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"shared": torch.zeros(2), f"own{number}": torch.zeros(2)}, tmp_path / f"{number}.safetensors")
    with pytest.raises(ConfigError, match=r"2\.safetensors: holds shared, which 1\.safetensors holds too"):
        SafetensorsTensors([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])


@pytest.mark.parametrize("index", [DEEP, "[]", "{}", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 3}}', "\0"])
def test_index_that_lies_is_a_config_error(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: (not a valid index|lists )"):
        find_safetensors(ModelFiles(str(tmp_path)), None)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", DEEP),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"added_tokens": [], "model": null}'),
        ("tokenizer.json", '{"added_tokens": [{"id": 1099511627776, "content": "x"}], "model": {"type": "BPE"}}'),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
        ("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": "x"}'),
        ("tokenizer_config.json", '{"eos_token": {"a": 1}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("special_tokens_map.json", '{"eos_token": [1]}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_damaged_tokenizer_is_a_config_error(name: str, content: str | bytes, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="the tokenizer cannot be read: |in tokenizer_config.json must be a"):
        load_tokenizer(CausalLMConfig(path=str(tmp_path)))


BEYOND_SIZES: dict[str, dict[str, Any]] = {
    "glm4_32b": {"attention_bias": False},
    "glm4_5": {"use_qk_norm": True, "attention_bias": True},
    "glm4_5_air": {"attention_bias": True},
}
"""Values of config.json that are no sizes and no defaults of transformers, from the sources that the options state."""
DEFAULTS = (
    *("deepseek_v3", "ernie4_5_0_3b", "glm4_9b", "gpt_oss_120b", "smollm3_3b", "qwen3_5_9b", "qwen3_6_35b_a3b"),
    *("qwen3_next_80b_a3b", "olmo_hybrid_7b", "kimi_linear_48b_a3b"),
)
"""Models whose sizes are the defaults of transformers' config class."""


def stated_shape(values: dict[str, Any]) -> ModelShape:
    """Return the sizes that an option states."""
    return ModelShape(**{name: values[name] for name in ModelShape.__slots__ if name in values})


def config_of(name: str, values: dict[str, Any]) -> PreTrainedConfig:
    """Return transformers' config with the sizes of an option."""
    config_class = CONFIG_MAPPING[values["family"]]
    known = {*config_class().to_dict(), *config_class.attribute_map, "head_dim"}
    sizes = {key: values[size] for size, keys in CONFIG_NAMES.items() if size in values for key in keys if key in known}
    if "expert_mlp" in values and "moe_intermediate_size" not in known:
        sizes["intermediate_size"] = values["expert_mlp"]
    beyond = {**BEYOND_SIZES.get(name, {}), **values.get("config", {})}
    if name == "nemotron3_nano_30b_a3b":  # its pattern says how many layers it has
        sizes.pop("num_hidden_layers", None)
    return config_class(**sizes, pad_token_id=0, **beyond)


@pytest.mark.parametrize("name", HUB_MODELS)
def test_sizes_equal_those_of_the_model_on_meta(name: str, tmp_path: Path) -> None:
    option = HUB_MODELS[name]
    config_of(name, option.values).save_pretrained(tmp_path)
    cfg = CausalLMConfig(**{**option.values, "path": str(tmp_path), "tokenizer": "bytes"})
    cfg.attention = Attention(cfg.attention)
    model = build_on_meta(cfg)
    built, stated, anatomy = model_shape(model), stated_shape(option.values), read_anatomy(model)
    parameters = sum(each.numel() for each in model.parameters())

    for size in ("layers", "heads", "kv_heads", "hidden", "vocab", "experts", "experts_per_token"):
        assert getattr(built, size) == getattr(stated, size), size
    assert (len(anatomy.layers), anatomy.tied) == (stated.layers, stated.tied)
    assert bool(anatomy.experts) == bool(stated.experts)
    assert model.config.model_type == stated.family
    planned = read_architecture(stated, name).parameters
    assert planned == pytest.approx(parameters, rel=2e-5), (planned, parameters)  # a bias of GLM-4 32B is off
    if option.published is not None:
        count, half_a_unit = option.published
        assert abs(parameters - count) <= max(0.01 * count, half_a_unit), (parameters, count)


@pytest.mark.parametrize("name", HUB_MODELS)
def test_a_dry_run_builds_the_sizes_of_an_option(name: str) -> None:
    """Without files of the model, as on a machine that does not have it."""
    values = HUB_MODELS[name].values
    cfg = CausalLMConfig(**{**values, "attention": Attention(values.get("attention", "sdpa"))})
    stated = read_shape(cfg)
    built = load_config(buildable(cfg, stated))
    for size in ("layers", "heads", "kv_heads", "hidden", "vocab", "experts", "head_dim", "experts_per_token", "tied"):
        if getattr(stated, size) is not None:
            assert getattr(model_shape(built), size) in (getattr(stated, size), None), size
    experts = stated.expert_mlp
    assert experts in (None, getattr(built, "moe_intermediate_size", getattr(built, "intermediate_size", None)))


@pytest.mark.parametrize("name", DEFAULTS)
def test_models_that_are_defaults_of_transformers_state_them(name: str) -> None:
    values = HUB_MODELS[name].values
    config = CONFIG_MAPPING[values["family"]]().to_dict()
    for size, keys in CONFIG_NAMES.items():
        key = next((key for key in keys if key in config), None)
        if size in values and key is not None:
            assert values[size] == config[key], size


@pytest.mark.parametrize("name", ["gpt_oss_20b", "gpt_oss_120b"])
def test_gpt_oss_trains_without_the_router_loss_that_its_config_states(name: str) -> None:
    """A coefficient of 0.9 with output_router_logits=false, under which transformers adds none."""
    assert CausalLMConfig(**HUB_MODELS[name].values).router_aux == RouterAux.none


def test_several_models_state_their_published_number_of_parameters() -> None:
    assert sum(option.published is not None for option in HUB_MODELS.values()) >= 12


def test_an_option_sets_the_sizes_of_its_path() -> None:
    """Planning needs no file of the model."""
    values = load_yaml((CONF / "model" / "olmo3_7b.yaml").read_text())
    read = read_shape(CausalLMConfig(**values))
    assert replace(read, experts=None, shared_mlp=None, rotary=None) == stated_shape(values)


def test_a_wrong_size_is_detected() -> None:
    """With planted values: the number of parameters is off by more than 1 % of the published one."""
    option = HUB_MODELS["llama3_2_3b"]
    assert option.published is not None
    for wrong in ({"layers": 29}, {"mlp": 8448}, {"tied": False}, {"vocab": 151936}):
        count = read_architecture(stated_shape({**option.values, **wrong}), "planted").parameters
        assert abs(count - option.published[0]) > 0.01 * option.published[0], wrong


needs_case_lists = pytest.mark.skipif(
    os.environ.get("MESHBOOK_ALL_PARITY") == "1", reason="the lists of cases are then those of make parity"
)


@needs_case_lists
def test_the_file_is_what_the_generator_writes() -> None:
    assert model_table.FILE.read_text() == model_table.render(), "run: python -m tests.model_table --write"


@needs_case_lists
def test_a_cell_is_empty_without_its_case() -> None:
    """The marks follow from the cases: without them the cell says that nothing tests it."""
    whole = model_table.collect()
    assert whole.levels["all parameters", "stablelm", "tp"] is model_table.Level.ci
    assert whole.levels["QLoRA", "llama", "dp_shard"] is model_table.Level.ci
    others = {name: each for name, each in test_tp_plan.FAMILIES.items() if each["model_type"] != "stablelm"}
    lora = {
        world: [each for each in cases if not each.peft.quantizes] for world, cases in test_lora.DEFAULT_CASES.items()
    }
    with mock.patch.object(test_tp_plan, "FAMILIES", others), mock.patch.object(test_lora, "DEFAULT_CASES", lora):
        fewer = model_table.collect()
    assert fewer.levels["all parameters", "stablelm", "tp"] is model_table.Level.nothing
    assert fewer.levels["QLoRA", "llama", "dp_shard"] is model_table.Level.parity


@needs_case_lists
def test_every_option_and_its_family_have_a_row() -> None:
    lines = model_table.FILE.read_text().splitlines()
    for name, option in HUB_MODELS.items():
        assert any(line.startswith(f"| `{name}` | `{option.values['path']}` |") for line in lines), name
        assert any(line.startswith(f"| `{option.values['family']}` | ") for line in lines), name
