"""Tiny configs of the model families that the fuzzer trains. Plain values; nothing of the project is imported."""

from __future__ import annotations

import random
from typing import Any

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2}
EAGER = ("gemma2", "gpt_oss")
"""Families that transformers computes correctly with eager attention only (soft caps, attention sinks)."""

DENSE: dict[str, dict[str, Any]] = {
    "llama": {**HEADS},
    "llama_bias": {"model_type": "llama", **HEADS, "attention_bias": True, "mlp_bias": True},
    "llama_3_heads": {"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
    "mistral": {**HEADS, "sliding_window": 7},
    "ministral": {**HEADS, "head_dim": 8, "sliding_window": 7},
    "qwen2": {**HEADS},
    "qwen3": {**HEADS, "head_dim": 8},
    "gemma": {**HEADS, "head_dim": 8},
    "gemma2": {**HEADS, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {**HEADS, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "phi3": {**HEADS},
    "olmo": {"num_attention_heads": 4, "num_key_value_heads": 4, "clip_qkv": 0.5},
    "olmo2": {**HEADS},
    "olmo3": {**HEADS, "sliding_window": 8},
    "granite": {**HEADS, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "gpt2": {"model_type": "gpt2"},
    "gpt_neox": {"num_attention_heads": 4, "hidden_act": "gelu"},
    "starcoder2": {**HEADS, "sliding_window": None},
    "stablelm": {**HEADS},
    "cohere": {**HEADS, "logit_scale": 0.25},
    "glm4": {**HEADS, "head_dim": 8},
    "smollm3": {**HEADS},
    "nemotron": {**HEADS},
    "seed_oss": {**HEADS, "head_dim": 8},
    "ernie4_5": {**HEADS, "head_dim": 8},
    "exaone4": {**HEADS, "sliding_window": 8},
    "helium": {**HEADS, "head_dim": 8},
    "arcee": {**HEADS},
    "apertus": {**HEADS},
}
SPARSE: dict[str, dict[str, Any]] = {
    "mixtral": {**HEADS, **EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": {**HEADS, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**HEADS, **EXPERTS, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8,
                  "norm_topk_prob": True},
    "olmoe": {**HEADS, **EXPERTS, "num_experts": 4, "clip_qkv": 0.5},
    "granitemoe": {**HEADS, **EXPERTS, "num_local_experts": 4},
    "deepseek_v3": {"num_attention_heads": 4, "num_key_value_heads": 4, **EXPERTS, "n_routed_experts": 4,
                    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
                    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
                    "qk_nope_head_dim": 4, "v_head_dim": 8},
    "glm4_moe": {**HEADS, **EXPERTS, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
                 "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    "gpt_oss": {**HEADS, **EXPERTS, "head_dim": 8, "num_local_experts": 4, "sliding_window": 8},
}  # fmt: skip
GPT2_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
              "max_position_embeddings": "n_positions"}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attention_dropout": 0.0,
              "hidden_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}  # fmt: skip


def draw_config(rng: random.Random, family: str, vocab: int, layers: int, positions: int) -> dict[str, Any]:
    """Return the values of a Hugging Face config of `family`, model_type included."""
    overrides = (DENSE | SPARSE)[family]
    values: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "tie_word_embeddings": rng.random() < 0.4,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "use_cache": False,
        **NO_DROPOUT,
        **overrides,
    }
    if "num_experts_per_tok" in overrides:
        values["router_aux_loss_coef"] = 0.0
    if family in ("gemma2", "gemma3_text", "olmo3", "exaone4", "gpt_oss", "ministral"):
        values["layer_types"] = [("sliding_attention", "full_attention")[index % 2] for index in range(layers)]
    if family == "gpt2":
        heads = {"num_attention_heads": 4}
        values = {GPT2_NAMES.get(key, key): value for key, value in {**values, **heads}.items()}
        values.pop("intermediate_size")
    return values
