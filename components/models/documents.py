"""Attention within the documents of packed rows: an exact mask, or torch's kernel for sequences of unequal lengths.

Documents lie one after another in a row, padding being the last, and attention is causal. So where a token's document
begins says what it may see: nothing before that place, nothing after its own.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch


class Documents:
    """Where the documents of a micro-batch are, for the attention of every layer of one forward.

    One object goes through all layers, so that a mask is made once and not by each of them, and so that after the
    forward it can be told whether any attention has asked.
    """

    def __init__(self, bounds: torch.Tensor, longest: int | None = None) -> None:
        """`bounds`: (batch, documents + 1) int32: 0, each document's end, and the row's length as often as needed.

        longest: No document has more tokens; None: one may fill its row.
        """
        self.bounds = bounds
        self.longest = longest
        self.reached = False
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def starts(self, seq: int) -> torch.Tensor:
        """Return where the document of each token of whole rows begins: (batch, seq)."""
        self.reached = True
        place = torch.arange(seq, dtype=self.bounds.dtype, device=self.bounds.device)
        number = torch.searchsorted(self.bounds, place.repeat(len(self.bounds), 1), right=True) - 1
        return self.bounds.gather(1, number)

    def mask(self, seq: int, window: int | None) -> torch.Tensor:
        """Return what each token of whole rows sees: (batch, 1, seq, seq), at most `window` tokens far."""
        self.reached = True
        if torch.compiler.is_compiling():  # a compiled layer makes its own, fused with what it does
            return self._mask(seq, window)
        if (seq, window) not in self._masks:
            self._masks[seq, window] = self._mask(seq, window)
        return self._masks[seq, window]

    def ends(self, seq: int) -> torch.Tensor:
        """Return the bounds of all documents in the rows laid end to end: (batch x documents + 1,) int32.

        Its size is fixed: documents that a row does not have are empty ones at its end.
        """
        self.reached = True
        rows = torch.arange(len(self.bounds), dtype=torch.int32, device=self.bounds.device)[:, None] * seq
        first = torch.zeros(1, dtype=torch.int32, device=self.bounds.device)
        return torch.cat([first, (self.bounds[:, 1:] + rows).flatten()])

    def _mask(self, seq: int, window: int | None) -> torch.Tensor:
        place = torch.arange(seq, dtype=self.bounds.dtype, device=self.bounds.device)
        first = self.starts(seq)  # (batch, seq)
        if window is not None:
            first = torch.maximum(first, place - (window - 1))
        return ((place <= place[:, None]) & (place >= first[:, :, None]))[:, None]


def has_kernel(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Whether torch's kernel for unequal lengths takes these: on accelerators, in half precision, all of one width."""
    if query.device.type not in ("cuda", "meta") or dropout:
        return False
    half, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    return half and value.shape[-1] == width and width <= 256 and width % 8 == 0 and _torch_has_windows()


def attend_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attend within documents, to the left, without a mask: the work is that of the documents, not of the rows.

    The kernel launches blocks for as many tokens as its longest document may have, in every document: those past a
    document's end only exit, but there can be more of them than of the others.

    Args:
        query: (batch, heads, seq, head_dim) of whole rows; key and value may have fewer heads, all of one width.
        window: How many tokens are seen, the token itself counted; None: all of the document.

    Returns (batch, seq, heads, head_dim).
    """
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, seq, width = query.shape
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if _torch_shares_keys():
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


def longest_document(bounds: torch.Tensor) -> int | None:
    """Bound the length of the longest document of a micro-batch; None where asking would make the host wait.

    Rounded up to a power of two, so that it takes few values: a compiled layer is compiled again for each.

    Args:
        bounds: (batch, documents + 1), on the host.
    """
    if bounds.device.type != "cpu":
        return None
    return 1 << (int(np.diff(bounds.numpy(), axis=1).max()) - 1).bit_length()


@torch.compiler.assume_constant_result
def _torch_has_windows() -> bool:
    """Whether this torch can attend to the left within documents: it says so by the names of arguments."""
    return {"window_size", "scale"} <= _options_of_kernel()


@torch.compiler.assume_constant_result
def _torch_shares_keys() -> bool:
    """Whether the kernel takes fewer key heads than query heads; torch 2.11's does not."""
    return "enable_gqa" in _options_of_kernel()


def _options_of_kernel() -> frozenset[str]:
    """Return the names of the kernel's arguments; none where this torch has no such kernel."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
