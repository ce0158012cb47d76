"""Context parallelism: sequences are sharded over the cp axis.

A sequence is split into 2 x cp chunks, and rank r holds chunks r and 2 x cp - 1 - r, so that causal attention costs
the same FLOPs on every rank (the zigzag order of Brandon et al. 2023). All other layers are tokenwise. Attention is
replaced through transformers' attention interface, without rewriting the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from components.batch import Batch
from components.config.errors import ConfigError
from components.config.layouts import ulysses_divides
from components.config.schema.model import CAUSAL_SDPA, DOCUMENTS
from components.config.schema.parallelism import ContextAttention
from components.distributed.mesh import Mesh
from components.models.anatomy import Anatomy

Attend = Callable[..., tuple[torch.Tensor, Any]]
"""transformers attention function: (module, query, key, value, mask, **options) -> (output, weights)."""


def local_positions(seq: int, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """Return the positions of this rank's tokens in a sequence of `seq` tokens: (seq / cp,), the early chunk first."""
    size = seq // (2 * mesh.size())
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in local_chunks(mesh)])


def local_chunks(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the indices of this rank's two chunks among the 2 x cp of a sequence."""
    rank = mesh.get_local_rank()
    return rank, 2 * mesh.size() - 1 - rank


def shard_rows(batch: Batch, mesh: Mesh | None) -> Batch:
    """Return this rank's cp shard of a micro-batch, with position ids in the full sequence.

    Tensors with a value per token are sharded: (batch, seq) -> (batch, seq / cp). Document bounds and values per row
    are kept unsharded. Returns the batch itself if there is no cp axis.
    """
    if mesh is None or mesh.size("cp") == 1:
        return batch
    return batch.at_positions(local_positions(batch.shape[1], mesh["cp"], batch.input_ids.device))


def use_context_parallel(
    model: nn.Module, mesh: DeviceMesh, method: ContextAttention, heads: tuple[int, int], anatomy: Anatomy
) -> str:
    """Replace a Hugging Face model's attention by one that takes cp-sharded sequences and attends over the full ones.

    Args:
        heads: Query heads and kv heads per rank, after tensor parallelism.

    Returns a line for the banner with the attention method and the reason.

    Raises ConfigError for a model that builds its own attention mask.
    """
    from transformers import AttentionInterface

    config: Any = model.config
    implementation = config._attn_implementation
    if implementation not in (CAUSAL_SDPA, "sdpa"):
        raise ConfigError(
            f"parallelism.cp={mesh.size()}: {type(model).__name__} uses attention={implementation}, and cp requires "
            "sdpa; set model.attention=sdpa or parallelism.cp=1"
        )
    reason = anatomy.needs_unsharded_rows or ("" if implementation == CAUSAL_SDPA else "builds its own attention masks")
    if reason:
        raise ConfigError(
            f"parallelism.cp={mesh.size()}: {type(model).__name__} {reason}, so its sequences cannot be sharded; set "
            "parallelism.cp=1"
        )
    chosen, reason = choose_attention(method, mesh.size(), heads)
    if chosen == ContextAttention.ulysses:
        attend: Attend = UlyssesAttention(mesh)
    else:
        # Not compiled: inside a compiled, tp-sharded layer, recomputation fails in torch ("expected all
        # tensors_saved_with_vc_check to be Tensors") because the DTensors' mesh is saved like a tensor.
        attend = torch.compiler.disable(GatheredAttention(mesh).__call__)
    name = f"{CAUSAL_SDPA}_{chosen}_{mesh.get_group().group_name}"
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)  # type: ignore[operator]
    return f"cp attention: {chosen}, {reason}"


def choose_attention(method: ContextAttention, cp: int, heads: tuple[int, int]) -> tuple[ContextAttention, str]:
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


@contextmanager
def unsharded_attention(model: nn.Module) -> Iterator[None]:
    """Within the context the model takes unsharded sequences, the same ones on every cp rank, for generation."""
    config: Any = model.config
    cp_attention = config._attn_implementation
    if not cp_attention.startswith(f"{CAUSAL_SDPA}_"):
        yield
        return
    model.set_attn_implementation(CAUSAL_SDPA)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(cp_attention)  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class _Attention:
    """Base of the two attention methods under cp."""

    mesh: DeviceMesh

    @property
    def local(self) -> Attend:
        """The mask-free attention function that runs within one rank (CAUSAL_SDPA)."""
        from transformers import AttentionInterface

        return AttentionInterface()[CAUSAL_SDPA]

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


class UlyssesAttention(_Attention):
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
        query, key, value = self._to_heads(query, key, value)
        local_module = _LocalHeads(query.shape[1] // key.shape[1], module.training)
        output, _ = self.local(local_module, query, key, value, None, **options)  # (batch, seq, heads / cp, head_dim)
        return self._to_tokens(output), None

    def _to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Exchange (batch, heads, seq / cp, head_dim) for (batch, heads / cp, seq, head_dim), in sequence order.

        One all-to-all for all tensors, whose heads and head_dims may differ. The results share one buffer, in which
        the heads of a token are adjacent: the layout that projections write and attention kernels read.
        """
        cp = self.mesh.size()
        batch, _, tokens, _ = tensors[0].shape
        shapes = [(each.shape[1] // cp, each.shape[3]) for each in tensors]  # heads of a rank, head_dim
        by_rank = [each.transpose(1, 2).reshape(batch, tokens, cp, -1).movedim(2, 0) for each in tensors]
        received = all_to_all_single_autograd(torch.cat(by_rank, dim=-1), None, None, self.mesh.get_group())
        width = sum(heads * head_dim for heads, head_dim in shapes)
        shards = received.view(cp, batch, 2, tokens // 2, width)
        full = in_sequence_order(shards, dim=2).reshape(batch, cp * tokens, width)
        parts = full.split([heads * head_dim for heads, head_dim in shapes], dim=-1)
        return [part.unflatten(-1, shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]

    def _to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """Exchange (batch, seq, heads / cp, head_dim) for (batch, seq / cp, heads, head_dim)."""
        cp = self.mesh.size()
        batch, seq, heads, width = output.shape
        chunks = output.view(batch, 2 * cp, seq // (2 * cp), heads, width)
        early, late = chunks[:, :cp], chunks[:, cp:].flip(1)  # (batch, cp, chunk, heads / cp, head_dim)
        by_rank = torch.stack([early, late], dim=2).movedim(1, 0).contiguous()  # (cp, batch, 2, chunk, ...)
        received = all_to_all_single_autograd(by_rank, None, None, self.mesh.get_group())
        by_head = received.view(cp, batch, seq // cp, heads, width).movedim(0, 2)  # (batch, seq / cp, cp, ...)
        return by_head.reshape(batch, seq // cp, cp * heads, width)


class GatheredAttention(_Attention):
    """Attention of the local queries over all-gathered keys and values, one group of heads at a time.

    Heads are processed in up to cp groups. Each group is recomputed in the backward, so that only local keys and values
    are saved and the gathered ones exist for one group of heads at a time.
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
        kv_heads = key.shape[1]
        groups = next(count for count in range(min(self.mesh.size(), kv_heads), 0, -1) if kv_heads % count == 0)
        documents = options.pop(DOCUMENTS, None)
        first = None if documents is None else documents.starts(query.shape[2] * self.mesh.size())  # (batch, seq)
        attend = partial(self._attend, module, (sliding_window, first), options)
        preserve_rng_state = options.get("dropout", 0.0) > 0
        outputs = [
            checkpoint(attend, *group, use_reentrant=False, preserve_rng_state=preserve_rng_state)
            for group in zip(*(tensor.chunk(groups, dim=1) for tensor in (query, key, value)), strict=True)
        ]
        return torch.cat(outputs, dim=2), None

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
        key, value = self._gather(key, value)  # (batch, kv heads, seq, head_dim) each
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

    def _gather(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All-gather keys and values over cp in one collective, in sequence order.

        (batch, heads, seq / cp, head_dim) -> (batch, heads, seq, head_dim) each. The head_dim of values may be smaller
        than that of keys (DeepSeek's latent attention).
        """
        cp, widths = self.mesh.size(), [key.shape[-1], value.shape[-1]]
        both = torch.cat([key, value], dim=-1)  # (batch, heads, seq / cp, both head_dims)
        batch, heads, tokens, width = both.shape
        gathered = _Gather.apply(both.contiguous(), self.mesh.get_group())
        shards = gathered.view(cp, batch, heads, 2, tokens // 2, width).split(widths, dim=-1)
        full_key, full_value = (
            in_sequence_order(each, dim=3).reshape(batch, heads, cp * tokens, each.shape[-1]) for each in shards
        )
        return full_key, full_value


class _Gather(torch.autograd.Function):
    """All-gather along dim 0. Each rank's gradient covers its own queries only, so the backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = shard.new_empty(dist.get_world_size(group) * shard.shape[0], *shard.shape[1:])
        dist.all_gather_into_tensor(gathered, shard, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        shard_grad = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(shard_grad, grad.contiguous(), group=ctx.group)
        return shard_grad, None


def in_sequence_order(shards: torch.Tensor, dim: int) -> torch.Tensor:
    """Reorder the chunks of all ranks from zigzag to sequence order.

    Args:
        shards: (cp, ..., 2, chunk, ...).
        dim: Dimension of `shards` that holds the two chunks of a rank.

    Returns a tensor (..., 2 x cp, chunk, ...).
    """
    early, late = shards.select(dim, 0), shards.select(dim, 1).flip(0)  # (cp, ..., chunk, ...)
    return torch.cat([early, late]).movedim(0, dim - 1)
