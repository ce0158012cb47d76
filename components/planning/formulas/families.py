"""Structure of the decoder layers of the model types that the formulas cover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple


class QueryKeyNorm(StrEnum):
    """Norms of queries and keys. head: one weight vector for all heads; width: a weight for each feature."""

    none = "none"
    head = "head"
    width = "width"


class LinearKind(StrEnum):
    """Layers with a recurrent state: linear attention by the delta rule, with one decay per head or one per channel of
    the keys, and Mamba-2."""

    none = "none"
    delta_rule = "delta_rule"
    kimi_delta = "kimi_delta"
    mamba2 = "mamba2"


@dataclass(frozen=True, slots=True)
class Family:
    """Structure of the decoder layers of a model type, with the defaults of its transformers config."""

    tied: bool = False
    """Default of tie_word_embeddings."""
    head_dim: int | None = None
    """Default width of an attention head; None: hidden / heads."""
    gated: bool = True
    """Whether an MLP has a gate: three matrices instead of two."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    norms: int = 2
    """Norms of the hidden states per layer."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + weight; such norms are not fused."""
    norm_bias: bool = False
    norm_weight: bool = True
    query_key_norm: QueryKeyNorm = QueryKeyNorm.none
    value_norm: bool = False
    """Whether values are normalized, without a weight."""
    moe: bool = False
    """Whether every MLP is a mixture of experts."""
    expert_bias: bool = False
    router_bias: bool = False
    softcap: bool = False
    """Whether attention scores pass through tanh, which only eager attention implements."""
    sinks: bool = False
    """One learned attention logit per head."""
    full_every: int = 0
    """Every n-th layer attends to all tokens, the others within a window or with a recurrent state; 0: all layers are
    alike."""
    linear: LinearKind = LinearKind.none
    """Its layers with a recurrent state."""
    projections: Mapping[str, str] = field(default_factory=dict)
    """Input projections of such a layer -> what their rows are for, in order: k, the features of key heads (Mamba-2:
    the states of groups); v, those of value heads; h, one row per value head; K, all of these, by key head."""
    gated_queries: bool = False
    """Whether the query projection also gives a gate of the attention's output."""
    shared_gate: bool = True
    """Whether a gate scales the output of a shared expert."""
    wide_norms: bool = False
    """Whether norms multiply by their weight in float32."""
    mlp_and_experts: bool = False
    """Whether a layer with experts has a dense MLP beside them, and three more norms."""
    single: bool = False
    """Whether a layer has either a mixer of tokens or an MLP, and one norm."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Defaults of further sizes, by transformers' keys."""
    position_table: int = 0
    """Learned position embeddings, if the config states no other number; 0: none."""
    windowed: bool = False
    """Whether all layers attend within the window that the config states."""


_LLAMA = Family()
_DELTA_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN3_5 = Family(
    head_dim=256,
    norm_offset=True,
    query_key_norm=QueryKeyNorm.head,
    full_every=4,
    linear=LinearKind.delta_rule,
    projections={"qkv": "kkv", "z": "v", "a": "h", "b": "h"},
    gated_queries=True,
    sizes=_DELTA_SIZES,
)
_LATENT_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(windowed=True),
    "ministral": Family(windowed=True),
    "ministral3": Family(head_dim=128, windowed=True),
    "granite": _LLAMA,
    "helium": Family(head_dim=128),
    "arcee": Family(gated=False),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_dim=128, query_key_norm=QueryKeyNorm.head),
    "hunyuan_v1_dense": Family(query_key_norm=QueryKeyNorm.head),
    "seed_oss": Family(head_dim=128, qkv_bias=True),
    "smollm3": Family(tied=True),
    "ernie4_5": Family(tied=True, head_dim=128),
    "gemma": Family(tied=True, head_dim=256, norm_offset=True),
    "gemma2": Family(tied=True, head_dim=256, norms=4, norm_offset=True, softcap=True, full_every=2),
    "gemma3_text": Family(
        tied=True, head_dim=256, norms=4, norm_offset=True, query_key_norm=QueryKeyNorm.head, full_every=6
    ),
    "gemma4_text": Family(
        tied=True,
        head_dim=256,
        norms=4,
        query_key_norm=QueryKeyNorm.head,
        wide_norms=True,
        full_every=6,
        value_norm=True,
        mlp_and_experts=True,
        shared_gate=False,
        sizes={"hidden_size_per_layer_input": 256, "global_head_dim": 512},
    ),
    "glm4": Family(head_dim=128, qkv_bias=True, norms=4),
    "nemotron": Family(head_dim=128, gated=False, norm_offset=True, norm_bias=True),
    "olmo": Family(norm_weight=False),
    "olmo2": Family(query_key_norm=QueryKeyNorm.width),
    "olmo3": Family(query_key_norm=QueryKeyNorm.width, full_every=4),
    "phi3": Family(windowed=True),
    "cohere": Family(tied=True, norms=1),
    "cohere2": Family(tied=True, norms=1, full_every=4),
    "stablelm": Family(norm_bias=True),
    "starcoder2": Family(
        tied=True, gated=False, qkv_bias=True, output_bias=True, mlp_bias=True, norm_bias=True, windowed=True
    ),
    "gpt2": Family(
        tied=True,
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        position_table=1024,
    ),
    "mixtral": Family(moe=True, windowed=True),
    "olmoe": Family(moe=True, query_key_norm=QueryKeyNorm.width),
    "qwen2_moe": Family(moe=True, qkv_bias=True),
    "qwen3_moe": Family(moe=True, query_key_norm=QueryKeyNorm.head),
    "gpt_oss": Family(
        moe=True,
        head_dim=64,
        qkv_bias=True,
        output_bias=True,
        expert_bias=True,
        router_bias=True,
        sinks=True,
        full_every=2,
    ),
    "glm4_moe": Family(moe=True, shared_gate=False, sizes={"first_k_dense_replace": 1, "n_shared_experts": 1}),
    "deepseek_v3": Family(
        moe=True,
        shared_gate=False,
        sizes={**_LATENT_SIZES, "q_lora_rank": 1536, "first_k_dense_replace": 3, "n_shared_experts": 1},
    ),
    "mistral4": Family(
        moe=True,
        shared_gate=False,
        sizes={
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_shared_experts": 1,
        },
    ),
    "minimax_m2": Family(moe=True, head_dim=128, query_key_norm=QueryKeyNorm.width),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(_QWEN3_5, moe=True, sizes={**_DELTA_SIZES, "shared_expert_intermediate_size": 512}),
    "qwen3_next": replace(
        _QWEN3_5,
        moe=True,
        projections={"qkvz": "K", "ba": "K"},
        sizes={**_DELTA_SIZES, "shared_expert_intermediate_size": 512},
    ),
    "olmo_hybrid": Family(
        query_key_norm=QueryKeyNorm.width,
        wide_norms=True,
        full_every=4,
        linear=LinearKind.delta_rule,
        projections={"query": "k", "key": "k", "value": "v", "gate": "v", "a": "h", "b": "h"},
        sizes={"linear_conv_kernel_dim": 4},
    ),
    "kimi_linear": Family(
        moe=True,
        shared_gate=False,
        linear=LinearKind.kimi_delta,
        projections={"query": "k", "key": "k", "value": "v", "b": "h"},
        sizes={
            **_LATENT_SIZES,
            "first_k_dense_replace": 1,
            "num_shared_experts": 1,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "nemotron_h": Family(
        gated=False,
        head_dim=128,
        norms=1,
        moe=True,
        shared_gate=False,
        wide_norms=True,
        single=True,
        linear=LinearKind.mamba2,
        projections={"in": "vvkkh"},
        sizes={
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "chunk_size": 128,
            "moe_shared_expert_intermediate_size": 7688,
        },
    ),
}
"""transformers' model type -> structure. Every row is compared with the built model in the tests."""


class LayerKind(NamedTuple):
    """What a decoder layer computes. Layers of one kind have equal sizes."""

    attends: bool = True
    """Whether it has attention."""
    is_windowed: bool = False
    """Whether its attention sees a window."""
    is_linear: bool = False
    """Whether it has a recurrent state."""
    has_mlp: bool = True
    """Whether it has a dense MLP."""
    has_experts: bool = False

    def __str__(self) -> str:
        """Return the parts: `attention and an MLP`."""
        attention = "attention within a window" if self.is_windowed else "attention"
        parts = {
            attention: self.attends,
            "linear attention or Mamba-2": self.is_linear,
            "an MLP": self.has_mlp,
            "experts": self.has_experts,
        }
        return " and ".join(name for name, has in parts.items() if has)


def layer_kinds(
    family: Family, values: Mapping[str, Any], layers: int, *, has_window: bool, has_experts: bool
) -> tuple[LayerKind, ...]:
    """Return the kinds of the layers, by a config with transformers' keys."""
    if family.single:
        types = values.get("layers_block_type") or values.get("layer_types") or values["hybrid_override_pattern"]
        single = {
            **dict.fromkeys(("M", "mamba", "linear_attention"), LayerKind(False, is_linear=True, has_mlp=False)),
            **dict.fromkeys(("*", "attention", "full_attention"), LayerKind(True, has_mlp=False)),
            **dict.fromkeys(("E", "moe"), LayerKind(False, has_mlp=False, has_experts=True)),
            **dict.fromkeys(("-", "mlp"), LayerKind(False)),
        }
        return tuple(single[each] for each in types)
    kinds = []
    for index, is_full in enumerate(_are_full(family, values, layers)):
        dense = values["mlp_layer_types"][index] == "dense" if "mlp_layer_types" in values else (
            index < values.get("first_k_dense_replace", 0) or not has_experts
        )  # fmt: skip
        is_linear = family.linear is not LinearKind.none and not is_full
        kinds.append(
            LayerKind(
                attends=not is_linear,
                is_windowed=has_window and not is_linear and not is_full,
                is_linear=is_linear,
                has_mlp=dense or family.mlp_and_experts,
                has_experts=not dense,
            )
        )
    return tuple(kinds)


def _are_full(family: Family, values: Mapping[str, Any], layers: int) -> list[bool]:
    """Return whether each layer attends to all tokens."""
    if family.linear is LinearKind.none and not family.full_every:
        return [not family.windowed] * layers
    if "layer_types" in values:
        return [values["layer_types"][index] == "full_attention" for index in range(layers)]
    if family.linear is LinearKind.kimi_delta:
        full = values.get("linear_attn_config", {}).get("full_attn_layers", range(5, layers + 1, 4))
        return [index + 1 in full for index in range(layers)]
    every = values.get("full_attention_interval", family.full_every)
    return [(index + 1) % every == 0 for index in range(layers)]
