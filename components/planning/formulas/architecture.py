"""Weights and FLOPs of a decoder-only transformer, from its sizes and its family, without loading it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from components.config.shape import AttentionLayout, ModelShape, attention_layout, local_heads
from components.planning.formulas.families import FAMILIES, Family, LayerKind, LinearKind, QueryKeyNorm, layer_kinds
from components.protocol.errors import ConfigError


class Sharding(StrEnum):
    """How tp and ep distribute a weight. rows, columns: tp shards this dim; experts: ep shards the first dim, tp one of
    the others; replicated: the same on all ranks of both axes."""

    rows = "rows"
    columns = "columns"
    experts = "experts"
    replicated = "replicated"


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, whole or as one tp and ep rank holds it."""

    name: str
    rows: int
    """Size of dim 0, which FSDP shards; the number of experts for stacked matrices."""
    width: int
    """Product of the other dims."""
    sharding: Sharding = Sharding.replicated
    used: float = 1.0
    """Share of the rows that a tp rank computes with, of a weight that is whole on each."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.width

    @property
    def is_matrix(self) -> bool:
        """Whether it takes part in matmuls."""
        return self.width > 1 and not self.name.endswith(("bias", "convolution"))

    def shard(self, ranks: int) -> int:
        """Return the elements of the fullest of `ranks` FSDP shards: dim 0 is cut into chunks of equal size."""
        return -(-self.rows // ranks) * self.width


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """Sizes of linear attention, or of Mamba-2, whose groups are key heads and whose state is as wide as a key."""

    keys: int
    key_width: int
    values: int
    value_width: int
    kernel: int
    """Tokens that the convolution mixes."""
    chunk: int = 64
    """Tokens that are computed at once."""

    @property
    def convolved(self) -> int:
        """Features that pass the convolution."""
        return 2 * self.keys * self.key_width + self.values * self.value_width

    @property
    def state(self) -> int:
        """Elements of the state of all heads."""
        return self.values * self.key_width * self.value_width

    def local(self, tp: int) -> LinearHeads:
        """Return the heads of one tp rank: all of them, if tp does not divide them."""
        keys, values = self.keys, self.values
        if values % tp or (keys % tp and tp % keys):
            return self
        return replace(self, keys=max(keys // tp, 1), values=values // tp)


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Sizes of multi-head latent attention (DeepSeek-V2)."""

    query_rank: int
    """Width of the latent queries; 0: queries have one projection."""
    rank: int
    """Width of the latent keys and values."""
    rotated: int
    """Part of a query and key head with rotary embeddings."""
    plain: int
    """The other part."""
    value: int
    """Width of a value head."""


@dataclass(frozen=True, slots=True, eq=False)
class Architecture:
    """Weights and FLOPs of a model whose sizes are all known. Make it with `read_architecture`."""

    family: Family
    kinds: tuple[LayerKind, ...]
    """Those of the layers, in order."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Intermediate size of the dense MLPs."""
    vocab: int
    tied: bool
    experts: int = 0
    """Experts per layer; 0: a dense model."""
    experts_per_token: int = 0
    shared_mlp: int = 0
    expert_mlp: int = 0
    """Intermediate size of one expert."""
    full_kv_heads: int = 0
    """Key-value heads of layers that attend to all tokens, if they have others (Gemma 4)."""
    full_head_dim: int = 0
    shares_values: bool = False
    """Whether such layers use their keys as values."""
    window: int | None = None
    linear: LinearHeads | None = None
    latent: LatentHeads | None = None

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.kinds)

    def heads_of(self, kind: LayerKind) -> tuple[int, int, int]:
        """Return the query heads and key-value heads of a layer's attention, and the width of a head."""
        if kind.is_windowed:
            return self.heads, self.kv_heads, self.head_dim
        return self.heads, self.full_kv_heads or self.kv_heads, self.full_head_dim or self.head_dim

    def norms_of(self, kind: LayerKind) -> int:
        """Return the number of norms of a layer's hidden states."""
        return self.family.norms + 3 * (kind.has_experts and kind.has_mlp)

    def score_widths(self, kind: LayerKind) -> tuple[int, int]:
        """Return the widths of a key and a value head of a layer's attention."""
        latent, width = self.latent, self.heads_of(kind)[2]
        return (latent.plain + latent.rotated, latent.value) if latent else (width, width)

    @lru_cache(maxsize=4096)  # noqa: B019 (the planner needs those of one model in thousands of candidates)
    def layer_weights(self, kind: LayerKind, tp: int = 1, ep: int = 1) -> tuple[Weight, ...]:
        """Return the parameters of a decoder layer as a rank of `tp` x `ep` ranks holds them."""
        return tuple(self._weights_of(kind, tp, ep))

    def _weights_of(self, kind: LayerKind, tp: int, ep: int) -> Iterator[Weight]:
        family = self.family
        for _ in range(self.norms_of(kind) if family.norm_weight else 0):
            yield Weight("norm", self.hidden, 1)
            if family.norm_bias:
                yield Weight("norm bias", self.hidden, 1)
        if kind.attends:
            latent = self.latent
            yield from self._attention_weights(kind, tp) if latent is None else self._latent_weights(latent, tp)
        if kind.is_linear and self.linear is not None:
            yield from self._linear_weights(self.linear, tp)
        if kind.has_experts:
            yield from self._expert_weights(tp, ep)
            if kind.has_mlp:
                yield Weight("router scale", self.hidden, 1)
                yield Weight("expert scale", self.experts, 1)
        if kind.has_mlp:
            yield from self._mlp_weights(self.mlp, tp)

    def _attention_weights(self, kind: LayerKind, tp: int) -> Iterator[Weight]:
        family, hidden = self.family, self.hidden
        all_heads, all_kv_heads, width = self.heads_of(kind)
        heads, kv_heads = local_heads(all_heads, all_kv_heads, tp)
        split = Sharding.replicated if self.attention(kind, tp) is AttentionLayout.replicated else Sharding.rows
        queries, keys = heads * width, kv_heads * width
        gated = 2 if family.gated_queries else 1
        values = () if self.shares_values and not kind.is_windowed else (("value", keys),)
        for name, rows in (("query", gated * queries), ("key", keys), *values):
            yield Weight(name, rows, hidden, split)
            if family.qkv_bias:
                yield Weight(f"{name} bias", rows, 1, split)
        yield Weight("attention output", hidden, queries, Sharding.columns if split is Sharding.rows else split)
        if family.output_bias:
            yield Weight("attention output bias", hidden, 1)
        if family.query_key_norm is not QueryKeyNorm.none:
            per_head = family.query_key_norm is QueryKeyNorm.head
            yield Weight("query norm", width if per_head else queries, 1)
            yield Weight("key norm", width if per_head else keys, 1)
        if family.sinks:
            yield Weight("attention sinks", heads, 1)

    def _latent_weights(self, latent: LatentHeads, tp: int) -> Iterator[Weight]:
        heads, hidden = local_heads(self.heads, self.kv_heads, tp)[0], self.hidden
        split = Sharding.rows if heads < self.heads else Sharding.replicated
        queries = heads * (latent.plain + latent.rotated)
        if latent.query_rank:
            yield Weight("latent query", latent.query_rank, hidden)
            yield Weight("latent query norm", latent.query_rank, 1)
        yield Weight("query", queries, latent.query_rank or hidden, split)
        yield Weight("latent key and value", latent.rank + latent.rotated, hidden)
        yield Weight("latent key and value norm", latent.rank, 1)
        yield Weight("key and value", heads * (latent.plain + latent.value), latent.rank, split)
        columns = Sharding.columns if split is Sharding.rows else split
        yield Weight("attention output", hidden, heads * latent.value, columns)

    def _linear_weights(self, heads: LinearHeads, tp: int) -> Iterator[Weight]:
        """Yield the parameters of a layer with a recurrent state.

        tp shards a projection whose rows are for one kind of heads; others are whole on each rank, which computes with
        the rows of its heads, as are parameters per head.
        """
        kind, local = self.family.linear, heads.local(tp)
        counts = {"k": (heads.keys, heads.key_width), "v": (heads.values, heads.value_width), "h": (heads.values, 1)}
        mine = {"k": local.keys, "v": local.values, "h": local.values}
        for name, spans in self.family.projections.items():
            by_key_head = {"qkvz": "kkvv", "ba": "hh"}.get(name, spans)
            rows = sum(counts[each][0] * counts[each][1] for each in by_key_head)
            used = sum(mine[each] * counts[each][1] for each in by_key_head)
            even = len(spans) == 1 and local is not heads and used * tp == rows
            yield Weight(f"{name} projection", used if even else rows, self.hidden,
                         Sharding.rows if even else Sharding.replicated, 1.0 if even else used / rows)  # fmt: skip
        values, split = local.values * heads.value_width, Sharding.rows if local is not heads else Sharding.replicated
        if kind is LinearKind.kimi_delta:
            for name in ("decay", "gate"):
                yield Weight(f"{name} in", heads.value_width, self.hidden)
                yield Weight(f"{name} projection", values, heads.value_width, split)
        yield Weight("convolution", heads.convolved, heads.kernel, used=local.convolved / heads.convolved)
        if kind is LinearKind.mamba2:
            yield Weight("convolution bias", heads.convolved, 1)
            yield Weight("skip", heads.values, 1)
        yield Weight("decay", heads.values, 1)
        yield Weight("time step bias", heads.values * (heads.key_width if kind is LinearKind.kimi_delta else 1), 1)
        all_values = heads.values if kind is LinearKind.mamba2 else 1
        yield Weight("gated norm", all_values * heads.value_width, 1)
        columns = Sharding.columns if split is Sharding.rows else split
        yield Weight("mixer output", self.hidden, values, columns)

    def outer_weights(self, tp: int = 1) -> Iterator[Weight]:
        """Yield the parameters outside of the layers; a tied head is not repeated."""
        vocabulary = -(-self.vocab // tp)
        yield Weight("embedding", vocabulary, self.hidden, Sharding.rows)
        if self.family.position_table:
            yield Weight("positions", self.family.position_table, self.hidden)
        if self.family.norm_weight:
            yield Weight("final norm", self.hidden, 1)
            if self.family.norm_bias:
                yield Weight("final norm bias", self.hidden, 1)
        if not self.tied:
            yield Weight("head", vocabulary, self.hidden, Sharding.rows)

    def attention(self, kind: LayerKind, tp: int) -> AttentionLayout:
        """Return how tp distributes the heads of a layer's attention."""
        heads, kv_heads, _ = self.heads_of(kind)
        return attention_layout(heads, kv_heads, tp)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        layers = sum(
            count * sum(weight.size for weight in self.layer_weights(kind)) for kind, count in self.kind_counts.items()
        )
        return layers + sum(weight.size for weight in self.outer_weights())

    @property
    def kind_counts(self) -> Counter[LayerKind]:
        """Number of layers of each kind."""
        return Counter(self.kinds)

    def layer_matmul_weights(self, kind: LayerKind) -> int:
        """Return the active elements per token of a layer's matrices and convolutions: with experts, of the experts
        that it is routed to."""
        used = self.experts_per_token / self.experts if self.experts else 1.0
        return round(
            sum(
                weight.size * (used if weight.sharding is Sharding.experts else 1.0)
                for weight in self.layer_weights(kind)
                if weight.is_matrix or weight.name == "convolution"
            )
        )

    @property
    def matmul_weights(self) -> int:
        """Active matmul parameters per token, with the head's."""
        layers = sum(count * self.layer_matmul_weights(kind) for kind, count in self.kind_counts.items())
        return layers + self.vocab * self.hidden

    def attended_pairs(self, seq_len: int, *, windowed: bool = False) -> int:
        """Return the pairs of a query and a key of one causal row."""
        window = min(seq_len, self.window or seq_len) if windowed else seq_len
        return seq_len * window - window * (window - 1) // 2

    def step_flops_per_row(self, seq_len: int) -> float:
        """Return the model FLOPs of a row's forward and backward, as the MFU counts them: no recomputation.

        A recurrence counts token by token: the delta rule reads a state of keys x values by the key, adds to it, and
        reads it by the query; Mamba-2 does the last two.
        """
        flops = 6.0 * self.matmul_weights * seq_len
        for kind, count in self.kind_counts.items():
            if kind.attends:
                pairs = self.attended_pairs(seq_len, windowed=kind.is_windowed)
                flops += count * 6.0 * self.heads * sum(self.score_widths(kind)) * pairs
        if self.linear is not None:
            passes = 2 if self.family.linear is LinearKind.mamba2 else 3
            flops += 6.0 * passes * self.linear.state * seq_len * sum(kind.is_linear for kind in self.kinds)
        return flops

    def _mlp_weights(self, features: int, tp: int, name: str = "mlp") -> Iterator[Weight]:
        local = -(-features // tp)
        for matrix in ("gate", "up") if self.family.gated else ("up",):
            yield Weight(f"{name} {matrix}", local, self.hidden, Sharding.rows)
            if self.family.mlp_bias:
                yield Weight(f"{name} {matrix} bias", local, 1, Sharding.rows)
        yield Weight(f"{name} down", self.hidden, local, Sharding.columns)
        if self.family.mlp_bias:
            yield Weight(f"{name} down bias", self.hidden, 1)

    def _expert_weights(self, tp: int, ep: int) -> Iterator[Weight]:
        experts, local = self.experts // ep, -(-self.expert_mlp // tp)
        yield Weight("router", self.experts, self.hidden)
        if self.family.router_bias:
            yield Weight("router bias", self.experts, 1)
        matrices = 2 if self.family.gated else 1
        yield Weight("experts gate and up", experts, matrices * local * self.hidden, Sharding.experts)
        yield Weight("experts down", experts, local * self.hidden, Sharding.experts)
        if self.family.expert_bias:
            yield Weight("experts gate and up bias", experts, 2 * local, Sharding.experts)
            yield Weight("experts down bias", experts, self.hidden, Sharding.experts)
        if self.shared_mlp:
            yield from self._mlp_weights(self.shared_mlp, tp, "shared expert")
            if self.family.shared_gate:
                yield Weight("shared expert gate", 1, self.hidden)


_MORE_SIZES = ("num_global_key_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
"""Keys of sizes, beside those of `Family.sizes`, whose defaults follow from others."""


def read_architecture(shape: ModelShape, model: str, section: str = "model") -> Architecture:
    """Return the architecture of a model.

    Args:
        shape: Its sizes.
        model: Its option or path, for messages.
        section: Config section of the model, model or teacher.

    Raises ConfigError, naming the keys to set, if the sizes do not determine it.
    """
    if shape.family is None and section != "model":
        raise ConfigError(
            f"{section}.path={model}: its sizes are unknown, because it is not on this machine and no option of "
            f"conf/model has this path; set {section}.path to a local folder, or add an option with its sizes"
        )
    if shape.family is None:
        raise ConfigError(
            f"model.path={model}: its sizes are unknown, because it is not on this machine; set model.family, "
            "model.layers, model.hidden, model.heads, model.kv_heads, model.mlp and model.vocab, or model.path to a "
            "local folder"
        )
    family = FAMILIES.get(shape.family)
    if family is None:
        raise ConfigError(
            f"model.family={shape.family}: the formulas do not cover this model type; choose one of "
            f"{', '.join(sorted(FAMILIES))}, or simulate a mesh of your choice with cluster.dry_run=plan"
        )
    # A key that config.json sets to null has the default of its family, as in transformers.
    values: dict[str, Any] = {**family.sizes, **{key: each for key, each in shape.config.items() if each is not None}}
    if values.get("hidden_size_per_layer_input") or values.get("num_kv_shared_layers"):
        raise ConfigError(
            f"model={model}: the formulas do not cover layers with inputs of their own or with the keys and values of "
            "another layer (model.config.hidden_size_per_layer_input and num_kv_shared_layers are not 0); simulate a "
            "mesh of your choice with cluster.dry_run=plan"
        )
    counts = (*family.sizes, *_MORE_SIZES)
    if wrong := [key for key in counts if type(values.get(key, 0)) is not int or values.get(key, 0) < 0]:
        raise ConfigError([f"model.config.{key}={values[key]}: must be a whole number of at least 0" for key in wrong])
    moe = family.moe or bool(values.get("enable_moe_block"))
    expert_mlp = (shape.expert_mlp or shape.mlp) if moe else None
    mlp = 4 * shape.hidden if shape.mlp is None and shape.family == "gpt2" and shape.hidden else shape.mlp
    needed = {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "vocab": shape.vocab}
    needed |= {"expert_mlp": expert_mlp} if moe else {"mlp": mlp}
    if moe:
        needed |= {"experts": shape.experts, "experts_per_token": shape.experts_per_token}
    if family.single:  # nothing but the list says which layers there are
        names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
        needed["config.hybrid_override_pattern"] = next((1 for name in names if values.get(name)), None)
    if missing := [f"model.{name}" for name, value in needed.items() if value is None]:
        raise ConfigError(f"model={model}: {', '.join(missing)} unknown; set the missing sizes")
    try:
        return _assemble(shape, family, values, {name: value or 0 for name, value in needed.items()})
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model={model}: the lists of its layers cannot be read ({error!r}); correct layer_types, mlp_layer_types, "
            "layers_block_type, per_layer_config or linear_attn_config in config.json or model.config"
        ) from error


def _assemble(shape: ModelShape, family: Family, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Architecture:
    """Return the architecture, given the sizes that must be known, and values by transformers' keys."""
    hidden, heads, mlp = sizes["hidden"], sizes["heads"], sizes.get("mlp", shape.mlp or 0)
    expert_mlp, moe = sizes.get("expert_mlp", 0), "expert_mlp" in sizes
    # Of the layers that attend to all tokens, which are alike.
    own: Mapping[str, int] = next(iter(values.get("per_layer_config", {}).values()), {})
    stated_kv_heads = values.get("num_global_key_value_heads", 0) if values.get("attention_k_eq_v") else 0
    return Architecture(
        family=family,
        kinds=layer_kinds(family, values, sizes["layers"], has_window=shape.window is not None, has_experts=moe),
        hidden=hidden,
        heads=heads,
        kv_heads=shape.kv_heads or heads,
        head_dim=shape.head_dim or family.head_dim or hidden // heads,
        mlp=mlp,
        vocab=sizes["vocab"],
        tied=family.tied if shape.tied is None else shape.tied,
        experts=sizes.get("experts", 0),
        experts_per_token=sizes.get("experts_per_token", 0),
        shared_mlp=_shared_mlp(shape, values, expert_mlp) if moe else 0,
        expert_mlp=expert_mlp,
        full_kv_heads=own.get("num_key_value_heads") or stated_kv_heads,
        full_head_dim=own.get("head_dim") or values.get("global_head_dim", 0),
        shares_values=values.get("attention_k_eq_v", False),
        window=shape.window,
        linear=_linear_heads(family.linear, shape, values),
        latent=_latent_heads(values) if "kv_lora_rank" in values else None,
    )


def _shared_mlp(shape: ModelShape, values: Mapping[str, Any], expert_mlp: int) -> int:
    """Return the intermediate size of the experts that every token passes."""
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    stated = next((values[name] for name in names if name in values), None)
    number = values.get("n_shared_experts", values.get("num_shared_experts", 0))
    return shape.shared_mlp or stated or number * expert_mlp


def _linear_heads(kind: LinearKind, shape: ModelShape, values: Mapping[str, Any]) -> LinearHeads | None:
    match kind:
        case LinearKind.none:
            return None
        case LinearKind.mamba2:
            return LinearHeads(
                values["n_groups"], values["ssm_state_size"], values["mamba_num_heads"], values["mamba_head_dim"],
                values["conv_kernel"], values["chunk_size"],
            )  # fmt: skip
        case LinearKind.kimi_delta:
            stated = values.get("linear_attn_config", {})
            heads = stated.get("num_heads", values["linear_num_heads"])
            width = stated.get("head_dim", values["linear_head_dim"])
            kernel = stated.get("short_conv_kernel_size", values["linear_conv_kernel_dim"])
            return LinearHeads(heads, width, heads, width, kernel)
    keys = values.get("linear_num_key_heads") or shape.heads or 1
    width = values.get("linear_key_head_dim") or int(0.75 * (shape.hidden or 0) / keys)
    return LinearHeads(
        keys,
        width,
        shape.linear_heads or values.get("linear_num_value_heads") or shape.heads or keys,
        values.get("linear_value_head_dim") or 2 * width,
        values["linear_conv_kernel_dim"],
    )


def _latent_heads(values: Mapping[str, Any]) -> LatentHeads:
    return LatentHeads(
        values.get("q_lora_rank") or 0,
        values["kv_lora_rank"],
        values["qk_rope_head_dim"],
        values["qk_nope_head_dim"],
        values["v_head_dim"],
    )
