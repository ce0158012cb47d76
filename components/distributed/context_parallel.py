"""Context parallelism: sequences are sharded over the cp axis.

Attention is replaced through transformers' attention interface, without rewriting the model. Linear attention, Mamba-2
and short convolutions get this rank's `RowShard` as a keyword of the decoder layers. All other layers are tokenwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from components.config.schema.model import CAUSAL_EAGER, CAUSAL_SDPA, DOCUMENTS, ROW_SHARD
from components.config.schema.parallelism import ContextAttention, ContextLinear
from components.config.shape import ulysses_divides
from components.distributed.row_shards import (
    GatherShards,
    RowShard,
    in_rank_order,
    in_sequence_order,
    local_chunks,
    to_heads,
    to_tokens,
)
from components.distributed.tensor_parallel import with_heads
from components.models.anatomy import Anatomy
from components.protocol.errors import ConfigError
from components.torch_kernels import cast_by_autocast, has_grouped_queries, row_ends, supports_varlen

_Attend = Callable[..., tuple[torch.Tensor, Any]]
"""transformers attention function: (module, query, key, value, mask, **options) -> (output, weights)."""


def use_context_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    methods: tuple[ContextAttention, ContextLinear],
    heads: tuple[int, int],
    anatomy: Anatomy,
) -> str:
    """Make a Hugging Face model take cp-sharded sequences and attend over the full ones, also by its linear layers.

    Args:
        methods: For attention, and for linear layers.
        heads: Query heads and kv heads per rank, after tensor parallelism.

    Returns a line for the banner with the attention method and the reason.

    Raises ConfigError for a model that builds its own attention mask.
    """
    from transformers import AttentionInterface

    config: Any = model.config
    implementation = config._attn_implementation
    reason = anatomy.needs_unsharded_rows
    if not reason and implementation not in (CAUSAL_SDPA, CAUSAL_EAGER, "sdpa"):
        supported = "sdpa" if model._supports_sdpa else "eager"
        raise ConfigError(
            f"parallelism.cp={mesh.size()}: {type(model).__name__} uses attention={implementation}, and cp requires "
            f"{supported}; set model.attention={supported} or parallelism.cp=1"
        )
    if reason or implementation == "sdpa":
        reason = reason or "builds its own attention masks"
        raise ConfigError(
            f"parallelism.cp={mesh.size()}: {type(model).__name__} {reason}, so its sequences cannot be sharded; set "
            "parallelism.cp=1"
        )
    chosen, reason = _choose_attention(methods[0], mesh.size(), heads)
    is_ulysses = chosen == ContextAttention.ulysses
    attention = _UlyssesAttention(mesh, implementation) if is_ulysses else GatheredAttention(mesh, implementation)
    attend: _Attend = attention
    if not is_ulysses or implementation == CAUSAL_EAGER:
        # Not compiled: inside a compiled, tp-sharded layer, recomputation fails in torch ("expected all
        # tensors_saved_with_vc_check to be Tensors") because the DTensors' mesh is saved like a tensor. Eager attention
        # copies its module, which torch does not compile.
        attend = torch.compiler.disable(attention.__call__)
    name = f"{implementation}_{chosen}_{mesh.get_group().group_name}"
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)  # type: ignore[operator]
    if not anatomy.mixers:
        return f"cp attention: {chosen}, {reason}"
    shard = RowShard(mesh, methods[1])

    def add_shard(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # Generation takes rows that are not divided, by another implementation of attention.
        return args, {**kwargs, ROW_SHARD: shard} if config._attn_implementation == name else kwargs

    for module in dict.fromkeys((model, model.base_model)):
        module.register_forward_pre_hook(add_shard, with_kwargs=True)  # type: ignore[union-attr]
    ways = {ContextLinear.auto: "by heads where cp divides them, otherwise by states"}
    return f"cp attention: {chosen}, {reason}; linear layers: {ways.get(methods[1], f'by {methods[1]}')}"


def _choose_attention(method: ContextAttention, cp: int, heads: tuple[int, int]) -> tuple[ContextAttention, str]:
    """Return the attention method under cp, ulysses or all_gather, and the reason for it.

    Args:
        heads: Query heads and kv heads per rank, after tensor parallelism.
    """
    query_heads, kv_heads = heads
    divides = ulysses_divides(query_heads, kv_heads, cp)
    if method != ContextAttention.auto:
        return method, "set by parallelism.cp_attention"
    if divides:
        return ContextAttention.ulysses, f"cp {cp} divides {query_heads} heads and {kv_heads} kv heads"
    return ContextAttention.all_gather, f"cp {cp} does not divide {query_heads} heads and {kv_heads} kv heads"


class _Attention:
    """Base of the two attention methods under cp."""

    def __init__(self, mesh: DeviceMesh, implementation: str) -> None:
        """`implementation`: CAUSAL_SDPA or CAUSAL_EAGER."""
        from transformers import AttentionInterface  # the compiler of torch 2.11 cannot trace this import

        self.mesh = mesh
        self.local: _Attend = AttentionInterface()[implementation]
        """Mask-free attention function that runs within one rank."""
        self.is_eager = implementation == CAUSAL_EAGER

    def reject_mask(self, module: nn.Module, mask: torch.Tensor | None) -> None:
        """Raise ConfigError for a mask.

        transformers builds none for this attention, so the model built it itself, for the local shard only.
        """
        if mask is not None:
            raise ConfigError(
                f"parallelism.cp={self.mesh.size()}: {type(module).__name__} builds its own attention mask, which "
                "covers only one shard of the sequence; set parallelism.cp=1"
            )


class _LocalHeads:
    """Replacement for the attention module with the attributes that sdpa reads, for this rank's heads.

    A plain class, because the compiler cannot trace a `SimpleNamespace`.
    """

    is_causal = True

    def __init__(self, num_key_value_groups: int, training: bool) -> None:
        self.num_key_value_groups = num_key_value_groups
        self.training = training


class _UlyssesAttention(_Attention):
    """Attention between two all-to-alls: sequence shards with all heads -> full sequences with heads / cp, and back."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend over the full sequence: (batch, heads, seq / cp, head_dim) -> (batch, seq / cp, heads, head_dim)."""
        self.reject_mask(module, attention_mask)
        cp = self.mesh.size()
        if key.shape[1] % cp:  # fewer kv heads than ranks: repeat each kv head for the ranks with its query heads
            key, value = (tensor.repeat_interleave(cp // tensor.shape[1], dim=1) for tensor in (key, value))
        by_token = (each.transpose(1, 2) for each in (query, key, value))
        query, key, value = (each.transpose(1, 2) for each in to_heads(self.mesh, *by_token))
        local_module: Any = _LocalHeads(query.shape[1] // key.shape[1], module.training)
        if self.is_eager:
            local_module = with_heads(module, self.mesh.get_local_rank() * query.shape[1], query, key)
        output, _ = self.local(local_module, query, key, value, None, **options)  # (batch, seq, heads / cp, head_dim)
        return to_tokens(self.mesh, output), None


class GatheredAttention(_Attention):
    """Attention of the local queries over all-gathered keys and values, one group of heads at a time.

    Heads are processed in up to cp groups. Only local keys and values are saved for the backward, which gathers them
    again, so that the gathered ones exist for one group of heads at a time. On a GPU, torch's variable-length kernel
    attends without a mask; where it does not support the inputs, a group is recomputed in the backward, with masks.
    """

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend over the full sequence: (batch, heads, seq / cp, head_dim) -> (batch, seq / cp, heads, head_dim)."""
        self.reject_mask(module, attention_mask)
        documents, dropout = options.pop(DOCUMENTS, None), options.get("dropout", 0.0)
        kv_heads = key.shape[1]
        groups = next(count for count in range(min(self.mesh.size(), kv_heads), 0, -1) if kv_heads % count == 0)
        cast = cast_by_autocast(query, key, value)
        if not self.is_eager and supports_varlen(cast[0], cast[2], dropout):
            seq = query.shape[2] * self.mesh.size()
            window = sliding_window if sliding_window is not None and sliding_window < seq else None
            calls = self._varlen_calls(query, window, documents)
            repeats = 1 if has_grouped_queries() else query.shape[1] // kv_heads
            kernel = _VarlenKernel(self, groups, calls, window, options.get("scaling"), repeats)
            output: torch.Tensor = _GatheredVarlen.apply(*cast, kernel)
            return output, None
        first = None if documents is None else documents.starts(query.shape[2] * self.mesh.size())  # (batch, seq)
        outputs: list[torch.Tensor] = []
        for index, group in enumerate(zip(*(each.chunk(groups, dim=1) for each in (query, key, value)), strict=True)):
            # Outside of the checkpoint: tensor parallelism replaces the module's parameters during its forward only.
            heads = with_heads(module, index * group[0].shape[1], *group[:2]) if self.is_eager else module
            attend = partial(self._attend, heads, (sliding_window, first), options)
            outputs.append(checkpoint(attend, *group, use_reentrant=False, preserve_rng_state=dropout > 0))
        return torch.cat(outputs, dim=2), None

    def _varlen_calls(self, query: torch.Tensor, window: int | None, documents: Any) -> list[_VarlenCall]:
        """Return the calls of the variable-length kernel for this rank's two chunks.

        Args:
            query: (batch, heads, seq / cp, head_dim).
            documents: `components.models.documents.Documents` of packed rows; None: a row is one document.
        """
        batch, _, tokens, _ = query.shape
        calls, size = [], tokens // 2
        for chunk in local_chunks(self.mesh):
            start, end = chunk * size, (chunk + 1) * size
            first_key = 0 if window is None else max(0, start - window + 1)
            if documents is None:
                query_ends, key_ends = (row_ends(batch, length, query.device) for length in (size, end - first_key))
            else:
                query_ends, key_ends = documents.chunk_ends(start, end, first_key)
            longest = end if documents is None or documents.longest is None else documents.longest
            calls.append(
                _VarlenCall(
                    first_key, end, query_ends, key_ends, min(longest, size), min(longest, end - first_key)
                )
            )  # fmt: skip
        return calls

    def _attend(
        self,
        module: nn.Module,
        visible: tuple[int | None, torch.Tensor | None],
        options: dict[str, Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Attend for one group of heads: (batch, heads, seq / cp, head_dim) -> (batch, seq / cp, heads, head_dim).

        Args:
            visible: The sliding window, and the first position of each token's document, (batch, seq).
        """
        window, first = visible
        key, value = self.gather(key, value)  # (batch, kv heads, seq, head_dim) each
        outputs = []
        for queries, chunk in zip(query.chunk(2, dim=2), local_chunks(self.mesh), strict=True):
            start, end = (queries.shape[2] * index for index in (chunk, chunk + 1))  # keys from `end` on are masked
            positions = torch.arange(end, device=query.device)
            query_position, key_position = positions[start:, None], positions[None, :]
            mask = key_position <= query_position  # (seq / 2 cp, end) of bool; int64 distances would take 8x the memory
            if window is not None:
                mask &= key_position > query_position - window
            mask = mask[None] if first is None else mask & (key_position >= first[:, start:end, None])  # (batch or 1,)
            output, _ = self.local(module, queries, key[:, :, :end], value[:, :, :end], mask[:, None], **options)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def gather(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All-gather keys and values over cp in one collective, in sequence order.

        (batch, heads, seq / cp, head_dim) -> (batch, heads, seq, head_dim) each. The head_dim of values may be smaller
        than that of keys (DeepSeek's latent attention).
        """
        cp, widths = self.mesh.size(), [key.shape[-1], value.shape[-1]]
        both = torch.cat([key, value], dim=-1)  # (batch, heads, seq / cp, both head_dims)
        batch, heads, tokens, width = both.shape
        gathered = GatherShards.apply(both.contiguous(), self.mesh.get_group())
        shards = gathered.view(cp, batch, heads, 2, tokens // 2, width).split(widths, dim=-1)
        full_key, full_value = (
            in_sequence_order(shard, dim=3).reshape(batch, heads, cp * tokens, shard.shape[-1]) for shard in shards
        )
        return full_key, full_value

    def scatter(self, full: torch.Tensor) -> torch.Tensor:
        """Sum gradients over cp and return this rank's shard: (batch, heads, seq, width) -> (..., seq / cp, width)."""
        by_rank = in_rank_order(full, self.mesh.size(), dim=2)  # (cp, batch, heads, seq / cp, width)
        shard = by_rank.new_empty(by_rank.shape[1:])
        dist.reduce_scatter_tensor(shard, by_rank.flatten(0, 1), group=self.mesh.get_group())
        return shard


class _VarlenCall(NamedTuple):
    """Arguments of one call of the variable-length kernel: the queries of a chunk and the keys up to its end."""

    first_key: int
    end: int
    query_ends: torch.Tensor
    """Cumulative ends of the queries of each document, (documents of all rows + 1,) int32; `key_ends`: of the keys."""
    key_ends: torch.Tensor
    longest_query: int
    """Upper bound on the queries of a document in the chunk; `longest_key`: on its keys."""
    longest_key: int

    def keys(self, full: torch.Tensor, repeats: int) -> torch.Tensor:
        """Return the visible keys or values, (tokens of all rows, heads x repeats, head_dim).

        full: (batch, heads, seq, head_dim).
        """
        visible = full[:, :, self.first_key : self.end].transpose(1, 2).flatten(0, 1)
        return visible if repeats == 1 else visible.repeat_interleave(repeats, dim=1)


class _VarlenKernel(NamedTuple):
    """Causal attention of one layer over gathered keys, without masks, by torch's variable-length kernel.

    The causal mask of the kernel is aligned to the last query and the last key of a document. The keys of a call end
    where its queries end, so nothing beyond the causal triangle is computed.
    """

    attention: GatheredAttention
    group_count: int
    """Number of groups of heads."""
    calls: list[_VarlenCall]
    """One call for each chunk of this rank."""
    window: int | None
    scale: float | None
    repeats: int
    """Copies of each key head that a call gets: 1, or under torch 2.11, query heads per key head."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of forward and backward."""
        return {
            "is_causal": self.window is None,
            "scale": self.scale,
            "window_size": [-1 if self.window is None else self.window - 1, 0],
        }

    def by_group(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield, for each group, its heads of all tensors: (batch, heads, seq / cp, head_dim)."""
        return zip(*(tensor.chunk(self.group_count, dim=1) for tensor in tensors), strict=True)


def _flat_chunks(shard: torch.Tensor) -> list[torch.Tensor]:
    """Return both chunks of (batch, heads, seq / cp, head_dim) as (tokens of all rows, heads, head_dim)."""
    return [each.transpose(1, 2).flatten(0, 1) for each in shard.chunk(2, dim=2)]


class _GatheredVarlen(torch.autograd.Function):
    """Attention by `_VarlenKernel`: (batch, heads, seq / cp, head_dim) -> (batch, seq / cp, heads, head_dim).

    Saves the local tensors, the output and the log-sum-exp. The backward gathers keys and values again instead of
    recomputing attention, which would run the forward kernel twice.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: _VarlenKernel
    ) -> torch.Tensor:
        batch, heads, tokens, width = query.shape
        output = query.new_empty(batch, tokens, heads, width)
        saved = []
        grouped = {"enable_gqa": True} if key.shape[1] * kernel.repeats != heads else {}
        for queries, keys, values, out in kernel.by_group(query, key, value, output.transpose(1, 2)):
            full_key, full_value = kernel.attention.gather(keys, values)
            for call, chunk, target in zip(kernel.calls, _flat_chunks(queries), out.chunk(2, dim=2), strict=True):
                visible = (call.keys(each, kernel.repeats) for each in (full_key, full_value))
                attended, *state = torch.ops.torch_attn._varlen_attn(
                    chunk, *visible, *call[2:], **kernel.options, **grouped
                )
                target.copy_(attended.unflatten(0, (batch, -1)).transpose(1, 2))
                saved += state  # log-sum-exp (heads, tokens), and the random state, which is unused without dropout
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, output, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        kernel: _VarlenKernel = ctx.kernel
        query, key, value, output, *saved = ctx.saved_tensors
        states, batch = iter(saved), len(query)
        grads = [torch.empty_like(each) for each in (query, key, value)]
        tensors = (query, key, value, output.transpose(1, 2), grad.transpose(1, 2), *grads)
        for queries, keys, values, out, grad_out, *targets in kernel.by_group(*tensors):
            full_key, full_value = kernel.attention.gather(keys, values)
            grad_both = full_key.new_zeros(*full_key.shape[:3], 2 * full_key.shape[3])  # of keys and of values
            chunks = map(_flat_chunks, (grad_out, queries, out))
            for call, target, *local in zip(kernel.calls, targets[0].chunk(2, dim=2), *chunks, strict=True):
                grad_chunk, chunk, attended = local
                visible = (call.keys(each, kernel.repeats) for each in (full_key, full_value))
                logsumexp, random_state = next(states), next(states)
                found = torch.ops.torch_attn._varlen_attn_backward(
                    grad_chunk, chunk, *visible, attended, logsumexp, *call[2:], rng_state=random_state,
                    **kernel.options,
                )  # fmt: skip
                grad_query, *grad_keys = (each.unflatten(0, (batch, -1)).transpose(1, 2) for each in found)
                if kernel.repeats > 1:
                    grad_keys = [each.unflatten(1, (-1, kernel.repeats)).sum(2) for each in grad_keys]
                target.copy_(grad_query)
                grad_both[:, :, call.first_key : call.end] += torch.cat(grad_keys, dim=-1)
            for target, shard in zip(targets[1:], kernel.attention.scatter(grad_both).chunk(2, dim=-1), strict=True):
                target.copy_(shard)
        return grads[0], grads[1], grads[2], None
