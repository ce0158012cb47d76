"""Sizes and weights that the planner derives from a config, against the model that transformers builds from it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from components.config.schema.model import ModelConfig
from components.config.shape import ModelShape, read_shape
from components.models.anatomy import SLIDING, read_anatomy
from components.planning.formulas import step_time
from components.planning.formulas.architecture import FAMILIES, Architecture, read_architecture
from components.protocol.errors import ConfigError
from components.training.step_cost import model_flops
from tests.config.composed import config_of
from tests.config.ready import HUB_MODELS, NOT_PLANNED
from tests.unit.test_planning_time import workload

SIZES = {
    "hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
    "intermediate_size": 160, "vocab_size": 1000, "pad_token_id": 0, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "sliding_window": 8,
}  # fmt: skip


def build(family: str) -> nn.Module:
    """Build a small model of a family on meta, with all sizes distinct."""
    cls = CONFIG_MAPPING[family]
    sizes = {**SIZES, "head_dim": 16} if family == "helium" else SIZES  # its heads are as wide as the hidden states
    if family == "gpt2":
        values: dict[str, Any] = {"n_embd": 96, "n_layer": 6, "n_head": 6, "vocab_size": 1000}
    else:
        values = {name: sizes[name] for name in {each.name for each in fields(cls)} & set(sizes)}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(cls(**values))


def architecture(model: nn.Module, folder: Path) -> Architecture:
    """Read the architecture from the config.json that the model saves."""
    folder.joinpath("config.json").write_text(model.config.to_json_string(use_diff=False))
    return read_architecture(read_shape(ModelConfig(path=str(folder))), "the model")


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_flops_equal_those_of_the_built_model(family: str, tmp_path: Path) -> None:
    model = build(family)
    read = architecture(model, tmp_path)
    anatomy = read_anatomy(model)

    assert read.parameters == sum(each.numel() for each in model.parameters())
    built = (len(anatomy.layers), anatomy.hidden_size, anatomy.vocabulary, anatomy.tied)
    assert (read.layers, read.hidden, read.vocab, read.tied) == built
    assert (read.heads, read.kv_heads) == (anatomy.heads, anatomy.kv_heads)
    assert anatomy.widths is not None
    assert read.head_dim == anatomy.widths.keys
    assert bool(read.experts) == bool(anatomy.experts)
    assert read.experts_per_token == (anatomy.experts_per_token or 0)
    assert read.windowed_layers == anatomy.kinds.count(SLIDING)
    assert read.step_flops_per_row(64) == pytest.approx(model_flops(model).of([64]), rel=1e-12)


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, LlamaForCausalLM])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_flops_are_those_of_the_head_that_the_model_has(kind: type, tied: bool) -> None:
    """Against transformers: 6 FLOPs per token and matrix element, 12 per pair of tokens and element of a head."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, num_labels=3,
    )  # fmt: skip
    model = kind(config)
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64, "vocab": 1000, "mlp": 128, "head_dim": 16}
    architecture = read_architecture(ModelShape(family="llama", tied=tied, **sizes), "llama")
    labels = 3 * (kind is LlamaForSequenceClassification)
    w = workload(architecture=architecture, labels=labels)
    assert w.parameters == sum(each.numel() for each in model.parameters())
    linear = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
    pairs = w.seq_len * (w.seq_len + 1) / 2
    assert step_time.model_flops(w) == pytest.approx(w.rows_per_step * (6 * linear * w.seq_len + 12 * 2 * 64 * pairs))


def test_family_defaults_are_those_of_transformers() -> None:
    for name, family in FAMILIES.items():
        config = CONFIG_MAPPING[name]()
        assert family.tied == config.tie_word_embeddings, name
        head_dim = config.to_dict().get("head_dim")
        assert read_default(name).head_dim == (head_dim or config.hidden_size // config.num_attention_heads), name


def read_default(family: str) -> Architecture:
    """Read the architecture of a family's default sizes, without the values that a family may derive."""
    config = CONFIG_MAPPING[family]()
    sizes = {"layers": config.num_hidden_layers, "hidden": config.hidden_size, "heads": config.num_attention_heads}
    experts = {"experts": 4, "experts_per_token": 2}
    shape = ModelShape(family=family, vocab=config.vocab_size, mlp=64, **sizes, **experts)
    return read_architecture(shape, family)


def test_a_rank_of_tp_and_ep_holds_its_share_of_each_weight() -> None:
    whole = read_default("qwen3_moe")
    local = {each.name: each for each in whole.layer_weights(tp=2, ep=4)}
    for each in whole.layer_weights():
        parts = {"rows": 2, "columns": 2, "experts": 8, "replicated": 1}[each.sharding]
        assert local[each.name].size * parts == each.size, each.name


def test_fsdp_shards_dim_0_in_equal_chunks_of_which_the_last_may_be_smaller(tmp_path: Path) -> None:
    weight = next(read_default("llama").outer_weights())
    parameter = torch.empty(weight.rows, weight.width, device="meta")
    for ranks in (1, 3, 7, 64):
        assert weight.shard(ranks) == parameter.chunk(ranks)[0].numel()


def test_unknown_sizes_and_families_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"model.path=me/mine: its sizes are unknown.*set model.family"):
        read_architecture(ModelShape(), "me/mine")
    with pytest.raises(ConfigError, match=r"model=me/mine: model.mlp unknown; set the missing sizes"):
        read_architecture(ModelShape(family="llama", layers=2, hidden=8, heads=2, vocab=16), "me/mine")
    with pytest.raises(ConfigError, match=r"model.family=mamba: the formulas do not cover this model type"):
        read_architecture(ModelShape(family="mamba"), "me/mine")


def test_options_of_hub_models_state_every_size() -> None:
    """`python scripts/plan.py model=NAME` needs no hub."""
    for name, option in HUB_MODELS.items():
        known = {key: option.values[key] for key in option.values if key in {each.name for each in fields(ModelShape)}}
        assert json.dumps(known)
        if name in NOT_PLANNED:
            with pytest.raises(ConfigError, match="the formulas do not cover this model type"):
                read_architecture(ModelShape(**known), name)
        else:
            assert read_architecture(ModelShape(**known), name).parameters > 0, name


def test_sizes_that_a_local_config_omits_are_not_those_of_the_option(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **sizes}))
    cfg = config_of("finetune", f"model.path={tmp_path}")
    assert read_architecture(read_shape(cfg.model), "llama").parameters == 6_738_415_616  # Llama 7B
