"""Structure of models of many families, which does not depend on when it is read."""

from __future__ import annotations

import pickle
import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from components import models
from components.config.schema import PeftConfig
from components.config.schema.parallelism import ActivationCheckpointing
from components.distributed.tp_plan import read_heads
from components.models.anatomy import _LAYER_COUNTS, Anatomy, _passes_window, read_anatomy
from components.protocol.errors import ConfigError
from components.training.step_cost import model_flops
from tests.fuzz.families import DENSE, SPARSE, draw_config

LAYERS = 3
FAMILIES = {family: draw_config(random.Random(0), family, 64, LAYERS, 64) for family in (DENSE | SPARSE)}
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def build(values: dict[str, Any]) -> Any:
    """Build a model on the meta device from config values."""
    config = AutoConfig.for_model(values["model_type"], **{k: v for k, v in values.items() if k != "model_type"})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_anatomy_of_every_family_matches_the_model(family: str) -> None:
    model = build(FAMILIES[family])
    anatomy = read_anatomy(model)
    assert len(anatomy.layers) == len(anatomy.kinds) == LAYERS
    layers = anatomy.decoder_layers(model)
    assert all(name.startswith(f"{anatomy.inner}.") for name in layers)
    assert model.get_submodule(anatomy.embedding or "") is model.get_input_embeddings()
    assert model.get_submodule(anatomy.head or "") is model.get_output_embeddings()
    assert anatomy.tied == (model.get_input_embeddings().weight is model.get_output_embeddings().weight)
    assert bool(anatomy.experts) == bool(anatomy.routers) == (family in SPARSE)
    assert (anatomy.experts_per_token is not None) == (family in SPARSE)
    assert (anatomy.vocabulary, anatomy.heads) == (64, model.config.num_attention_heads)
    assert anatomy.needs_masks == anatomy.convolution == ""
    assert model_flops(model, anatomy).of([8]) > 0


def test_anatomy_is_the_same_after_patches_adapters_and_activation_checkpointing() -> None:
    model = build(FAMILIES["mixtral"])
    before = read_anatomy(model)
    models.use_causal_sdpa(model, anatomy=before)
    models.add_adapters(model, PeftConfig(method="lora", targets=["q_proj", "v_proj"]))
    models.checkpoint_activations(model, ActivationCheckpointing.full, before)
    assert read_anatomy(model) == before


def test_anatomy_is_picklable_and_holds_no_modules() -> None:
    anatomy = read_anatomy(build(FAMILIES["qwen3_moe"]))
    assert pickle.loads(pickle.dumps(anatomy)) == anatomy
    assert not any(isinstance(getattr(anatomy, each.name), nn.Module) for each in fields(Anatomy))


@pytest.mark.parametrize("model_type", _LAYER_COUNTS)
def test_layers_are_found_where_num_hidden_layers_does_not_count_them(model_type: str) -> None:
    """Each family of LAYER_COUNTS, with an added module list that is longer than the list of its layers."""
    sizes = {
        "blenderbot": {"d_model": 32, "encoder_layers": 5, "decoder_layers": 2, "decoder_attention_heads": 4,
                       "encoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48},
        "longcat_flash": {"hidden_size": 32, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24,
                          "num_attention_heads": 4, "n_routed_experts": 4, "moe_topk": 2, "q_lora_rank": 16,
                          "kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8},
    }  # fmt: skip
    sizes["blenderbot-small"] = sizes["blenderbot"]
    model = build({"model_type": model_type, "vocab_size": 64, **sizes[model_type]})
    decoder = model.get_decoder()
    decoder.probes = nn.ModuleList(nn.Identity() for _ in range(5))
    assert list(read_anatomy(model).decoder_layers(model).values()) == list(decoder.layers)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "llama4_text", "head_dim": 8}, "has layers of type chunked_attention, which are neither"),
        ({"model_type": "qwen3_next", "head_dim": 8}, "has layers of type linear_attention, which are neither"),
        (
            {"model_type": "gemma3_text", "head_dim": 8, "use_bidirectional_attention": True},
            "uses bidirectional attention",
        ),
        ({"model_type": "bloom"}, "computes attention in its own code, outside transformers' attention interface"),
        ({"model_type": "moshi", "sliding_window": 8}, "applies its sliding window in a mask"),
        ({"model_type": "mistral", "sliding_window": 8}, ""),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_models_that_need_masks_report_why(values: dict[str, Any], reason: str) -> None:
    anatomy = read_anatomy(build({**TINY, **values}))
    assert anatomy.needs_masks.startswith(reason)
    assert bool(anatomy.needs_masks) == bool(reason)


@pytest.mark.parametrize("family", [name for name, values in FAMILIES.items() if values.get("sliding_window")])
def test_attention_modules_that_pass_their_window_are_detected(family: str) -> None:
    """Detection reads the installed Python's bytecode: it must match the attention modules and no others."""
    found = {type(module).__name__ for module in build(FAMILIES[family]).modules() if _passes_window(module)}
    assert len(found) == 1
    assert found.pop().endswith("Attention")
    assert not any(map(_passes_window, build(FAMILIES["llama"]).modules()))


def test_layers_with_different_numbers_of_heads_are_rejected() -> None:
    anatomy = read_anatomy(build(FAMILIES["llama"]))
    heads = read_heads(anatomy, 2)
    assert heads is not None
    assert (heads.heads, heads.kv_heads) == (4, 2)
    with pytest.raises(ConfigError, match=r"parallelism.tp=2: the layers .* different numbers of heads"):
        read_heads(replace(anatomy, heads_differ=True), 2)
    model = build({**TINY, "model_type": "gemma4_text", "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16})
    assert read_anatomy(model).widths is None
    with pytest.raises(NotImplementedError, match="one number and size of heads for all layers"):
        model_flops(model)


def test_layers_of_a_model_outside_transformers_are_its_longest_module_list() -> None:
    model = nn.Module()
    model.few, model.many = (nn.ModuleList(nn.Linear(2, 2) for _ in range(number)) for number in (2, 3))
    assert read_anatomy(model) == Anatomy(layers=("many.0", "many.1", "many.2"))
    assert read_anatomy(nn.ModuleList([nn.Linear(2, 2)])) == Anatomy(layers=("0",))
    assert read_anatomy(nn.Linear(2, 2)) == Anatomy(layers=())
