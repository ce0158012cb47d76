"""Attention within the documents of packed rows: an exact mask, or torch's variable-length kernel.

A row holds documents one after another; padding is the last document. Attention is causal, so a token attends to the
positions from the start of its document up to its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from components.torch_kernels import has_grouped_queries


class Documents:
    """Document bounds of a micro-batch, shared by the attention of all layers in one forward.

    Sharing one object builds each mask once rather than once per layer, and shows after the forward whether any
    attention used the bounds.
    """

    def __init__(self, bounds: torch.Tensor, longest: int | None = None) -> None:
        """Store the bounds of a micro-batch.

        Args:
            bounds: (batch, documents + 1) int32: 0, then the end of each document, padded with the row's length.
            longest: Upper bound on a document's tokens; None: the length of a row.
        """
        self.bounds = bounds
        self.longest = longest
        self.used = False
        """Whether any attention has read the bounds."""
        self.mixed_by: set[str] = set()
        """Functions of linear layers that have kept the documents apart."""
        self._spans: list[list[tuple[int, int]]] = []
        self._filled_ends: torch.Tensor | None = None
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._chunks: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def spans(self) -> list[list[tuple[int, int]]]:
        """Return the start and end of each document that is not empty, by row. The first call waits for the device."""
        if not self._spans:
            for bounds in self.bounds.tolist():
                self._spans.append([span for span in itertools.pairwise(bounds) if span[0] < span[1]])
        return self._spans

    def window(self, first: int, end: int) -> Documents:
        """Return the documents within the positions from `first` to `end` of each row.

        Positions before the row, from a negative `first` on, are a document of their own.
        """
        bounds = self.bounds.clamp(first, end) - first
        return Documents(torch.cat([torch.zeros_like(bounds[:, :1]), bounds], dim=1), self.longest)

    def indices(self, seq: int) -> torch.Tensor:
        """Return the number of each token's document within its row, (batch, seq) int32."""
        position = torch.arange(seq, dtype=self.bounds.dtype, device=self.bounds.device)
        return torch.searchsorted(self.bounds, position.repeat(len(self.bounds), 1), right=True, out_int32=True) - 1

    def filled_ends(self, seq: int) -> torch.Tensor:
        """Return `ends` without empty documents, (documents of all rows + 1,) int32. Waits for the device once."""
        if self._filled_ends is None:
            ends = [row * seq + end for row, spans in enumerate(self.spans()) for _, end in spans]
            self._filled_ends = torch.tensor([0, *ends], dtype=torch.int32, device=self.bounds.device)
        return self._filled_ends

    def starts(self, seq: int) -> torch.Tensor:
        """Return the start of each token's document, (batch, seq), for rows that are not split."""
        self.used = True
        position = torch.arange(seq, dtype=self.bounds.dtype, device=self.bounds.device)
        document = torch.searchsorted(self.bounds, position.repeat(len(self.bounds), 1), right=True) - 1
        return self.bounds.gather(1, document)

    def mask(self, seq: int, window: int | None) -> torch.Tensor:
        """Return the boolean mask (batch, 1, seq, seq), True where a query attends, within `window` tokens."""
        self.used = True
        if torch.compiler.is_compiling():  # a compiled layer fuses the mask into its own graph
            return self._mask(seq, window)
        if (seq, window) not in self._masks:
            self._masks[seq, window] = self._mask(seq, window)
        return self._masks[seq, window]

    def ends(self, seq: int) -> torch.Tensor:
        """Return cumulative document ends over the concatenated rows: (batch x documents + 1,) int32.

        The size is fixed: rows with fewer documents end with empty ones.
        """
        self.used = True
        offsets = torch.arange(len(self.bounds), dtype=torch.int32, device=self.bounds.device)[:, None] * seq
        first = torch.zeros(1, dtype=torch.int32, device=self.bounds.device)
        return torch.cat([first, (self.bounds[:, 1:] + offsets).flatten()])

    def chunk_ends(self, start: int, end: int, first_key: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cumulative document ends of the queries and of the keys of a chunk, (batch x documents + 1,) int32.

        Queries are the positions from `start` to `end` of each row, keys those from `first_key` to `end`. The last
        query of a document and its last key are the same token, as the kernel's causal mask requires. Documents without
        queries keep their keys: the kernel's backward writes gradients, zeros here, only for keys within documents.
        """
        self.used = True
        key = (start, end, first_key)
        if key not in self._chunks:
            self._chunks[key] = self._ends_between(start, end), self._ends_between(first_key, end)
        return self._chunks[key]

    def _ends_between(self, first: int, end: int) -> torch.Tensor:
        rows = torch.arange(len(self.bounds), dtype=torch.int32, device=self.bounds.device)[:, None]
        ends = self.bounds.clamp(first, end) + (rows * (end - first) - first)  # (batch, documents + 1)
        return torch.cat([ends[0, :1], ends[:, 1:].flatten()])

    def _mask(self, seq: int, window: int | None) -> torch.Tensor:
        position = torch.arange(seq, dtype=self.bounds.dtype, device=self.bounds.device)
        first = self.starts(seq)  # (batch, seq)
        if window is not None:
            first = torch.maximum(first, position - (window - 1))
        return ((position <= position[:, None]) & (position >= first[:, :, None]))[:, None]


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Compute causal attention within documents, without a mask; FLOPs depend on document lengths, not on rows.

    The kernel launches thread blocks for the upper bound `longest` in every document. Blocks past a document's end exit
    at once, but they can outnumber the others, so a tight bound matters.

    Args:
        query: (batch, heads, seq, head_dim), rows not split; key and value may have fewer heads of the same width.
        window: Tokens that a query attends to, including its own; None: its whole document.

    Returns (batch, seq, heads, head_dim).
    """
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, seq, width = query.shape
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if has_grouped_queries():
        options["enable_gqa"] = key.shape[1] != heads
    else:  # torch 2.11
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    query, key, value = (
        each.transpose(1, 2).reshape(batch * seq, each.shape[1], width) for each in (query, key, value)
    )
    ends = documents.ends(seq)
    longest = seq if documents.longest is None else min(documents.longest, seq)
    output: Any = varlen_attn(query, key, value, ends, ends, longest, longest, **options)
    return output.view(batch, seq, heads, width)
