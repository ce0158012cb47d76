"""Fused layers against transformers and plain PyTorch, and the structure of models of many families."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from components import models
from components.config.compute_rules import _WHOLE_ROWS, attention_problems
from components.config.mesh_rules import model_problems
from components.config.schema import ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.cluster import Device
from components.config.schema.model import MIXERS, WeightInit
from components.config.schema.parallelism import ActivationCheckpointing, MeshShape
from components.config.shape import ModelShape
from components.distributed.tp_plan import read_heads
from components.models.anatomy import _LAYER_COUNTS, Anatomy, _passes_window, read_anatomy
from components.models.fused_layers import FusedNorm, fuse_layers, rms_norm, rotate, swiglu
from components.models.lora_linear import add_low_rank
from components.training.step_cost import model_flops
from tests.distributed.parity import HYBRID_MODELS, SMALL, build
from tests.fuzz.families import DENSE, SPARSE, draw_config

FUSED = {
    "llama": (5, 2, 2), "qwen3": (9, 2, 2), "phi3": (5, 2, 2), "gemma": (0, 2, 0), "gpt2": (0, 0, 0),
    "nemotron": (0, 2, 0), "gpt_neox": (0, 2, 0), "phi3 in part": (5, 2, 2), "gpt_oss": (5, 0, 0), "bitnet": (9, 2, 0),
}  # fmt: skip
"""Model -> fused norms, rotary embeddings and SwiGLUs. Gemma's norms multiply by 1 + weight and its MLPs have a GELU:
they keep their own forward, as other MLPs and experts do. Nemotron, GPT-NeoX and some Phi-3 models rotate a part of
each head."""
MORE_MODELS = {
    "nemotron": {**SMALL, "model_type": "nemotron"},
    "gpt_neox": {**SMALL, "model_type": "gpt_neox", "rotary_pct": 0.5, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "phi3 in part": {**SMALL, "model_type": "phi3", "partial_rotary_factor": 0.5},
    "gpt_oss": {**SMALL, "model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 8},
    "bitnet": {**SMALL, "model_type": "bitnet"},
}


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def test_experts_compute_in_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under FSDP2, whose experts are in that dtype; the gradients of their weights stay in float32."""
    values = {
        **SMALL,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    cfg = ModelConfig(init=WeightInit.random, tokenizer="bytes", config=values)
    model = models.build_on_meta(cfg)
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg, 0)
    seen, original = [], F.grouped_mm

    def product(tokens: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.extend([tokens.dtype, weight.dtype])
        return original(tokens, weight, **options)

    monkeypatch.setattr(F, "grouped_mm", product)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=torch.arange(16)[None], use_cache=False).logits.square().sum()
    loss.backward()
    assert {*seen} == {torch.bfloat16}
    assert {each.grad.dtype for name, each in model.named_parameters() if ".experts." in name} == {torch.float32}


OLMO = ("olmo", "olmo2", "olmo3", "flex_olmo", "olmo_hybrid")


@pytest.mark.parametrize("family", ["llama", *OLMO])
def test_fused_rotary_embeddings_keep_the_dtype_of_16_bits(family: str) -> None:
    """OLMo's cosines are float32, and attention takes one dtype."""
    values = HYBRID_MODELS.get(family, {**SMALL, "model_type": family})
    if family == "flex_olmo":
        values = {**values, "num_experts": 4, "num_experts_per_tok": 2}
    plain: Any = build(family, torch.bfloat16, values)
    models.use_causal_sdpa(plain)
    fused = copy.deepcopy(plain)
    assert fuse_layers(fused).rotary
    ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    found, expected = (model(input_ids=ids, use_cache=False).logits.double() for model in (fused, plain))
    found.square().sum().backward()
    assert (found - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_give_the_loss_and_gradients_of_transformers(name: str) -> None:
    own: Any = build(name, torch.float64, MORE_MODELS.get(name))
    fused = copy.deepcopy(own)
    counts = fuse_layers(fused)
    assert (counts.norms, counts.rotary, counts.swiglus) == FUSED[name]
    copied = copy.deepcopy(fused)  # copies keep the fused forwards
    ids = torch.randint(0, 97, (2, 16))
    losses = []
    for model in (own, fused, copied):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == losses[1]
    names = dict(own.named_parameters())
    assert dict(fused.named_parameters()).keys() == names.keys()
    for name, parameter in fused.named_parameters():
        assert torch.allclose(parameter.grad, names[name].grad, rtol=1e-4, atol=1e-7), name


def test_gradients_equal_finite_differences() -> None:
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (drawn(2, 3, 8), drawn(8)))
    cos, sin = drawn(2, 3, 8).detach(), drawn(2, 3, 8).detach()
    assert torch.autograd.gradcheck(lambda q, k: rotate(q, k, cos, sin), (drawn(2, 4, 3, 8), drawn(2, 1, 3, 8)))
    cos, sin = cos[..., :4], sin[..., :4]  # half of each head is rotated
    assert torch.autograd.gradcheck(lambda q, k: rotate(q, k, cos, sin), (drawn(2, 4, 3, 8), drawn(2, 1, 3, 8)))
    assert torch.autograd.gradcheck(swiglu, (drawn(2, 3, 8), drawn(2, 3, 8)))
    factors = (drawn(2, 3, 5), drawn(2, 3, 8), drawn(2, 8), drawn(5, 2))
    assert torch.autograd.gradcheck(lambda *each: add_low_rank(*each, 1.5), factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swiglu_on_a_cpu_has_the_bits_of_transformers_and_saves_less(dtype: torch.dtype) -> None:
    gate, up, grad = (drawn(4, 32, dtype=dtype) for _ in range(3))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        product = swiglu(gate, up)
    assert len(saved) == 2  # gate and up, but not silu(gate)
    own = F.silu(gate) * up
    assert torch.equal(product, own)
    expected = torch.autograd.grad(own, (gate, up), grad)
    assert all(map(torch.equal, torch.autograd.grad(product, (gate, up), grad), expected))


def test_a_norm_in_bfloat16_is_rounded_once() -> None:
    hidden, weight = drawn(64, 256, dtype=torch.bfloat16), drawn(256, dtype=torch.bfloat16)
    exact = F.rms_norm(hidden.double(), (256,), weight.double(), 1e-6)
    error = (rms_norm(hidden, weight, 1e-6) - exact) / exact
    assert error.abs().max() < 1.001 * 2**-8  # half a unit in the last of 8 bits


def test_a_norm_whose_dtype_differs_from_its_input_computes_as_before() -> None:
    own: Any = build("llama", torch.float32)
    fused = copy.deepcopy(own)
    fuse_layers(fused)
    hidden = torch.randn(2, 3, own.config.hidden_size).bfloat16()
    assert isinstance(fused.model.norm, FusedNorm)
    result = fused.model.norm(hidden)
    assert result.dtype == torch.float32
    assert torch.equal(result, own.model.norm(hidden))


def test_a_low_rank_product_equals_two_linear_layers() -> None:
    torch.manual_seed(0)
    base, hidden, first, second = drawn(2, 3, 5), drawn(2, 3, 8), drawn(2, 8), drawn(5, 2)
    tensors = (base, hidden, first, second)
    expected = base + 0.5 * F.linear(F.linear(hidden, first), second)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, tensors, weights)
    result = add_low_rank(*tensors, 0.5)
    assert torch.allclose(result, expected, rtol=1e-12)
    for one, two in zip(torch.autograd.grad(result, tensors, weights), gradients, strict=True):
        assert torch.allclose(one, two, rtol=1e-12)


LAYERS = 3
FAMILIES = {family: draw_config(random.Random(0), family, 64, LAYERS, 64) for family in (DENSE | SPARSE)}
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def built_family(values: dict[str, Any]) -> Any:
    """Build a model on the meta device from config values."""
    config = AutoConfig.for_model(values["model_type"], **{k: v for k, v in values.items() if k != "model_type"})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_anatomy_of_every_family_matches_the_model(family: str) -> None:
    model = built_family(FAMILIES[family])
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
    model = built_family(FAMILIES["mixtral"])
    before = read_anatomy(model)
    models.use_causal_sdpa(model, anatomy=before)
    models.add_adapters(model, PeftConfig(method="lora", targets=["q_proj", "v_proj"]))
    models.checkpoint_activations(model, ActivationCheckpointing.full, before)
    assert read_anatomy(model) == before


def test_anatomy_is_picklable_and_holds_no_modules() -> None:
    anatomy = read_anatomy(built_family(FAMILIES["qwen3_moe"]))
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
    model = built_family({"model_type": model_type, "vocab_size": 64, **sizes[model_type]})
    decoder = model.get_decoder()
    decoder.probes = nn.ModuleList(nn.Identity() for _ in range(5))
    assert list(read_anatomy(model).decoder_layers(model).values()) == list(decoder.layers)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "llama4_text", "head_dim": 8}, "has layers of type chunked_attention, which are neither"),
        (
            {"model_type": "mamba2", "num_heads": 4, "head_dim": 16},
            "has layers of type linear_attention, which are neither",
        ),
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
    anatomy = read_anatomy(built_family({**TINY, **values}))
    assert anatomy.needs_masks.startswith(reason)
    assert bool(anatomy.needs_masks) == bool(reason)


@pytest.mark.parametrize("kind", sorted(_WHOLE_ROWS))
def test_the_launcher_knows_the_models_whose_rows_cannot_be_packed(kind: str) -> None:
    """Beside those whose config.json names unknown layer types, which the launcher reads."""
    config = CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        anatomy = read_anatomy(AutoModelForCausalLM.from_config(config))
    assert anatomy.needs_unpacked_rows
    mesh, shape = MeshShape(cp=2), ModelShape(family=kind)
    problems = attention_problems(ModelConfig(path="mine"), mesh, Device.cuda, packs=True, trains=True, shape=shape)
    assert [each.partition("=")[0] for each in problems] == ["data.pack", "parallelism.cp"]


@pytest.mark.parametrize("name", HYBRID_MODELS)
def test_hybrid_models_may_be_packed_and_divided(name: str) -> None:
    anatomy = read_anatomy(built_family(HYBRID_MODELS[name]))
    assert anatomy.mixers == MIXERS[name]
    assert anatomy.needs_unpacked_rows == anatomy.needs_unsharded_rows == ""


@pytest.mark.parametrize("family", [name for name, values in FAMILIES.items() if values.get("sliding_window")])
def test_attention_modules_that_pass_their_window_are_detected(family: str) -> None:
    """Detection reads the installed Python's bytecode: it must match the attention modules and no others."""
    found = {type(module).__name__ for module in built_family(FAMILIES[family]).modules() if _passes_window(module)}
    assert len(found) == 1
    assert found.pop().endswith("Attention")
    assert not any(map(_passes_window, built_family(FAMILIES["llama"]).modules()))


def test_heads_are_those_of_each_layer() -> None:
    llama = read_heads(read_anatomy(built_family(FAMILIES["llama"])), 2)
    assert {(each.heads, each.kv_heads, each.layout.value) for each in llama.values()} == {(4, 2, "sharded")}
    values = {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "head_dim": 8}
    anatomy = read_anatomy(built_family({**TINY, **values, "model_type": "gemma4_text", "global_head_dim": 16}))
    heads = read_heads(anatomy, 2)
    assert [(each.kv_heads, each.layout.value) for each in heads.values()] == [(2, "sharded"), (1, "kv_replicated")]
    assert [(each.heads, each.keys, each.values) for each in anatomy.layer_heads] == [(4, 8, 8), (4, 16, 16)]
    assert read_heads(replace(anatomy, layer_heads=(), heads=None), 2) == {}
    (without_list,) = read_heads(replace(anatomy, layers=(), layer_heads=(), kv_heads=2), 2).items()
    assert (without_list[0], without_list[1].heads, without_list[1].kv_heads) == ("", 4, 2)


def test_sequence_parallel_of_experts_beside_an_mlp_is_rejected_before_launch() -> None:
    sharded, mesh = ParallelismConfig(tp=2, sequence_parallel=True), MeshShape(tp=2)
    for experts, problems in ((4, 1), (0, 0)):
        found = model_problems(sharded, mesh, ModelShape(family="gemma4_text", experts=experts))
        assert len([each for each in found if each.startswith("parallelism.sequence_parallel=true: ")]) == problems


def test_layers_of_a_model_outside_transformers_are_its_longest_module_list() -> None:
    model = nn.Module()
    model.few, model.many = (nn.ModuleList(nn.Linear(2, 2) for _ in range(number)) for number in (2, 3))
    assert read_anatomy(model) == Anatomy(layers=("many.0", "many.1", "many.2"))
    assert read_anatomy(nn.ModuleList([nn.Linear(2, 2)])) == Anatomy(layers=("0",))
    assert read_anatomy(nn.Linear(2, 2)) == Anatomy(layers=())
