"""Context parallelism: each rank of the cp axis computes its part of every row.

A row is cut into 2 x cp chunks; rank r has chunks r and 2 x cp - 1 - r, an early one and a late one, so that under
causal attention all ranks have the same work (the zigzag order of Brandon et al. 2023). Everything but attention works
token by token; attention comes in through transformers' attention interface, so no model is rewritten.
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
"""An attention function of transformers: (module, query, key, value, mask, **options) -> (output, weights)."""


def own_positions(seq: int, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """Return the places in a row of `seq` tokens of those that this rank has: (seq / cp,), its early chunk first."""
    size = seq // (2 * mesh.size())
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in own_chunks(mesh)])


def own_chunks(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the numbers of this rank's two chunks among the 2 x cp of a row."""
    rank = mesh.get_local_rank()
    return rank, 2 * mesh.size() - 1 - rank


def shard_rows(batch: Batch, mesh: Mesh | None) -> Batch:
    """Return this rank's part of a micro-batch of whole rows, with the position of every token in its row.

    What is aligned with the tokens is cut alike: (batch, seq) -> (batch, seq / cp). Document bounds and values per row
    concern whole rows and stay. Returns the batch itself where there is no cp axis.
    """
    if mesh is None or mesh.size("cp") == 1:
        return batch
    return batch.at_positions(own_positions(batch.shape[1], mesh["cp"], batch.input_ids.device))


def use_context_parallel(
    model: nn.Module, mesh: DeviceMesh, method: ContextAttention, heads: tuple[int, int], anatomy: Anatomy
) -> str:
    """Let a Hugging Face model attend over the whole row while its inputs are parts of rows; return what was chosen.

    Args:
        heads: Query heads and kv heads that one rank has, after tensor parallelism.

    Raises ConfigError for a model whose attention needs a mask of its own.
    """
    config: Any = model.config
    implementation = config._attn_implementation
    if implementation not in (CAUSAL_SDPA, "sdpa"):
        raise ConfigError(
            f"parallelism.cp={mesh.size()}: {type(model).__name__} attends by {implementation}, and cp needs sdpa; set "
            "model.attention=sdpa or parallelism.cp=1"
        )
    reason = anatomy.needs_whole_rows or ("" if implementation == CAUSAL_SDPA else "makes its own attention masks")
    if reason:
        raise ConfigError(
            f"parallelism.cp={mesh.size()}: {type(model).__name__} {reason}, so it cannot compute parts of rows; set "
            "parallelism.cp=1"
        )
    chosen, why = choose_attention(method, mesh.size(), heads)
    if chosen == ContextAttention.ulysses:
        attend: Attend = UlyssesAttention(mesh)
    else:
        # Its recomputation inside a compiled layer that tp shards fails in torch ("expected all
        # tensors_saved_with_vc_check to be Tensors"): the mesh of the DTensors is saved as a tensor.
        attend = torch.compiler.disable(GatheredAttention(mesh).__call__)
    name = f"{CAUSAL_SDPA}_{chosen}_{mesh.get_group().group_name}"
    _register(name, attend)
    model.set_attn_implementation(name)  # type: ignore[operator]
    return f"cp attention: {chosen}, {why}"


def choose_attention(method: ContextAttention, cp: int, heads: tuple[int, int]) -> tuple[ContextAttention, str]:
    """Return how cp ranks attend, ulysses or all_gather, and why; `heads` are a rank's query and kv heads."""
    queries, keys = heads
    divides = ulysses_divides(queries, keys, cp)
    if method != ContextAttention.auto:
        return method, "as parallelism.cp_attention says"
    if divides:
        return ContextAttention.ulysses, f"cp {cp} shares {queries} heads and {keys} kv heads evenly"
    return ContextAttention.all_gather, f"cp {cp} cannot share {queries} heads and {keys} kv heads evenly"


@contextmanager
def whole_rows_attention(model: nn.Module) -> Iterator[None]:
    """Within the context the model takes whole rows, the same on every cp rank: for generation."""
    config: Any = model.config
    sharded = config._attn_implementation
    if not sharded.startswith(f"{CAUSAL_SDPA}_"):
        yield
        return
    model.set_attn_implementation(CAUSAL_SDPA)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(sharded)  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class _Attention:
    """What both ways of attending know."""

    mesh: DeviceMesh

    @property
    def local(self) -> Attend:
        """Attention within a process: this project's, without a mask."""
        from transformers import AttentionInterface

        return AttentionInterface()[CAUSAL_SDPA]

    def refuse(self, module: nn.Module, mask: torch.Tensor | None) -> None:
        """Raise ConfigError for a mask: transformers makes none for this attention, so the model made it."""
        if mask is not None:
            raise ConfigError(
                f"parallelism.cp={self.mesh.size()}: {type(module).__name__} makes a mask of its own, of parts of "
                "rows; set parallelism.cp=1"
            )


class _Heads:
    """What sdpa reads of an attention module, for one rank's share of its heads.

    A plain class, because the compiler cannot trace a `SimpleNamespace`.
    """

    is_causal = True

    def __init__(self, num_key_value_groups: int, training: bool) -> None:
        self.num_key_value_groups = num_key_value_groups
        self.training = training


class UlyssesAttention(_Attention):
    """All-to-all: from a part of every row with all heads to whole rows with some heads, and back."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend over whole rows. query: (batch, heads, seq / cp, head_dim) -> (batch, seq / cp, heads, head_dim)."""
        self.refuse(module, attention_mask)
        cp = self.mesh.size()
        if key.shape[1] % cp:  # fewer kv heads than ranks: each rank needs the one that its query heads share
            key, value = (tensor.repeat_interleave(cp // tensor.shape[1], dim=1) for tensor in (key, value))
        query, key, value = (self._to_heads(tensor) for tensor in (query, key, value))
        heads = _Heads(query.shape[1] // key.shape[1], module.training)
        output, _ = self.local(heads, query, key, value, None, **options)  # (batch, seq, heads / cp, head_dim)
        return self._to_tokens(output), None

    def _to_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, heads, seq / cp, head_dim) -> (batch, heads / cp, seq, head_dim) in the order of the row."""
        cp = self.mesh.size()
        batch, heads, tokens, width = tensor.shape
        by_rank = tensor.view(batch, cp, heads // cp, tokens, width).movedim(1, 0)  # (cp, batch, heads / cp, ...)
        received = all_to_all_single_autograd(by_rank.contiguous(), None, None, self.mesh.get_group())
        parts = received.view(cp, batch, heads // cp, 2, tokens // 2, width)
        return in_row_order(parts, dim=3).reshape(batch, heads // cp, cp * tokens, width)

    def _to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """(batch, seq, heads / cp, head_dim) -> (batch, seq / cp, heads, head_dim)."""
        cp = self.mesh.size()
        batch, seq, heads, width = output.shape
        chunks = output.view(batch, 2 * cp, seq // (2 * cp), heads, width)
        early, late = chunks[:, :cp], chunks[:, cp:].flip(1)  # (batch, cp, chunk, heads / cp, head_dim)
        by_rank = torch.stack([early, late], dim=2).movedim(1, 0).contiguous()  # (cp, batch, 2, chunk, ...)
        received = all_to_all_single_autograd(by_rank, None, None, self.mesh.get_group())
        by_head = received.view(cp, batch, seq // cp, heads, width).movedim(0, 2)  # (batch, seq / cp, cp, ...)
        return by_head.reshape(batch, seq // cp, cp * heads, width)


class GatheredAttention(_Attention):
    """Each rank gathers keys and values, at most cp-th of the heads at a time, and attends with its own queries.

    Only a rank's own keys and values are kept for the backward, which gathers and attends again: memory for whole rows
    is that of the heads at hand.
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
        """Attend over whole rows. query: (batch, heads, seq / cp, head_dim) -> (batch, seq / cp, heads, head_dim)."""
        self.refuse(module, attention_mask)
        kv_heads = key.shape[1]
        pieces = next(count for count in range(min(self.mesh.size(), kv_heads), 0, -1) if kv_heads % count == 0)
        documents = options.pop(DOCUMENTS, None)
        first = None if documents is None else documents.starts(query.shape[2] * self.mesh.size())  # (batch, seq)
        attend = partial(self._attend, module, (sliding_window, first), options)
        keeps_random_state = options.get("dropout", 0.0) > 0
        outputs = [
            checkpoint(attend, *piece, use_reentrant=False, preserve_rng_state=keeps_random_state)
            for piece in zip(*(tensor.chunk(pieces, dim=1) for tensor in (query, key, value)), strict=True)
        ]
        return torch.cat(outputs, dim=2), None

    def _attend(
        self,
        module: nn.Module,
        sees: tuple[int | None, torch.Tensor | None],
        options: dict[str, Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Some heads: (batch, heads, seq / cp, head_dim) -> (batch, seq / cp, heads, head_dim).

        Args:
            sees: The window, and where the document of each token of the whole row begins, (batch, seq).
        """
        window, first = sees
        key, value = self._gather(key, value)  # (batch, kv heads, seq, head_dim) each
        outputs = []
        for queries, chunk in zip(query.chunk(2, dim=2), own_chunks(self.mesh), strict=True):
            start, end = (queries.shape[2] * number for number in (chunk, chunk + 1))  # nothing from `end` on is seen
            place = torch.arange(end, device=query.device)
            own, other = place[start:, None], place[None, :]
            seen = other <= own  # (seq / 2 cp, end), a byte each: their distances would take eight
            if window is not None:
                seen &= other > own - window
            seen = seen[None] if first is None else seen & (other >= first[:, start:end, None])  # (batch or 1, ...)
            output, _ = self.local(module, queries, key[:, :, :end], value[:, :, :end], seen[:, None], **options)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def _gather(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, heads, seq / cp, head_dim) each -> (batch, heads, seq, head_dim) each, in the order of the row.

        One collective for both. Values may be narrower than keys (DeepSeek's latent attention).
        """
        cp, widths = self.mesh.size(), [key.shape[-1], value.shape[-1]]
        both = torch.cat([key, value], dim=-1)  # (batch, heads, seq / cp, both head_dims)
        batch, heads, tokens, width = both.shape
        gathered = _Gather.apply(both.contiguous(), self.mesh.get_group())
        parts = gathered.view(cp, batch, heads, 2, tokens // 2, width).split(widths, dim=-1)
        whole_key, whole_value = (
            in_row_order(part, dim=3).reshape(batch, heads, cp * tokens, part.shape[-1]) for part in parts
        )
        return whole_key, whole_value


class _Gather(torch.autograd.Function):
    """The tensors of all ranks along dim 0; each rank has the gradient of its own queries, so they are summed back."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = part.new_empty(dist.get_world_size(group) * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(gathered, part, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        own = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


def in_row_order(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Put the chunks of all ranks in the order of the row.

    Args:
        parts: (cp, ..., 2, chunk, ...), `dim` being that of the two chunks of a rank.

    Returns (..., 2 x cp, chunk, ...).
    """
    early, late = parts.select(dim, 0), parts.select(dim, 1).flip(0)  # (cp, ..., chunk, ...)
    return torch.cat([early, late]).movedim(0, dim - 1)


def _register(name: str, attend: Attend) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(name, attend)
