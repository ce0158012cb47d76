"""Rows divided over the ranks of the cp axis: the tokens of a rank, exchanges, and layers that mix tokens.

A row is split into 2 x cp chunks, and rank r holds chunks r and 2 x cp - 1 - r, so that causal attention costs the same
FLOPs on every rank (the zigzag order of Brandon et al. 2023).

Linear attention, Mamba-2 and short convolutions compute on these chunks by `RowShard`. A convolution needs the last
tokens before each chunk, which ranks exchange. A recurrence is computed in one of two ways. By heads: ranks exchange
tokens for heads, and each computes its heads over the whole row. By states: each rank computes its own chunks. A chunk
maps the state S that enters it to M S + B, so ranks gather the M and B of all chunks and combine those before their own
(Martin and Cundy 2018; per chunk, so that the order of chunks is free).

Every rank enters every collective of the forward and of the backward: a state that is not needed is multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from components.batch import Batch
from components.config.schema.model import CONVOLUTION
from components.config.schema.parallelism import ContextLinear
from components.distributed.mesh import Mesh
from components.protocol.errors import ConfigError

_Tensors = dict[str, torch.Tensor]
"""Arguments with a value per token, by name: (batch, seq / cp, heads, ...) for a recurrence."""
_PER_HEAD = ("A", "D", "dt_bias")
"""Arguments of Mamba-2 with a value per head."""


def shard_rows(batch: Batch, mesh: Mesh | None) -> Batch:
    """Return this rank's cp shard of a micro-batch, with position ids in the full sequence.

    Tensors with a value per token are sharded: (batch, seq) -> (batch, seq / cp). Document bounds and values per row
    are kept unsharded. Returns the batch itself if there is no cp axis.
    """
    if mesh is None or mesh.size("cp") == 1:
        return batch
    return batch.at_positions(local_positions(batch.shape[1], mesh["cp"], batch.input_ids.device))


def local_positions(seq: int, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """Return the positions of this rank's tokens in a sequence of `seq` tokens: (seq / cp,), the early chunk first."""
    size = seq // (2 * mesh.size())
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in local_chunks(mesh)])


def local_chunks(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the indices of this rank's two chunks among the 2 x cp of a sequence."""
    rank = mesh.get_local_rank()
    return rank, 2 * mesh.size() - 1 - rank


def to_heads(mesh: DeviceMesh, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Exchange (batch, seq / cp, heads, width) for (batch, seq, heads / cp, width), in sequence order.

    One all-to-all for all tensors, whose heads and widths may differ; cp divides the heads of each. The results share
    one buffer, in which the heads of a token are adjacent: the layout that projections write and kernels read.
    """
    cp = mesh.size()
    batch, tokens = tensors[0].shape[:2]
    shapes = [(tensor.shape[2] // cp, tensor.shape[3]) for tensor in tensors]  # heads of a rank, width
    by_rank = [tensor.reshape(batch, tokens, cp, -1).movedim(2, 0) for tensor in tensors]
    received = all_to_all_single_autograd(torch.cat(by_rank, dim=-1), None, None, mesh.get_group())
    width = sum(heads * each for heads, each in shapes)
    shards = received.view(cp, batch, 2, tokens // 2, width)
    full = in_sequence_order(shards, dim=2).reshape(batch, cp * tokens, width)
    parts = full.split([heads * each for heads, each in shapes], dim=-1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def to_tokens(mesh: DeviceMesh, output: torch.Tensor) -> torch.Tensor:
    """Exchange (batch, seq, heads / cp, width) for (batch, seq / cp, heads, width)."""
    cp = mesh.size()
    batch, seq, heads, width = output.shape
    by_rank = in_rank_order(output, cp, dim=1)  # (cp, batch, seq / cp, heads / cp, width)
    received = all_to_all_single_autograd(by_rank, None, None, mesh.get_group())
    by_head = received.view(cp, batch, seq // cp, heads, width).movedim(0, 2)  # (batch, seq / cp, cp, ...)
    return by_head.reshape(batch, seq // cp, cp * heads, width)


class GatherShards(torch.autograd.Function):
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


def in_rank_order(full: torch.Tensor, cp: int, dim: int) -> torch.Tensor:
    """Return the zigzag shards of all ranks, contiguous: (..., seq, ...) -> (cp, ..., seq / cp, ...).

    Args:
        dim: Sequence dim of `full`.
    """
    chunks = full.unflatten(dim, (2 * cp, -1))
    early, late = chunks.narrow(dim, 0, cp), chunks.narrow(dim, cp, cp).flip(dim)
    return torch.stack([early, late], dim=dim + 1).movedim(dim, 0).contiguous().flatten(dim + 1, dim + 2)


class RowShard:
    """The value of keyword `ROW_SHARD`: computes functions that mix tokens on this rank's two chunks of each row."""

    def __init__(self, mesh: DeviceMesh, method: ContextLinear) -> None:
        """`method`: how recurrences are computed; auto: by heads where cp divides them, otherwise by states."""
        self.mesh = mesh
        self.method = method
        self.mixed_by: set[str] = set()
        """Functions that have computed on chunks of rows."""

    def mix(
        self, name: str, function: Callable[..., Any], run: Callable[[_Tensors, dict[str, Any], Any], Any],
        tensors: _Tensors, others: dict[str, Any], documents: Any,
    ) -> Any:  # fmt: skip
        """Call a function on this rank's tokens, with the results of the whole rows.

        Args:
            name: Name of the function in transformers' modeling files.
            run: Calls it on rows that are not divided, given `tensors`, `others` and the documents.
            tensors: Arguments with a value per token.
            others: All other arguments.
            documents: `components.models.documents.Documents` of packed rows; None: a row is one document.
        """
        self.mixed_by.add(name)
        if name == CONVOLUTION:
            return self._convolve(run, tensors, others, documents)
        heads = max(each.shape[2] for each in tensors.values())
        divides = heads % self.mesh.size() == 0
        if self.method is ContextLinear.heads and not divides:
            raise ConfigError(
                f"parallelism.cp_linear=heads: cp {self.mesh.size()} does not divide the {heads} heads of a rank's "
                "linear layers; set parallelism.cp_linear=states, or another parallelism.cp"
            )
        if divides and self.method is not ContextLinear.states:
            return self._by_heads(heads, run, tensors, others, documents)
        return _PassedStates(self.mesh, function, tensors, others, documents).output()

    def _convolve(self, run: Any, tensors: _Tensors, others: dict[str, Any], documents: Any) -> torch.Tensor:
        """Convolve each chunk behind the last tokens before it: (batch, channels, seq / cp), the same shape."""
        ((name, hidden),) = tensors.items()
        before = others["weight"].shape[-1] - 1
        chunks = hidden.unflatten(2, (2, -1)).movedim(2, 0)  # (2, batch, channels, chunk)
        size = chunks.shape[-1]
        ends = _gathered(chunks[..., -before:], self.mesh)  # (2 x cp, batch, channels, up to `before`)
        outputs = []
        for chunk, own in zip(local_chunks(self.mesh), chunks, strict=True):
            zeros = own.new_zeros(*own.shape[:2], before)
            # More than one chunk, where a chunk is shorter than the convolution.
            halo = torch.cat([zeros, *ends[max(0, chunk - before) : chunk]], dim=2)[..., -before:]
            window = None if documents is None else documents.window(chunk * size - before, (chunk + 1) * size)
            # Channels last, as kernels that separate documents require.
            padded = torch.cat([halo.transpose(1, 2), own.transpose(1, 2)], dim=1).transpose(1, 2)
            outputs.append(run({name: padded}, others, window)[..., before:])
        return torch.cat(outputs, dim=2)

    def _by_heads(self, heads: int, run: Any, tensors: _Tensors, others: dict[str, Any], documents: Any) -> Any:
        cp, rank = self.mesh.size(), self.mesh.get_local_rank()
        full: _Tensors = {}
        for dtype in dict.fromkeys(each.dtype for each in tensors.values()):  # decays: float32, beside keys in bfloat16
            names, with_width = [name for name, each in tensors.items() if each.dtype == dtype], []
            for tensor in (tensors[name] for name in names):
                groups = tensor.shape[2]
                # Key heads and groups that cp does not divide are repeated for the heads that share them.
                copies = 1 if groups % cp == 0 else (cp if cp % groups == 0 else heads) // groups
                per_head = tensor.repeat_interleave(copies, dim=2) if copies > 1 else tensor
                with_width.append(per_head if per_head.dim() == 4 else per_head[..., None])
            for name, each in zip(names, to_heads(self.mesh, *with_width), strict=True):
                full[name] = each if tensors[name].dim() == 4 else each[..., 0]
        own = {
            name: each.chunk(cp)[rank] if name in _PER_HEAD and each is not None else each
            for name, each in others.items()
        }
        output = run({name: full[name] for name in tensors}, own, documents)
        if isinstance(output, tuple):
            return to_tokens(self.mesh, output[0]), None
        return to_tokens(self.mesh, output)


class _PassedStates:
    """A recurrence over this rank's chunks, with the states of the chunks before them."""

    def __init__(
        self, mesh: DeviceMesh, function: Callable[..., Any], tensors: _Tensors, others: dict[str, Any], documents: Any
    ) -> None:
        self.mesh, self.function, self.others = mesh, function, others
        self.is_mamba = "A" in others
        first = next(iter(tensors.values()))
        self.size = first.shape[1] // 2
        """Tokens of a chunk."""
        self.chunks: list[tuple[int, _Tensors]] = list(zip(local_chunks(mesh), ({}, {}), strict=True))
        for name, each in tensors.items():
            for (_, own), part in zip(self.chunks, each.chunk(2, dim=1), strict=True):
                own[name] = part
        whole = [(0, 2 * mesh.size() * self.size)]
        rows = [(slice(None), whole)] if documents is None else []
        self.rows = rows or [(slice(row, row + 1), spans) for row, spans in enumerate(documents.spans())]
        """Rows that are computed together, and the documents in them."""

    def output(self) -> Any:
        """Return the output for this rank's tokens, (batch, seq / cp, heads, width), as the function does."""
        entering = self._entering()
        outputs = []
        for rows, spans in self.rows:
            parts = []
            for chunk, tensors in self.chunks:
                for start, end, continues in self._pieces(spans, chunk):
                    state = entering[chunk][rows] * float(continues)
                    parts.append(self._run(_cut(tensors, rows, start, end), state)[0])
            outputs.append(torch.cat(parts, dim=1))
        output = torch.cat(outputs)
        return output if self.is_mamba else (output, None)

    def _entering(self) -> list[torch.Tensor]:
        """Return the state that enters each chunk of the rows, (batch, heads, ...), given by the chunks before it."""
        maps, states = [], []
        for chunk, tensors in self.chunks:
            by_rows = []
            for rows, spans in self.rows:
                pieces = self._pieces(spans, chunk)
                start, end, continues = pieces[-1]  # the last document of the chunk hands its state on
                own = _cut(tensors, rows, start, end)
                passes = float(len(pieces) == 1 and continues)
                by_rows.append((self._map(own) * passes, self._run(own, None)[1]))
            maps.append(torch.cat([each for each, _ in by_rows]))
            states.append(torch.cat([each for _, each in by_rows]))
        own_maps, own_states = torch.stack(maps), torch.stack(states)  # (2, batch, heads, ...)
        widths = [own_maps[0, 0].numel(), own_states[0, 0].numel()]
        both = torch.cat([own_maps.flatten(2), own_states.flatten(2)], dim=2)  # one collective for both
        all_maps, all_states = _gathered(both, self.mesh).split(widths, dim=2)  # (2 x cp, batch, width)
        entering = [all_states[0].view_as(own_states[0]) * 0.0]
        for each_map, each_state in zip(all_maps[:-1], all_states[:-1], strict=True):
            mapped = each_map.view_as(own_maps[0])
            carried = mapped * entering[-1] if self.is_mamba else mapped @ entering[-1]
            entering.append(carried + each_state.view_as(own_states[0]))
        return entering

    def _pieces(self, spans: list[tuple[int, int]], chunk: int) -> list[tuple[int, int, bool]]:
        """Return the parts of documents in a chunk: first and end position in it, and whether the chunk before has the
        beginning of the document."""
        low, high = chunk * self.size, (chunk + 1) * self.size
        return [(max(a, low) - low, min(b, high) - low, a < low) for a, b in spans if a < high and b > low]

    def _run(self, tensors: _Tensors, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the last state, from an initial state or zero."""
        if self.is_mamba:
            return self.function(**tensors, **{**self.others, "initial_states": state, "return_final_states": True})
        return self.function(**tensors, **{**self.others, "initial_state": state, "output_final_state": True})

    def _map(self, tensors: _Tensors) -> torch.Tensor:
        """Return M, by which the tokens map a state: (rows, heads, 1, 1) of Mamba-2, else (rows, heads, d_k, d_k)."""
        if self.is_mamba:  # a decay for each head
            steps = tensors["dt"] if self.others["dt_bias"] is None else tensors["dt"] + self.others["dt_bias"]
            steps = F.softplus(steps) if self.others["dt_softplus"] else steps
            steps = steps.clamp(*self.others["dt_limit"]).float()
            return (steps * self.others["A"]).sum(1).exp()[..., None, None]
        # The delta rule is linear in state and values: without values, the identity becomes M.
        value, width = tensors["value"], tensors["key"].shape[-1]
        nothing = value.new_zeros(*value.shape[:3], width)
        identity = torch.eye(width, device=value.device).expand(len(value), value.shape[2], width, width)
        return self._run({**tensors, "value": nothing}, identity)[1]


def _cut(tensors: _Tensors, rows: slice, start: int, end: int) -> _Tensors:
    return {name: each[rows, start:end] for name, each in tensors.items()}


def _gathered(chunks: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Gather the values of all chunks, in sequence order: (2, ...) -> (2 x cp, ...)."""
    shards = GatherShards.apply(chunks.contiguous(), mesh.get_group())
    return in_sequence_order(shards.unflatten(0, (mesh.size(), 2)), dim=1)
