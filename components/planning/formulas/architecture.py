"""Weights and FLOPs of a decoder-only transformer, from its sizes and its family, without loading it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from components.config.shape import (
    AttentionLayout,
    ModelShape,
    attention_layout,
    local_heads,
)
from components.protocol.errors import ConfigError


class QueryKeyNorm(StrEnum):
    """Norms of queries and keys. head: one weight vector for all heads; width: a weight for each feature."""

    none = "none"
    head = "head"
    width = "width"


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
    moe: bool = False
    """Whether every MLP is a mixture of experts."""
    expert_bias: bool = False
    router_bias: bool = False
    softcap: bool = False
    """Whether attention scores pass through tanh, which only eager attention implements."""
    sinks: bool = False
    """One learned attention logit per head."""
    full_every: int = 0
    """Every n-th layer attends to all tokens, the others within a window; 0: all layers are alike."""
    position_table: int = 0
    """Learned position embeddings, if the config states no other number; 0: none."""
    windowed: bool = False
    """Whether all layers attend within the window that the config states."""


_LLAMA = Family()
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(windowed=True),
    "ministral": Family(windowed=True),
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
}
"""transformers' model type -> structure. Every row is compared with the built model in the tests."""


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

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.width

    @property
    def is_matrix(self) -> bool:
        """Whether it takes part in matmuls."""
        return self.width > 1 and not self.name.endswith("bias")

    def shard(self, ranks: int) -> int:
        """Return the elements of the fullest of `ranks` FSDP shards: dim 0 is cut into chunks of equal size."""
        return -(-self.rows // ranks) * self.width


@dataclass(frozen=True, slots=True)
class Architecture:
    """Weights and FLOPs of a model whose sizes are all known. Make it with `read_architecture`."""

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Intermediate size of the dense MLPs or of one expert."""
    vocab: int
    tied: bool
    experts: int = 0
    """Experts per layer; 0: a dense model."""
    experts_per_token: int = 0
    shared_mlp: int = 0
    window: int | None = None

    def layer_weights(self, tp: int = 1, ep: int = 1) -> Iterator[Weight]:
        """Yield the parameters of one decoder layer as a rank of `tp` x `ep` ranks holds them."""
        family, hidden = self.family, self.hidden
        heads, kv_heads = local_heads(self.heads, self.kv_heads, tp)
        split = Sharding.replicated if self.attention(tp) is AttentionLayout.replicated else Sharding.rows
        queries, keys = heads * self.head_dim, kv_heads * self.head_dim
        for name, rows in (("query", queries), ("key", keys), ("value", keys)):
            yield Weight(name, rows, hidden, split)
            if family.qkv_bias:
                yield Weight(f"{name} bias", rows, 1, split)
        yield Weight("attention output", hidden, queries, Sharding.columns if split is Sharding.rows else split)
        if family.output_bias:
            yield Weight("attention output bias", hidden, 1)
        if family.query_key_norm is not QueryKeyNorm.none:
            per_head = family.query_key_norm is QueryKeyNorm.head
            yield Weight("query norm", self.head_dim if per_head else queries, 1)
            yield Weight("key norm", self.head_dim if per_head else keys, 1)
        if family.sinks:
            yield Weight("attention sinks", heads, 1)
        for _ in range(family.norms if family.norm_weight else 0):
            yield Weight("norm", hidden, 1)
            if family.norm_bias:
                yield Weight("norm bias", hidden, 1)
        yield from self._expert_weights(tp, ep) if self.experts else self._mlp_weights(self.mlp, tp)

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

    def attention(self, tp: int) -> AttentionLayout:
        """Return how tp distributes the heads."""
        return attention_layout(self.heads, self.kv_heads, tp)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        layer = sum(weight.size for weight in self.layer_weights())
        return self.layers * layer + sum(weight.size for weight in self.outer_weights())

    @property
    def layer_matmul_weights(self) -> int:
        """Active matmul parameters per token in one layer: with experts, those of the experts that it is routed to."""
        used = self.experts_per_token / self.experts if self.experts else 1.0
        return round(
            sum(
                weight.size * (used if weight.sharding is Sharding.experts else 1.0)
                for weight in self.layer_weights()
                if weight.is_matrix
            )
        )

    @property
    def matmul_weights(self) -> int:
        """Active matmul parameters per token, with the head's."""
        return self.layers * self.layer_matmul_weights + self.vocab * self.hidden

    @property
    def windowed_layers(self) -> int:
        """Number of layers that attend within the window."""
        if self.window is None:
            return 0
        if self.family.full_every:
            return self.layers - self.layers // self.family.full_every
        return self.layers if self.family.windowed else 0

    def attended_pairs(self, seq_len: int, *, windowed: bool = False) -> int:
        """Return the pairs of a query and a key of one causal row."""
        window = min(seq_len, self.window or seq_len) if windowed else seq_len
        return seq_len * window - window * (window - 1) // 2

    def step_flops_per_row(self, seq_len: int) -> float:
        """Return the model FLOPs of a row's forward and backward, as the MFU counts them: no recomputation."""
        full = (self.layers - self.windowed_layers) * self.attended_pairs(seq_len)
        pairs = full + self.windowed_layers * self.attended_pairs(seq_len, windowed=True)
        return 6.0 * self.matmul_weights * seq_len + 12.0 * self.heads * self.head_dim * pairs

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
        experts, local = self.experts // ep, -(-self.mlp // tp)
        yield Weight("router", self.experts, self.hidden)
        if self.family.router_bias:
            yield Weight("router bias", self.experts, 1)
        yield Weight("experts gate and up", experts, 2 * local * self.hidden, Sharding.experts)
        yield Weight("experts down", experts, local * self.hidden, Sharding.experts)
        if self.family.expert_bias:
            yield Weight("experts gate and up bias", experts, 2 * local, Sharding.experts)
            yield Weight("experts down bias", experts, self.hidden, Sharding.experts)
        if self.shared_mlp:
            yield from self._mlp_weights(self.shared_mlp, tp, "shared expert")
            yield Weight("shared expert gate", 1, self.hidden)


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
    mlp = (shape.expert_mlp or shape.mlp) if family.moe else shape.mlp
    if mlp is None and shape.family == "gpt2" and shape.hidden:
        mlp = 4 * shape.hidden
    needed = {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "vocab": shape.vocab}
    needed |= {"expert_mlp" if family.moe else "mlp": mlp}
    if family.moe:
        needed |= {"experts": shape.experts, "experts_per_token": shape.experts_per_token}
    if missing := [f"model.{name}" for name, value in needed.items() if value is None]:
        raise ConfigError(f"model={model}: {', '.join(missing)} unknown; set the missing sizes")
    sizes = {name: value or 0 for name, value in needed.items()}
    hidden, heads = sizes["hidden"], sizes["heads"]
    return Architecture(
        family=family,
        layers=sizes["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=shape.kv_heads or heads,
        head_dim=shape.head_dim or family.head_dim or hidden // heads,
        mlp=mlp or 0,
        vocab=sizes["vocab"],
        tied=family.tied if shape.tied is None else shape.tied,
        experts=sizes.get("experts", 0),
        experts_per_token=sizes.get("experts_per_token", 0),
        shared_mlp=shape.shared_mlp or 0,
        window=shape.window,
    )
