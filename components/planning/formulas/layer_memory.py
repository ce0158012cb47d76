"""Parameters of a decoder layer on a rank, and the bytes that it saves for its backward.

The latter are counted from the operators of transformers' models: what autograd saves for the backward of one
micro-batch, not what a kernel could do without. A token of hidden size h with q query and k key-value features, f MLP
features, elements of c bytes:

- each norm: its input in float32 (4 h), the normalized states and the output (2 h c); fused, its input and output;
- attention: queries, keys, values and the output ((2 q + 2 k) c), and a float32 per head;
- eager attention, per head and key: the probabilities (c), below float32 also in float32 unless it has sinks; with
  softcapping, the capped scores (c);
- latent attention: its latents, and q, k and v with the widths of its heads; on CPUs, whose kernels need values as wide
  as keys, all of it in float32, with the probabilities;
- linear attention and Mamba-2: see `_delta_rule`, `_kimi_delta` and `_mamba2`;
- a gated MLP: gate, up, the activated gate and their product (4 f c), fused without the activated gate; without a gate
  2 f c;
- with model.qat, as counted with torchao 0.18: 2 c per weight and c per input of a linear layer (int8_int4), or 16 + c
  per weight (int4_weight_only; 16 in float32).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from components.config.schema.model import Qat
from components.config.schema.parallelism import ActivationCheckpointing, ContextAttention
from components.config.shape import local_heads, ulysses_divides
from components.planning.formulas.architecture import Architecture, LatentHeads, LinearHeads, Sharding, Weight
from components.planning.formulas.families import LayerKind, LinearKind, QueryKeyNorm
from components.planning.formulas.workload import Workload

_NF4_BYTES = 0.53125
"""Bytes per weight in NF4: 4 bits, and a bfloat16 scale for each block of 64."""


@dataclass(frozen=True, slots=True)
class _LayerActivations:
    """Bytes that one layer saves under each policy of activation checkpointing."""

    none: float
    selective: float
    full: float
    transient: float = 0.0
    """Bytes that exist only during the layer's backward, whatever the policy: gradients of the scores and probabilities
    of eager attention, and within chunks of linear attention and Mamba-2."""

    def of(self, policy: ActivationCheckpointing) -> float:
        """Return the bytes per layer under a policy; `auto` counts like `none`."""
        if policy is ActivationCheckpointing.alternate:
            return (self.none + self.full) / 2
        return {
            ActivationCheckpointing.selective: self.selective,
            ActivationCheckpointing.full: self.full,
        }.get(policy, self.none)


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of a set of parameters on one rank."""

    sharded: float = 0.0
    """This rank's shards."""
    gathered: float = 0.0
    """Unsharded over fsdp; still one tp and ep rank's part."""

    def __add__(self, other: Held) -> Held:
        return Held(self.sharded + other.sharded, self.gathered + other.gathered)


def held(workload: Workload, weights: Iterable[Weight]) -> Held:
    """Return the elements of weights that a rank holds."""
    sharded = gathered = 0
    for weight in weights:
        sharded += weight.shard(workload.expert_fsdp if weight.sharding is Sharding.experts else workload.fsdp)
        gathered += weight.size
    return Held(sharded, gathered)


def _adapters(workload: Workload, kind: LayerKind) -> Held:
    """Return the elements of a layer's LoRA matrices: A (rank, in) and B (out, rank) for each linear layer."""
    rank, mesh, layer, factors = workload.peft.rank, workload.mesh, workload.architecture.layer_weights, []
    for whole, local in zip(layer(kind), layer(kind, mesh.tp, mesh.ep), strict=True):
        if not local.is_matrix or local.sharding is Sharding.experts or ("gate" in whole.name and whole.rows == 1):
            continue
        factors += [Weight("A", rank, local.width), Weight("B", local.rows, rank)]
        if workload.peft.dora:
            factors.append(Weight("magnitude", local.rows, 1))
    return held(workload, factors)


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters and activations of one layer of a rank."""

    kind: LayerKind
    base: Held
    """Base weights."""
    experts: Held
    """Expert weights."""
    adapter: Held
    trained: Held
    quantized: float
    """Share of the base weights that QLoRA stores in 4 bits."""
    stored_bytes: float
    """Bytes per stored element of the base weights."""
    saved: _LayerActivations


def read_layer(w: Workload, kind: LayerKind) -> Layer:
    """Return the parameters and activations of a layer."""
    weights = list(w.architecture.layer_weights(kind, w.mesh.tp, w.mesh.ep))
    base, adapter = held(w, weights), _adapters(w, kind) if w.peft.adapts else Held()
    quantized = _quantized_share(w.architecture, kind) if w.peft.quantizes else 0.0
    return Layer(
        kind=kind,
        base=base,
        experts=held(w, [weight for weight in weights if weight.sharding is Sharding.experts]),
        adapter=adapter,
        trained=adapter if w.peft.adapts else base,
        quantized=quantized,
        stored_bytes=w.stored_bytes * (1 - quantized) + _NF4_BYTES * quantized,
        saved=layer_activations(w, kind),
    )


def _quantized_share(architecture: Architecture, kind: LayerKind) -> float:
    """Return the share of a layer's elements that QLoRA stores in 4 bits: its linear layers."""
    weights = list(architecture.layer_weights(kind))
    linear = sum(weight.size for weight in weights if weight.is_matrix and weight.sharding is not Sharding.experts)
    return linear / sum(weight.size for weight in weights)


def layer_activations(w: Workload, kind: LayerKind) -> _LayerActivations:
    """Return the saved bytes of a layer on a rank."""
    a, sp, c = w.architecture, w.sequence_shards, w.compute_bytes
    tokens, hidden = w.local_tokens, a.hidden
    # A norm in float32 saves its input once; computed in less, a float32 copy besides the normalized states.
    # Normalized states are saved for the gradient of the norm's weight.
    wide = a.family.norm_offset or a.family.wide_norms
    norm_bytes = c if w.fused else 4 + (0 if w.peft.adapts else max(c, 4 * wide))
    none = a.norms_of(kind) * norm_bytes * hidden / sp
    parts = (kind.attends or kind.is_linear) + (kind.has_mlp or kind.has_experts)
    none += parts * c * hidden  # their inputs, gathered over tp under sequence parallel
    matmuls, transient = 0.0, 0.0
    if kind.attends:
        latent = a.latent
        saved, outputs, transient = _attention(w, kind) if latent is None else _latent(w, latent)
        none, matmuls = none + saved, matmuls + outputs + c * hidden / sp
    if kind.is_linear and a.linear is not None:
        saved, transient = recurrence_bytes(w, a.linear.local(w.mesh.tp))
        none, matmuls = none + saved, matmuls + c * (_projected(w, kind) + hidden / sp)
    gated, tp = 2 if a.family.gated else 1, w.mesh.tp
    if kind.has_experts:
        none, matmuls = none + _experts(w), matmuls + gated * c * -(-a.expert_mlp // tp) * a.experts_per_token
    if kind.has_mlp:
        none, matmuls = none + _mlp_tensors(w) * c * -(-a.mlp // tp), matmuls + gated * c * -(-a.mlp // tp)
    if kind.has_experts or kind.has_mlp:
        matmuls += c * hidden / sp
    layer_input = tokens * hidden * c / sp
    return _LayerActivations(
        tokens * none + _fake_quantized(w, kind) + _selected_rows(w, kind),
        selective=layer_input + tokens * matmuls,
        full=layer_input,
        transient=tokens * transient,
    )


def _attention(w: Workload, kind: LayerKind) -> tuple[float, float, float]:
    """Return the saved bytes per token of attention, those of outputs of matmuls, and what its backward adds."""
    a, c = w.architecture, w.compute_bytes
    all_heads, all_kv_heads, width = a.heads_of(kind)
    heads, kv_heads = local_heads(all_heads, all_kv_heads, w.mesh.tp)
    queries, keys = heads * width, kv_heads * width
    saved = 2.0 * c * (queries + keys) + 4 * heads
    if a.family.gated_queries:  # the gate, its sigmoid and the product
        saved += 3 * c * queries
    if w.mesh.cp > 1 and _uses_ulysses(w, heads, kv_heads):
        saved += c * queries  # the output before and after the all-to-all
    if a.family.query_key_norm is not QueryKeyNorm.none:
        wide = a.family.norm_offset or a.family.wide_norms
        saved += (c if w.fused else 4 + max(c, 4 * wide)) * (queries + keys)
    if a.family.value_norm:
        saved += 4 * keys
    if kind.is_windowed and not w.on_gpu:  # torch's kernel for CPUs takes as many key-value heads as heads with a mask
        saved += 2 * c * (queries - keys)
    scores = heads * w.seq_len if w.eager_attention else 0
    widened = 4 if c < 4 and not a.family.sinks else 0
    saved += scores * (c + widened + (c if a.family.softcap else 0))
    gates = queries if a.family.gated_queries else 0
    return saved, c * (2 * queries + gates + 2 * keys) + 4 * heads, scores * (c + (widened or c))


def _latent(w: Workload, latent: LatentHeads) -> tuple[float, float, float]:
    """Return the saved bytes per token of latent attention, those of outputs of matmuls, and what its backward adds."""
    a, c = w.architecture, w.compute_bytes
    heads = local_heads(a.heads, a.kv_heads, w.mesh.tp)[0]
    key, expanded = latent.plain + latent.rotated, latent.plain + latent.value
    compressed = latent.rank + latent.query_rank
    saved = (4.0 + 2 * c) * compressed + c * heads * latent.value
    scores = 0 if w.on_gpu and not w.eager_attention else heads * w.seq_len
    if scores:
        saved += 4 * (scores + heads * (2 * key + (expanded if c == 4 else latent.value)))
    else:
        saved += c * heads * (2 * key + expanded + latent.value) + 4 * heads
    outputs = c * (compressed + latent.rotated + heads * (key + expanded + latent.value)) + 4 * heads
    return saved, outputs, 8 * scores


def recurrence_bytes(w: Workload, heads: LinearHeads) -> tuple[float, float]:
    """Return the saved bytes per token of a layer with a recurrent state, and what its backward adds.

    transformers' functions compute rows in whole chunks. The bytes of the kernels of fla and mamba-ssm are by their
    code, not measured: they save inputs, outputs and, for the delta rule, one matrix per chunk.
    """
    kind, c, values = w.architecture.family.linear, w.compute_bytes, heads.values * heads.value_width
    if w.kernels:
        matrices = {LinearKind.delta_rule: 1, LinearKind.kimi_delta: 2}.get(kind, 0)
        per_head = c * matrices * heads.chunk + 12
        return float(c * (2 * heads.convolved + 3 * values) + 12 * values + per_head * heads.values), 0.0
    rows = -(-w.seq_len // heads.chunk) * heads.chunk / w.seq_len
    saved, transient = {
        LinearKind.delta_rule: _delta_rule,
        LinearKind.kimi_delta: _kimi_delta,
    }.get(kind, _mamba2)(heads, c)
    return rows * saved, rows * transient


def _delta_rule(heads: LinearHeads, c: int) -> tuple[float, float]:
    """Count transformers' torch_chunk_gated_delta_rule: five matrices of a chunk's tokens, tensors of keys and values
    in float32 (of keys, more if no cast has made them contiguous), a state per chunk; and around it, the convolution's
    input and output, and the gated norm."""
    keys, values = heads.values * heads.key_width, heads.values * heads.value_width
    saved = 4.0 * (5 * heads.values * heads.chunk + (12 if c >= 4 else 8) * keys + 6 * values + 10 * heads.values)
    saved += 4 * heads.state / heads.chunk + c * (2 * heads.convolved + 3 * values)
    if c >= 4 and heads.keys == heads.values:  # no copy: the keys are a view of all that is convolved
        saved += c * (heads.convolved - keys)
    return saved, 4 * (2 * heads.values * heads.chunk + 2 * keys)


def _kimi_delta(heads: LinearHeads, c: int) -> tuple[float, float]:
    """Count transformers' function for Kimi delta attention: three tensors of (chunk, chunk, key width) per head and
    chunk, since each channel decays differently, and the rows of the triangular solve."""
    keys, values = heads.values * heads.key_width, heads.values * heads.value_width
    saved = 4.0 * (heads.chunk * (3 * keys + 2 * heads.values + heads.values * heads.chunk / 3) + 22 * keys)
    saved += 4 * heads.state / heads.chunk + c * (2 * heads.convolved + values + 2 * heads.value_width)
    return saved, 3 * 4 * heads.chunk * keys


def _mamba2(heads: LinearHeads, c: int) -> tuple[float, float]:
    """Count transformers' mamba2_chunk_scan: three matrices of a chunk's tokens, keys (B, C) and values in float32, two
    states per chunk; and around it, the in-projection's output, the convolution and the gated norm."""
    keys, values = heads.values * heads.key_width, heads.values * heads.value_width
    saved = 4.0 * (3 * heads.values * heads.chunk + 5 * keys + (8 if c >= 4 else 10) * values)
    saved += 8 * heads.state / heads.chunk
    saved += c * (3 * values + (3 if c >= 4 else 2) * heads.convolved)
    return saved, 4 * (2 * heads.values * heads.chunk + 2 * keys)


def _selected_rows(w: Workload, kind: LayerKind) -> float:
    """Return the bytes of copies of the rows that a tp rank computes with, of weights that are whole on each."""
    weights = w.architecture.layer_weights(kind, w.mesh.tp, w.mesh.ep)
    return w.compute_bytes * sum(each.size * each.used for each in weights if each.used < 1)


def _projected(w: Workload, kind: LayerKind) -> float:
    """Return the features per token of a linear layer's input projections."""
    weights = w.architecture.layer_weights(kind, w.mesh.tp, w.mesh.ep)
    return sum(each.rows * each.used for each in weights if each.name.endswith(" projection"))


def _mlp_tensors(w: Workload) -> int:
    """Return the number of saved (tokens, intermediate) tensors of an MLP."""
    return (3 if w.fused else 4) if w.architecture.family.gated else 2


def _fake_quantized(w: Workload, kind: LayerKind) -> float:
    """Return the bytes of a layer's fake-quantized weights, and under int8_int4 of its linear layers' inputs."""
    if w.qat is Qat.none:
        return 0.0
    weights = [weight for weight in w.architecture.layer_weights(kind) if weight.is_matrix]
    linear = [weight for weight in weights if weight.sharding is not Sharding.experts]
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
    features = -(-a.expert_mlp // w.mesh.tp)
    routed = a.experts_per_token * c * (2 * a.hidden + (5 if a.family.gated else 3) * features)
    router = 3 * 4 * a.experts
    shared = _mlp_tensors(w) * c * -(-a.shared_mlp // w.mesh.tp)
    return routed + router + shared
