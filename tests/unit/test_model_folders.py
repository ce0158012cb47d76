"""Folders of models that hold wrong numbers, files without end, or weights that cannot be trained."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig

from components.config.errors import ConfigError
from components.config.model_files import check_settings, size_problems
from components.config.schema.model import CausalLMConfig, WeightInit
from components.config.shape import read_shape

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
    decoders = [
        "llama",
        "gpt2",
        "gemma3_text",
        "gemma3",
        "gemma3n",
        "mamba2",
        "deepseek_v3",
        "gpt_oss",
        "qwen3_moe",
        "phi3",
    ]
    for kind in [*decoders, "falcon", "bloom", "opt", "nemotron_h", "lfm2", "qwen3_next", "glm4_moe", "openelm"]:
        if kind in CONFIG_MAPPING:
            assert size_problems(CONFIG_MAPPING[kind]().to_dict(), kind) == []
    assert size_problems(LlamaConfig(num_hidden_layers=4).to_dict(), "x", {"num_hidden_layers": 2}) == []


@pytest.mark.parametrize(
    "change", [{"hidden_size": 62}, {"hidden_act": "no such"}, {"rope_parameters": {"rope_type": "x"}}]
)
def test_what_only_transformers_knows_is_a_config_error(change: dict[str, Any], tmp_path: Path) -> None:
    from components.models.build import build_on_meta

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
