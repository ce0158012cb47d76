"""The sizes of every option of a hub model, against the model that transformers builds from them on meta."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from components.config.compose.sources import CONF
from components.config.schema.model import Attention, CausalLMConfig, RouterAux
from components.config.shape import CONFIG_NAMES, ModelShape, read_shape
from components.models.anatomy import read_anatomy
from components.models.build import build_on_meta, load_config, model_shape
from components.planning.formulas.architecture import read_architecture
from components.planning.simulation import buildable
from components.protocol.safe_parsing import load_yaml
from tests.config.ready import HUB_MODELS, NOT_PLANNED

BEYOND_SIZES: dict[str, dict[str, Any]] = {
    "glm4_32b": {"attention_bias": False},
    "glm4_5": {"first_k_dense_replace": 3, "use_qk_norm": True, "attention_bias": True},
    "glm4_5_air": {"attention_bias": True},
}
"""Values of config.json that are no sizes and no defaults of transformers, from the sources that the options state."""
DEFAULTS = ("deepseek_v3", "ernie4_5_0_3b", "glm4_9b", "gpt_oss_120b", "smollm3_3b")
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
    return config_class(**sizes, pad_token_id=0, **BEYOND_SIZES.get(name, {}))


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
    if name not in NOT_PLANNED:
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
    assert experts in (None, getattr(built, "moe_intermediate_size", built.intermediate_size))


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
