"""Bytes that a decoder layer saves for the backward of one micro-batch.

Counted from the operators of transformers' models: what autograd saves, not what a kernel could do without. A token of
hidden size h with q query and k key-value features, f MLP features, elements of c bytes:

- each norm: its input in float32 (4 h), the normalized states and the output (2 h c); fused, its input and output;
- attention: queries, keys, values and the output ((2 q + 2 k) c), and a float32 per head;
- eager attention, per head and key: the probabilities (c), below float32 also in float32 unless it has sinks; with
  softcapping, the capped scores (c);
- a gated MLP: gate, up, the activated gate and their product (4 f c), fused without the activated gate; without a gate
  2 f c;
- with model.qat, as counted with torchao 0.18: 2 c per weight and c per input of a linear layer (int8_int4), or 16 + c
  per weight (int4_weight_only; 16 in float32).
"""

from __future__ import annotations

from dataclasses import dataclass

from components.config.layouts import local_heads, ulysses_divides
from components.config.schema.model import Qat
from components.config.schema.parallelism import ActivationCheckpointing, ContextAttention
from components.planning.formulas.architecture import QueryKeyNorm, Sharding
from components.planning.formulas.workload import Workload


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes that one layer saves under each policy of activation checkpointing."""

    none: float
    selective: float
    full: float
    transient: float = 0.0
    """Bytes that exist only during the layer's backward: gradients of the scores and probabilities of eager
    attention, whatever the policy."""

    def of(self, policy: ActivationCheckpointing) -> float:
        """Return the bytes per layer under a policy; `auto` counts like `none`."""
        if policy is ActivationCheckpointing.alternate:
            return (self.none + self.full) / 2
        return {
            ActivationCheckpointing.selective: self.selective,
            ActivationCheckpointing.full: self.full,
        }.get(policy, self.none)


def layer_activations(w: Workload) -> LayerActivations:
    """Return the saved bytes of one layer on a rank."""
    a, tp, sp, c = w.architecture, w.mesh.tp, w.sequence_shards, w.compute_bytes
    tokens, hidden = w.local_tokens, a.hidden
    heads, kv_heads = local_heads(a.heads, a.kv_heads, tp)
    queries, keys = heads * a.head_dim, kv_heads * a.head_dim
    # A norm in float32 saves its input once; computed in less, a float32 copy besides the normalized states.
    # Normalized states are saved for the gradient of the norm's weight.
    norm_bytes = c if w.fused else 4 + (0 if w.peft.adapts else c)
    norm_inputs = a.family.norms * norm_bytes * hidden / sp
    norm_outputs = 2 * c * hidden  # inputs of attention and MLP, gathered over tp under sequence parallel
    attention = 2 * c * (queries + keys) + 4 * heads
    if w.mesh.cp > 1 and _uses_ulysses(w, heads, kv_heads):
        attention += c * queries  # the output before and after the all-to-all
    if a.family.query_key_norm is not QueryKeyNorm.none:
        attention += (c if w.fused else 4 + c) * (queries + keys)
    scores = heads * w.seq_len if w.eager_attention else 0
    widened = 4 if c < 4 and not a.family.sinks else 0
    attention += scores * (c + widened + (c if a.family.softcap else 0))
    mlp = _experts(w) if a.experts else (_gated(w) if a.family.gated else 2) * c * -(-a.mlp // tp)
    none = tokens * (norm_inputs + norm_outputs + attention + mlp) + _fake_quantized(w)
    layer_input = tokens * hidden * c / sp
    matmuls = (2 * queries + 2 * keys + hidden / sp * 2) * c + 4 * heads
    matmuls += (2 if a.family.gated else 1) * c * -(-a.mlp // tp) * (a.experts_per_token or 1)
    transient = tokens * scores * (c + (widened or c))
    return LayerActivations(none, selective=layer_input + tokens * matmuls, full=layer_input, transient=transient)


def _gated(w: Workload) -> int:
    """Return how many tensors of its width a gated MLP saves."""
    return 3 if w.fused else 4


def _fake_quantized(w: Workload) -> float:
    """Return the bytes of a layer's fake-quantized weights, and under int8_int4 of its linear layers' inputs."""
    if w.qat is Qat.none:
        return 0.0
    weights = [each for each in w.architecture.layer_weights() if each.is_matrix]
    linear = [each for each in weights if each.sharding is not Sharding.experts]
    c, values = w.compute_bytes, sum(each.size for each in linear)
    if w.qat is Qat.int4_weight_only:  # torchao computes it in float32, and saves four results
        return values * (16 + (c if c < 4 else 0))
    return 2 * c * values + c * w.local_tokens * sum(each.width for each in linear)


def _uses_ulysses(w: Workload, heads: int, kv_heads: int) -> bool:
    """Return whether cp exchanges heads, rather than gathering keys and values."""
    return w.parallelism.cp_attention is not ContextAttention.all_gather and ulysses_divides(heads, kv_heads, w.mesh.cp)


def _experts(w: Workload) -> float:
    """Return the bytes per token of a mixture of experts: its rows are copied to each expert of a token."""
    a, c = w.architecture, w.compute_bytes
    features = -(-a.mlp // w.mesh.tp)
    routed = a.experts_per_token * c * (2 * a.hidden + 5 * features)
    router = 3 * 4 * a.experts
    shared = _gated(w) * c * -(-a.shared_mlp // w.mesh.tp)
    return routed + router + shared
