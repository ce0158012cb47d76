"""Tensor-parallel plans of families for which transformers has none, or one without their per-head parameters.

To add a family: add a row, and a case in tests/distributed/test_family_plans.py.
"""

from __future__ import annotations

from collections.abc import Mapping

_QKV = {f"self_attn.{name}_proj": "colwise" for name in "qkv"}
_ATTENTION = {**_QKV, "self_attn.o_proj": "rowwise"}
_MLP = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}

FAMILY_PLANS: Mapping[str, Mapping[str, str]] = {
    "cohere": {  # Command R+: the norms of queries and keys have one row of weights per head
        "self_attn.q_norm": "per_head",
        "self_attn.k_norm": "per_head",
    },
    "gpt2": {  # the forward slices queries, keys and values out of one matrix, so its output is gathered
        "attn.c_attn": "colwise_gather_output",
        "attn.c_proj": "rowwise_split_input",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    },
    "gpt_oss": {  # one attention sink per head; the experts, with their biases, are sharded as a whole
        **_ATTENTION,
        "self_attn": "per_head",
    },
    "hunyuan_v1_dense": {  # norms of queries and keys after the rotary embedding, shared by all heads
        **_ATTENTION,
        **_MLP,
        "self_attn.query_layernorm": "replicated_with_grad_allreduce",
        "self_attn.key_layernorm": "replicated_with_grad_allreduce",
    },
    "lfm2": {  # short convolutions are replicated: their cost is small next to the projections around them
        **_QKV,
        "self_attn.out_proj": "rowwise",
        "self_attn.q_layernorm": "replicated_with_grad_allreduce",
        "self_attn.k_layernorm": "replicated_with_grad_allreduce",
        "conv": "replicated_convolution",
        "conv.conv": "replicate",
        "conv.in_proj": "colwise_gather_output",
        "conv.out_proj": "rowwise_split_input",
        "feed_forward.w1": "colwise",
        "feed_forward.w3": "colwise",
        "feed_forward.w2": "rowwise",
    },
    "stablelm": {  # its attention counts its heads itself; optionally one LayerNorm per head
        **_ATTENTION,
        **_MLP,
        "self_attn": "per_head",
        "self_attn.q_layernorm": "per_head_norms",
        "self_attn.k_layernorm": "per_head_norms",
    },
}
"""Model type -> module path within a decoder layer -> style name. Entries are added to transformers' plan of the model;
paths that match no module (an option of the config is off) are ignored."""
