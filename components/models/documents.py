"""Documents of packed rows kept apart: in attention, and in layers that mix tokens by a convolution and a recurrence.

A row holds documents one after another; padding is the last document. Attention is causal, so a token attends to the
positions from the start of its document up to its own, by an exact mask or torch's variable-length kernel.

transformers computes linear attention, Mamba-2 and short convolutions in functions of a family's modeling file, and
passes them the keyword arguments of the decoder layer. By themselves they carry the last tokens and the state of a
document into the next one of the row. Here each function is replaced by one that keeps documents apart when the
keyword `DOCUMENTS` gives their bounds, and that hands the work over to the value of the keyword `ROW_SHARD` where cp
divides rows. Without either keyword it is transformers' own.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from components.config.schema.model import CONVOLUTION, DOCUMENTS, MIXERS, ROW_SHARD
from components.models.anatomy import transformers_class
from components.torch_kernels import has_grouped_queries


@dataclass(frozen=True, slots=True)
class _Mixing:
    """A function that mixes tokens: which of its arguments have a value per token."""

    tensors: tuple[str, ...]
    """Parameters with a sequence dim. The function returns such a tensor, or a tuple of it and the last state."""
    dim: int
    """Sequence dim of these tensors and of the output."""


_DELTA_RULE = _Mixing(("query", "key", "value", "g", "beta"), 1)
_FUNCTIONS: Mapping[str, _Mixing] = {
    CONVOLUTION: _Mixing(("hidden_states",), 2),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _Mixing(("hidden_states", "dt", "B", "C"), 1),
}
"""Name of a function in transformers' modeling files -> its arguments."""


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
        self._host_bounds: list[list[int]] = []
        self._spans: list[list[tuple[int, int]]] = []
        self._whole: tuple[Documents, int, int] | None = None
        """Of a window: the documents of whole rows, and where it begins and ends."""
        self._filled_ends: torch.Tensor | None = None
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._chunks: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def spans(self) -> list[list[tuple[int, int]]]:
        """Return the start and end of each document that is not empty, by row. The first call waits for the device."""
        if not self._spans:
            for bounds in self._bounds_on_host():
                self._spans.append([span for span in itertools.pairwise(bounds) if span[0] < span[1]])
        return self._spans

    def _bounds_on_host(self) -> list[list[int]]:
        if not self._host_bounds and self._whole is None:
            self._host_bounds = self.bounds.tolist()
        elif not self._host_bounds and self._whole is not None:
            whole, first, end = self._whole
            for bounds in whole._bounds_on_host():
                self._host_bounds.append([0, *(min(max(bound, first), end) - first for bound in bounds)])
        return self._host_bounds

    def window(self, first: int, end: int) -> Documents:
        """Return the documents within the positions from `first` to `end` of each row.

        Positions before the row, from a negative `first` on, are a document of their own.
        """
        bounds = self.bounds.clamp(first, end) - first
        window = Documents(torch.cat([torch.zeros_like(bounds[:, :1]), bounds], dim=1), self.longest)
        window._whole = self, first, end
        return window

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


def separate_documents(model: PreTrainedModel) -> None:
    """Replace the functions by which the model's family mixes tokens, once per process; none for other families."""
    functions = MIXERS.get(model.config.get_text_config().model_type, ())
    modeling: Any = sys.modules[transformers_class(model).__module__]
    namespace = modeling.__dict__
    # A release that renames one can still train on rows that are neither packed nor divided.
    found = {name: namespace[name] for name in functions if name in namespace}
    found = {name: function for name, function in found.items() if not isinstance(function, partial)}
    # Kernels separate documents if there are all: with one only, it would in one of the two functions.
    has_kernels = all(_has_kernel(each) for each in found.values())
    for name, function in found.items():
        if _FUNCTIONS[name] is _DELTA_RULE and not _has_kernel(function):
            function = torch.compiler.disable(function)  # its loop over chunks would be compiled for each length
        namespace[name] = partial(_mix, function, name, has_kernels)
    if "mamba2_chunk_scan" in functions:
        modeling.mamba2_split_conv1d_scan_combined = _skip_fused_kernel


def _skip_fused_kernel(*args: Any, **kwargs: Any) -> None:
    """Tell transformers' Mamba-2 layer that there is no kernel for the whole layer.

    mamba-ssm's reads the weights of the convolution, the norm and the out-projection, past adapters and the shards of
    tensor parallelism, so the layer runs its parts instead.
    """


def _mix(function: Callable[..., Any], name: str, has_kernels: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a modeling file, within documents and over shards where a keyword says so."""
    documents, shard = kwargs.pop(DOCUMENTS, None), kwargs.pop(ROW_SHARD, None)
    # causal-conv1d takes rows with channels last at multiples of 8 elements; a part of a projection is at others.
    if name == CONVOLUTION and args and _is_on_gpu(args[0]) and args[0].stride(1) == 1 and args[0].stride(2) % 8:
        args = (args[0].transpose(1, 2).contiguous().transpose(1, 2), *args[1:])
    if documents is None and shard is None:
        return function(*args, **kwargs)
    return _mix_apart(function, name, has_kernels, documents, shard, args, kwargs)


@torch.compiler.disable  # document bounds are Python numbers here, for which the compiler would compile each step anew
def _mix_apart(
    function: Callable[..., Any], name: str, has_kernels: bool, documents: Documents | None, shard: Any,
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    mixing = _FUNCTIONS[name]
    # As transformers passes them: kernels have other names for what is passed by position.
    positional = list(_signature(function).parameters)[: len(args)]
    others = dict(zip(positional, args, strict=True)) | kwargs
    function = partial(_call, function, positional)
    tensors = {each: others.pop(each) for each in mixing.tensors}
    if documents is not None:
        documents.mixed_by.add(name)
    run = partial(_within_documents, function, mixing, has_kernels)
    if shard is None:
        return run(tensors, others, documents)
    return shard.mix(name, function, run, tensors, others, documents)


def _call(function: Callable[..., Any], positional: list[str], /, **arguments: Any) -> Any:
    values = [arguments.pop(name) for name in positional]
    return function(*values, **arguments)


def _within_documents(
    function: Callable[..., Any], mixing: _Mixing, has_kernels: bool,
    tensors: dict[str, torch.Tensor], others: dict[str, Any], documents: Documents | None,
) -> Any:  # fmt: skip
    """Run a function on rows that are not divided, each document by itself; None: a row is one document.

    Args:
        tensors: Arguments with a value per token; all others are in `others`.
    """
    if documents is None:
        return function(**tensors, **others)
    if has_kernels and _is_on_gpu(tensors[mixing.tensors[0]]):
        return _by_kernel(function, mixing, tensors, others, documents)
    rows, has_state = [], False
    for row, spans in enumerate(documents.spans()):
        parts = []
        for start, end in spans:
            own = {name: each[row : row + 1].narrow(mixing.dim, start, end - start) for name, each in tensors.items()}
            output = function(**own, **others)
            has_state = isinstance(output, tuple)
            parts.append(output[0] if has_state else output)
        rows.append(torch.cat(parts, dim=mixing.dim))
    return (torch.cat(rows), None) if has_state else torch.cat(rows)


def _by_kernel(
    function: Callable[..., Any], mixing: _Mixing, tensors: dict[str, torch.Tensor], others: dict[str, Any],
    documents: Documents,
) -> Any:  # fmt: skip
    """Run a kernel that takes the documents of all rows in one call."""
    first = tensors[mixing.tensors[0]]
    batch, seq = first.shape[0], first.shape[mixing.dim]
    if mixing is not _DELTA_RULE:
        return function(**tensors, **{**others, "seq_idx": documents.indices(seq)})
    # fla takes one row, in which no document is empty.
    flat = {name: each.flatten(0, 1)[None] for name, each in tensors.items()}  # (1, batch x seq, heads, ...)
    output, _ = function(**flat, **{**others, "cu_seqlens": documents.filled_ends(seq)})
    return output.unflatten(1, (batch, seq))[0], None


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _has_kernel(function: Callable[..., Any]) -> bool:
    """Return whether transformers found a kernel for a function.

    Its package may be installed and fail to import, such as one that was built for another torch: transformers computes
    in PyTorch then, and takes no documents.
    """
    return bool(inspect.getclosurevars(function).nonlocals.get("is_new_implementation"))
