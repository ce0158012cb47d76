"""Layers that mix tokens by a causal convolution and a recurrence, on packed rows and on shards of rows.

transformers computes linear attention, Mamba-2 and short convolutions in functions of a family's modeling file, and
passes them the keyword arguments of the decoder layer. By themselves they carry the last tokens and the state of a
document into the next one of the row. Here each function is replaced by one that keeps documents apart when the
keyword `DOCUMENTS` gives their bounds, and that hands the work over to the value of the keyword `SHARD` when a row is
divided over ranks. Without either keyword it is transformers' own.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from components.config.families import CONVOLUTION, MIXERS
from components.config.schema.model import DOCUMENTS, SHARD
from components.models.anatomy import transformers_class
from components.models.documents import Documents

_FUSED = "mamba2_split_conv1d_scan_combined"
"""mamba-ssm's kernel for a whole Mamba-2 layer. It reads the weights of the convolution, the norm and the
out-projection, past adapters and the shards of tensor parallelism, so the layer runs its parts instead."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """A function that mixes tokens: which of its arguments have a value per token, and the package of its kernel."""

    tensors: tuple[str, ...]
    """Parameters with a sequence dim. The function returns such a tensor, or a tuple of it and the last state."""
    dim: int
    """Sequence dim of these tensors and of the output."""
    package: str
    """Package that computes it by a kernel on a GPU."""


_DELTA_RULE = Mixing(("query", "key", "value", "g", "beta"), 1, "fla")
_FUNCTIONS: Mapping[str, Mixing] = {
    CONVOLUTION: Mixing(("hidden_states",), 2, "causal_conv1d"),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": Mixing(("hidden_states", "dt", "B", "C"), 1, "mamba_ssm"),
}
"""Name of a function in transformers' modeling files -> its arguments."""


def separate_documents(model: PreTrainedModel) -> None:
    """Replace the functions by which the model's family mixes tokens, once per process; none for other families."""
    functions = MIXERS.get(model.config.get_text_config().model_type, ())
    modeling: Any = sys.modules[transformers_class(model).__module__]
    for name in functions:
        original = vars(modeling)[name]
        if not isinstance(original, partial):
            setattr(modeling, name, partial(_mix, original, name, functions))
    if functions and _FUSED in vars(modeling):
        setattr(modeling, _FUSED, _skip_fused_kernel)


def _skip_fused_kernel(*args: Any, **kwargs: Any) -> None:
    """Tell transformers' Mamba-2 layer that there is no kernel for the whole layer."""


def _mix(function: Callable[..., Any], name: str, family: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a modeling file, within documents and over shards where a keyword says so."""
    documents, shard = kwargs.pop(DOCUMENTS, None), kwargs.pop(SHARD, None)
    if documents is None and shard is None:
        return function(*args, **kwargs)
    return _mix_apart(function, name, family, documents, shard, args, kwargs)


@torch.compiler.disable  # document bounds are Python numbers here, for which the compiler would compile each step anew
def _mix_apart(
    function: Callable[..., Any], name: str, family: tuple[str, ...], documents: Documents | None, shard: Any,
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    mixing = _FUNCTIONS[name]
    others = _signature(function).bind(*args, **kwargs).arguments
    others |= others.pop("kwargs", {})
    tensors = {each: others.pop(each) for each in mixing.tensors}
    if documents is not None:
        documents.mixed_by.add(name)
    run = partial(_within_documents, function, mixing, family)
    if shard is None:
        return run(tensors, others, documents)
    return shard.mix(name, function, run, tensors, others, documents)


def _within_documents(
    function: Callable[..., Any], mixing: Mixing, family: tuple[str, ...],
    tensors: dict[str, torch.Tensor], others: dict[str, Any], documents: Documents | None,
) -> Any:  # fmt: skip
    """Run a function on rows that are not divided, each document by itself; None: a row is one document.

    Args:
        tensors: Arguments with a value per token; all others are in `others`.
    """
    if documents is None:
        return function(**tensors, **others)
    first = tensors[mixing.tensors[0]]
    # With one kernel only, documents would be apart in one of the two functions and not in the other.
    if first.is_cuda and all(_has_kernel(_FUNCTIONS[each].package) for each in family):
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
    function: Callable[..., Any], mixing: Mixing, tensors: dict[str, torch.Tensor], others: dict[str, Any],
    documents: Documents,
) -> Any:  # fmt: skip
    """Run a kernel that takes the documents of all rows in one call."""
    first = tensors[mixing.tensors[0]]
    batch, seq = first.shape[0], first.shape[mixing.dim]
    if mixing is not _DELTA_RULE:
        return function(**tensors, **others, seq_idx=documents.indices(seq))
    # fla takes one row, in which no document is empty.
    flat = {name: each.flatten(0, 1)[None] for name, each in tensors.items()}  # (1, batch x seq, heads, ...)
    output, _ = function(**flat, **others, cu_seqlens=documents.filled_ends(seq))
    return output.unflatten(1, (batch, seq))[0], None


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


@cache
def _has_kernel(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
