"""Tiny models of many families, built and saved by transformers: the reference for tests of model loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from components import models
from components.config.schema.model import ModelConfig
from components.config.schema.run import PeftConfig
from tests.distributed.parity import HYBRID_MODELS

VOCAB = 272  # 256 byte tokens plus special tokens, rounded up to a multiple of 16

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "llama3": {"model_type": "llama", **SIZES, "rope_parameters": LLAMA3_ROPE},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 8},
    "gemma": {"model_type": "gemma", **SIZES, "head_dim": 8},
    "gpt2": {"model_type": "gpt2", **GPT2_SIZES},
    "phi3": {"model_type": "phi3", **SIZES, "pad_token_id": 0},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4},
}
"""Name -> fields of a Hugging Face config, dense models first. Mixtral stores its experts as separate tensors."""

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", **SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 24},
    "gpt_oss": {"model_type": "gpt_oss", **SIZES, "intermediate_size": 64, "head_dim": 8, "num_local_experts": 4,
                "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip
"""Mixtures of experts of which quantized files are made."""

DENSE = [name for name in FAMILIES if name != "mixtral"]


def tiny_config(family: str) -> PreTrainedConfig:
    """Return the config of a model family, of FAMILIES or of the hybrid models of the parity tests."""
    known = {**FAMILIES, **MIXTURES}
    values = dict(known[family] if family in known else {**HYBRID_MODELS[family], "vocab_size": VOCAB})
    return AutoConfig.for_model(values.pop("model_type"), **values)


def tiny_folder(folder: Path, family: str, seed: int = 0, **values: Any) -> Path:
    """Save a model of a family, with all parameters random, with `save_pretrained`, and return the folder.

    Args:
        values: Further fields of the config.
    """
    torch.manual_seed(seed)
    config = tiny_config(family)
    config.update(values)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.1)
    model.save_pretrained(folder)
    return folder


def filled(cfg: ModelConfig, peft: PeftConfig | None = None, seed: int = 0) -> PreTrainedModel:
    """Build a model as a recipe does in one process, with adapters if any."""
    model = models.build_on_meta(cfg)
    models.add_adapters(model, peft or PeftConfig())
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg, seed)
    return model


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the model in a folder with transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits of two fixed rows, (2, 16, VOCAB)."""
    ids = torch.arange(32).reshape(2, 16) * 7 % VOCAB
    return model(input_ids=ids, use_cache=False).logits
