"""Extended context (model.rope): logits in float64 equal those of transformers with the same rope parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components.config.schema.model import DType, ModelConfig, RopeConfig, RopeType, WeightInit
from components.config.shape import NOT_ROTARY, read_shape
from components.models import build_on_meta, fill_weights, materialize
from components.protocol.errors import ConfigError
from tests.tiny_models import FAMILIES, GPT2_SIZES, SIZES, tiny_folder

LENGTH = 64
"""Context of the tiny models; the logits are compared for twice as many tokens."""
SCALED: dict[RopeType, tuple[RopeConfig, dict[str, Any]]] = {
    RopeType.linear: (RopeConfig(type=RopeType.linear, factor=4), {"rope_type": "linear", "factor": 4.0}),
    RopeType.yarn: (
        RopeConfig(type=RopeType.yarn, factor=4, beta_fast=8, attention_factor=1.2),
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "attention_factor": 1.2},
    ),
    RopeType.llama3: (
        RopeConfig(type=RopeType.llama3, factor=4),
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**FAMILIES[family], "max_position_embeddings": LENGTH, **changes}


def saved(folder: Path, family: str) -> Path:
    """Save a model of a family with a context of LENGTH tokens."""
    tiny_folder(folder, family)
    values = config_of(family)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.architectures = ["ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", SCALED, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_logits_equal_transformers_with_the_same_parameters(tmp_path: Path, family: str, kind: RopeType) -> None:
    folder = str(saved(tmp_path, family))
    rope, parameters = SCALED[kind]
    cfg = ModelConfig(path=folder, dtype=DType.float64, rope=rope)
    model = build_on_meta(cfg)
    materialize(model, "cpu")
    fill_weights(model, cfg, seed=5)
    model.eval()

    theta = AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"]
    original = {} if kind is RopeType.linear else {"original_max_position_embeddings": LENGTH}
    expected_config = AutoConfig.from_pretrained(folder)
    expected_config.max_position_embeddings = 4 * LENGTH
    expected_config.rope_parameters = {"rope_theta": theta, **parameters, **original}
    reference = AutoModelForCausalLM.from_pretrained(folder, config=expected_config, dtype=torch.float64).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    ids = torch.randint(0, SIZES["vocab_size"], (2, 2 * LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected, unscaled = (each(input_ids=ids).logits for each in (model, reference, plain))
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert (unscaled - expected).abs().max() > 1e-3
    model.config.save_pretrained(tmp_path / "export")
    again = AutoConfig.from_pretrained(tmp_path / "export")
    assert again.max_position_embeddings == 4 * LENGTH
    assert {key: again.rope_parameters[key] for key in parameters} == parameters


def scratch(rope: RopeConfig, values: dict[str, Any]) -> ModelConfig:
    return ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=values, rope=rope)


YARN = RopeConfig(type=RopeType.yarn, factor=2)
LLAMA3 = FAMILIES["llama3"] | {"max_position_embeddings": 512}


def test_scaling_of_a_scaled_model_needs_its_original_length(tmp_path: Path) -> None:
    values = {**LLAMA3, "rope_parameters": dict(LLAMA3["rope_parameters"])}
    config = AutoConfig.for_model(**values)
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"=null: the model's positions are scaled already \(llama3, from 64 to 512\)"
    ):
        build_on_meta(ModelConfig(path=str(tmp_path), tokenizer="bytes", rope=YARN))
    rope = RopeConfig(type=RopeType.yarn, factor=16, original_max_position_embeddings=64)
    model = build_on_meta(ModelConfig(path=str(tmp_path), tokenizer="bytes", rope=rope))
    assert model.config.max_position_embeddings == 1024
    assert model.config.rope_parameters == {
        "rope_theta": 5e5, "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64
    }  # fmt: skip
    short = RopeConfig(type=RopeType.yarn, factor=2, original_max_position_embeddings=64)
    with pytest.raises(
        ConfigError, match=r"factor=2: gives a context of 64 x 2 = 128 tokens, less than .* own 512; set"
    ):
        build_on_meta(ModelConfig(path=str(tmp_path), tokenizer="bytes", rope=short))


FALCON = {"vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA3 = {**SIZES, "model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**GPT2_SIZES, "model_type": "gpt2"}, r"model.rope.type=yarn: GPT2Config has no rotary position embeddings"),
        (GEMMA3, r"the layers of Gemma3TextConfig have different rotary position embeddings \(.*full_attention"),
        (
            {**FALCON, "model_type": "falcon", "alibi": True, "max_position_embeddings": 64},
            r"model.rope.type=yarn: FalconConfig has no rotary position embeddings",
        ),
        (FAMILIES["phi3"], r"model.rope.type=yarn: Phi3Config rejects it: .*must be one of \['longrope'\]"),
    ],
    ids=["none", "per layer", "alibi", "own types"],
)
def test_models_without_one_kind_of_rope_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_on_meta(scratch(YARN, values))


def test_further_parameters_of_the_own_scaling_are_not_dropped(tmp_path: Path) -> None:
    values = config_of("llama", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 0.7})
    AutoConfig.for_model(**values).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"own scaling \(yarn\) also has mscale; set model/rope=none and"):
        build_on_meta(ModelConfig(path=str(tmp_path), tokenizer="bytes", rope=YARN))


def test_model_types_without_rope_parameters_are_known_before_torch_is_imported() -> None:
    """The table agrees with transformers."""
    for kind in NOT_ROTARY:
        assert not getattr(AutoConfig.for_model(kind), "rope_parameters", None), kind
        assert read_shape(scratch(RopeConfig(), {"model_type": kind})).rotary is False
    assert read_shape(scratch(RopeConfig(), {"model_type": "llama"})).rotary is None
