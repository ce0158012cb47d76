"""Causal attention for training, without a mask and without a host sync, through transformers' attention interface.

To build its masks, transformers checks on the device whether rows hold packed documents, which is one host sync per
forward. Training rows here need no such mask: a row holds one sample with padding on the right, and causality keeps
earlier tokens from attending to the padding. The kernels implement causality; a sliding window is a band mask made from
indices. For packed rows, the document bounds reach attention as a keyword that the decoder layers pass on.

On a GPU the installed kernels are timed on a call of the run itself, and the fastest is used.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from components.config.schema.model import (
    CAUSAL_EAGER,
    CAUSAL_FLASH,
    CAUSAL_SDPA,
    DOCUMENTS,
    LONGEST_DOCUMENT,
    ROW_SHARD,
    ModelConfig,
)
from components.models.anatomy import FULL, MIXING, SLIDING, Anatomy, read_anatomy
from components.models.documents import Documents, separate_documents, varlen_attention
from components.models.layers import has_parameters
from components.protocol.errors import ConfigError
from components.torch_kernels import cast_by_autocast, supports_varlen

_FALLBACKS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""torch's kernels but cuDNN's, in the order in which they are tried if a preferred one does not support the inputs."""
_NO_KERNEL = ("No available kernel", "No viable backend")
"""Beginnings of torch's errors when none of the enabled kernels supports the inputs."""
_BACKENDS = {"flash_attention": SDPBackend.FLASH_ATTENTION, "efficient_attention": SDPBackend.EFFICIENT_ATTENTION}
"""Fused kernels of scaled_dot_product_attention that need no mask, by the name that the banner reports."""
_FA3 = "FlashAttention 3"
"""torch dispatches its flash and varlen operators to this package instead of its own kernels."""
_FA3_MODULE = "flash_attn_interface"
_FASTER = 1.05
"""Minimum speedup over torch's own choice: less is within the noise of a few calls."""
_REPEATS = 5


def use_causal_sdpa(model: PreTrainedModel, flash: bool = False, anatomy: Anatomy | None = None) -> bool:
    """Switch a model with sdpa attention to mask-free attention; return False if it needs transformers' masks.

    So is a model with eager attention that has no sdpa, because of a soft cap or attention sinks. Linear attention,
    Mamba-2 and short convolutions keep documents apart by their own functions (documents.py). A model with other
    layers than these and full or sliding attention (chunked, bidirectional) keeps transformers' own masks and their
    host sync, and rejects packed rows.

    Args:
        flash: Require torch's flash kernel. Raises ConfigError for a model that needs masks.
        anatomy: The structure of the model; None: read it now.
    """
    anatomy = anatomy or read_anatomy(model)
    implementation = model.config.get_text_config()._attn_implementation
    supported = "sdpa" if model._supports_sdpa else "eager"
    reason, packing_error = anatomy.needs_masks, anatomy.needs_unpacked_rows and f"{anatomy.needs_unpacked_rows}; set"
    if implementation != supported and not packing_error:
        reason = f"uses {implementation} attention, which does not receive document bounds"
        packing_error = f"{reason}; set model.attention={supported} or"
    separate_documents(model)
    packed = _PackedRows(model, packing_error, anatomy)
    # On the causal LM too: its forward may drop the bounds (Falcon), or call its decoder directly (OPT).
    for module in dict.fromkeys((model, model.base_model)):
        module.register_forward_pre_hook(packed.before, with_kwargs=True)
        module.register_forward_hook(packed.after, with_kwargs=True)
    if reason and flash:
        raise ConfigError(f"model.attention=sdpa_flash: {type(model).__name__} {reason}; set model.attention=sdpa")
    if reason or implementation != supported:
        return False
    name, attend = (CAUSAL_FLASH, _causal_flash) if flash else (CAUSAL_SDPA, causal_sdpa)
    if supported == "eager":
        name, attend = CAUSAL_EAGER, _causal_eager
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)
    return True


@dataclass(frozen=True, slots=True)
class ObservedAttention:
    """One kind of attention call: the kernel that torch ran, and its inputs."""

    kernel: str
    """flash_attention, efficient_attention, varlen_attn, or math (no fused kernel); "of FA3" where torch dispatches to
    another package."""
    head_dim: int
    dtype: torch.dtype
    device: str
    masked: bool
    dropout: float


class AttentionProbe(TorchFunctionMode):
    """Context that records the attention kernels of the forwards within it.

    Queries, keys and values are detached and require gradients, as in training: some kernels have no backward for some
    head widths, and torch selects accordingly. No graph is kept.
    """

    def __init__(self, flash_only: bool = False) -> None:
        """`flash_only`: raise ConfigError, with the reason, if torch's flash kernel does not support a call."""
        super().__init__()
        self.observed: list[ObservedAttention] = []
        """Distinct kinds of attention calls, in the order of their first occurrence."""
        self.first: tuple[Any, Any, dict[str, Any]] | None = None
        """Function, arguments and options of the first call without a mask."""
        self._flash_only = flash_only

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record attention calls; run everything else unchanged."""
        if func is scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if isinstance(func, OpOverload | OpOverloadPacket) and func.__name__.startswith("_varlen_attn"):
            self._record("varlen_attn", args[0], masked=False, dropout=0.0)
            self.first = self.first or (func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        with torch.enable_grad(), _FusedKernels() as fused:
            query, key, value = (each.detach().requires_grad_() for each in (query, key, value))
            try:
                output = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
            except RuntimeError as error:
                if not self._flash_only or not any(message in str(error) for message in _NO_KERNEL):
                    raise
                self._record("none", query, attn_mask is not None, dropout_p)
                raise ConfigError(
                    f"model.attention=sdpa_flash: torch has no flash kernel for {_inputs(self.observed[-1])}"
                    f"{' and a mask' if attn_mask is not None else ''}; set model.attention=sdpa"
                ) from error
        self._record(fused.name, query, attn_mask is not None, dropout_p)
        if attn_mask is None and self.first is None:
            options = {**options, "dropout_p": dropout_p, "is_causal": is_causal}
            self.first = (scaled_dot_product_attention, (query, key, value), options)
        return output.detach()

    def _record(self, kernel: str, query: torch.Tensor, masked: bool, dropout: float) -> None:
        package = torch.nn.attention.current_flash_attention_impl()
        if package is not None and kernel in ("flash_attention", "varlen_attn"):
            kernel = f"{kernel} of {package}"
        new = ObservedAttention(kernel, query.shape[-1], query.dtype, query.device.type, masked, dropout)
        if new not in self.observed:
            self.observed.append(new)


class _FusedKernels(TorchDispatchMode):
    """Dispatch mode that finds the fused kernel behind one call of scaled_dot_product_attention."""

    name = "math"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _, is_attention, name = func.overloadpacket.__name__.partition("_scaled_dot_product_")
        if is_attention and not name.startswith("attention_math"):
            self.name = name.removesuffix("_for_cpu")
        return func(*args, **(kwargs or {}))


def describe_attention(
    model: PreTrainedModel,
    cfg: ModelConfig,
    observed: Sequence[ObservedAttention],
    packed: bool,
) -> str:
    """Return a line for the banner with the attention kernels that a model was observed to use.

    Args:
        packed: Whether rows hold several documents.
    """
    implementation = model.config.get_text_config()._attn_implementation
    if not observed:
        masks = "masks of its rows" if implementation.startswith(CAUSAL_EAGER) else "its masks"
        return f"attention: {cfg.attention}, transformers' own with {masks}"
    reason = "windows"
    if not implementation.startswith((CAUSAL_SDPA, CAUSAL_FLASH)):
        reason = "transformers' own rules"
    elif packed:
        reason = "documents"
    elif "_all_gather_" in implementation:
        reason = "the cp shards of a row"
    kinds = [
        f"torch's {each.kernel} for {_inputs(each)}{f' with a mask for {reason}' if each.masked else ''}"
        for each in observed
    ]
    return f"attention: {cfg.attention}, observed as {', and '.join(kinds)}"


def _inputs(observed: ObservedAttention) -> str:
    dtype = str(observed.dtype).removeprefix("torch.")
    dropout = f" with dropout {observed.dropout:g}" if observed.dropout else ""
    return f"heads of {observed.head_dim} in {dtype} on {observed.device}{dropout}"


class _PackedRows:
    """Forward hooks of a model and its base model: pass document bounds to attention, or reject packed rows."""

    def __init__(self, model: PreTrainedModel, error: str, anatomy: Anatomy) -> None:
        """`error`: why this model cannot train on packed rows, and the settings to change; empty if it can."""
        self._error = error
        self._name = type(model).__name__
        self._anatomy = anatomy
        self._kinds: dict[int, set[str]] = {}
        """Id of a module, the model or a pipeline stage -> types of its own layers."""

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Replace the bounds by one `Documents` object, which all layers of this forward share."""
        longest = kwargs.pop(LONGEST_DOCUMENT, None)
        bounds = kwargs.get(DOCUMENTS)
        if bounds is None or isinstance(bounds, Documents):
            return args, kwargs
        if self._error:
            raise ConfigError(f"data.pack=true: {self._name} {self._error} data.pack=false")
        return args, {**kwargs, DOCUMENTS: Documents(bounds, longest)}

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Reject a model of which a part never read the document bounds, or its share of the rows under cp."""
        documents, shard = kwargs.get(DOCUMENTS), kwargs.get(ROW_SHARD)
        mixing: Any = documents if shard is None else shard
        if mixing is None:
            return
        kinds = self._kinds.get(id(module))
        if kinds is None:  # pipeline stages are copies that share this hook
            kinds = self._kinds[id(module)] = self._kinds_of(module)
        key = "data.pack=true" if shard is None else f"parallelism.cp={shard.mesh.size()}"
        missing = set(self._anatomy.mixers) - mixing.mixed_by
        if missing and not kinds.isdisjoint(MIXING):
            raise ConfigError(
                f"{key}: {self._name} did not pass its keywords to {', '.join(sorted(missing))}, so its layers would "
                "mix documents or miss the tokens of other ranks; install the release of transformers that Meshbook "
                f"pins, or set {'data.pack=false' if shard is None else 'parallelism.cp=1'}"
            )
        if documents is None:
            return
        if not documents.used and not kinds.isdisjoint((FULL, SLIDING, "hybrid", "")):
            raise ConfigError(
                f"data.pack=true: {self._name} does not pass keywords on to its attention, which would attend "
                "across documents; set data.pack=false"
            )

    def _kinds_of(self, module: nn.Module) -> set[str]:
        """Return the types of the layers that a model or stage has itself; "": it has layers of unknown types."""
        names = self._anatomy.layers
        for layers in (names, tuple(name.removeprefix(f"{self._anatomy.inner}.") for name in names)):
            parts = self._anatomy.parts(module, layers)
            if parts:
                kinds = dict(zip(layers, self._anatomy.kinds, strict=False))
                return {kinds.get(name, "") for name, layer in parts.items() if has_parameters(layer)}
        return {""}


def _causal_flash(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Call `causal_sdpa` with only torch's flash kernel enabled; torch raises RuntimeError if it is unsupported."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return causal_sdpa(*args, **kwargs)


def causal_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    documents: Documents | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within documents, over at most `sliding_window` tokens including the query's own.

    Args:
        query: (batch, heads, seq, head_dim); key and value may have fewer heads and, with a cache, a longer seq.
        attention_mask: None in training; a boolean mask from the caller is used as it is.
        documents: Documents of packed rows; None: a row is one document.
        kwargs: scaling, dropout, and `prefer`: torch's kernel for calls without a mask, wherever it supports them.

    Returns ((batch, seq, heads, head_dim), None). Raises ConfigError for a floating-point mask: a model that builds one
    (Doge) relies on the causal mask that it adds it to, which does not exist here.
    """
    if attention_mask is not None and attention_mask.is_floating_point():
        raise ConfigError(
            f"model.attention=sdpa: {type(module).__name__} adds its own mask to transformers' causal mask, which "
            "mask-free attention does not build; set model.attention=eager"
        )
    query, key, value = cast_by_autocast(query, key, value)
    queries, keys = query.shape[2], key.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < keys else None
    if attention_mask is None and documents is not None:
        if supports_varlen(query, value, kwargs.get("dropout", 0.0)):
            return varlen_attention(query, key, value, documents, window, kwargs.get("scaling")), None
        attention_mask = documents.mask(keys, window)
    elif attention_mask is None and window is not None:
        attention_mask = _band(queries, keys, window, query.device)
    prefer: SDPBackend | None = kwargs.pop("prefer", None)
    if prefer is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    with sdpa_kernel([prefer, *(fallback for fallback in _FALLBACKS if fallback != prefer)], set_priority=True):
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)


def _causal_eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    documents: Documents | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of `causal_sdpa` by the model's own eager function, with its soft cap or sinks."""
    if attention_mask is not None and attention_mask.is_floating_point():
        raise ConfigError(
            f"model.attention=eager: {type(module).__name__} builds its own attention mask, which cp and packed rows "
            "do not use; set parallelism.cp=1 and data.pack=false"
        )
    queries, keys = query.shape[2], key.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < keys else None
    if attention_mask is None and documents is not None:
        attention_mask = documents.mask(keys, window)
    elif attention_mask is None:
        attention_mask = _band(queries, keys, window, query.device)
    bias = torch.zeros((), dtype=query.dtype, device=query.device)
    bias = bias.where(attention_mask, torch.finfo(query.dtype).min)
    attend = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
    output, _ = attend(module, query, key, value, bias, **kwargs)
    return output, None


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return the mask of causal attention within a window, True where a query attends: (1, 1, queries, keys)."""
    position = torch.arange(keys, device=device)
    last = position[keys - queries :, None]  # (seq of queries, 1): comparing needs no matrix of distances
    mask = position <= last
    return (mask if window is None else mask & (position > last - window))[None, None]


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """A mask-free call of attention, observed in a forward."""

    attend: Callable[..., Any]
    """(query, key, value) -> output, or a tuple that begins with it."""
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    lengths: list[tuple[int, int]]
    """Queries and keys of each sequence and head, of which the last of each are the same token."""
    is_varlen: bool

    @property
    def flops(self) -> float:
        """FLOPs of the causal part in forward and backward, two and five matmuls; of windows, an upper bound."""
        width = self.tensors[0].shape[-1]
        return 7 * 2 * width * sum(queries * (keys - (queries - 1) / 2) for queries, keys in self.lengths)


def observed_call(function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> _AttentionCall:
    """Return the call that `AttentionProbe.first` describes. Waits for the device, if lengths are on it (varlen)."""
    query, key, value, *rest = arguments
    lengths = [(query.shape[-2], key.shape[-2])] * query.shape[:-2].numel()
    if is_varlen := function is not scaled_dot_product_attention:
        ends = (each.diff().tolist() for each in rest[:2])
        lengths = list(zip(*ends, strict=True)) * query.shape[1]

    def attend(*tensors: torch.Tensor) -> Any:
        return function(*tensors, *rest, **options)

    return _AttentionCall(attend, (query, key, value), lengths, is_varlen)


def measure_kernels(call: _AttentionCall, default: str) -> dict[str, float | str]:
    """Return TFLOP/s of the kernels that compute a call, or why one cannot, by name; `default` is torch's choice."""
    rates: dict[str, float | str] = {default: _rate(call)}
    for name, backend in _BACKENDS.items():
        if not call.is_varlen and name != default:
            with sdpa_kernel(backend):
                rates[name] = _rate(call)
    if find_spec(_FA3_MODULE) is None:
        rates[_FA3] = f"{_FA3_MODULE} is not installed"
    elif torch.cuda.get_device_capability() != (9, 0):
        rates[_FA3] = "it needs a Hopper GPU"
    else:
        torch.nn.attention.activate_flash_attention_impl("FA3")
        try:
            with nullcontext() if call.is_varlen else sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                rates[_FA3] = _rate(call)
        finally:
            torch.nn.attention.restore_flash_attention_impl()
    return rates


def choose_kernel(rates: dict[str, float | str], default: str) -> tuple[str, str]:
    """Return the kernel to use, and a line for the banner with the reason."""
    measured = {name: rate for name, rate in rates.items() if isinstance(rate, float)}
    fastest = max(measured, key=measured.__getitem__, default=default)
    if measured.get(fastest, 0.0) < _FASTER * measured.get(default, 0.0):
        fastest = default
    problems = [
        f"{name} {rate:,.0f} TFLOP/s" if isinstance(rate, float) else f"{name}: {rate}" for name, rate in rates.items()
    ]
    action = "torch's default kept" if fastest == default else "chosen by measurement"
    return fastest, f"attention kernel: {fastest}, {action} ({'; '.join(problems)})"


def is_usable(name: str) -> bool:
    """Return whether `use_kernel` accepts a kernel here; one that a checkpoint names may need a missing package."""
    return name in _BACKENDS or (name == _FA3 and find_spec(_FA3_MODULE) is not None)


def use_kernel(name: str) -> None:
    """Compute mask-free attention by a kernel of `measure_kernels` from now on, wherever it supports the inputs."""
    if name == _FA3:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    backend = _BACKENDS["flash_attention" if name == _FA3 else name]
    AttentionInterface.register(CAUSAL_SDPA, partial(causal_sdpa, prefer=backend))


def _rate(call: _AttentionCall) -> float | str:
    """Return TFLOP/s of forward and backward on a GPU, or the first line of torch's error."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in call.tensors]

    def both() -> None:
        output = call.attend(*leaves)
        output = output if isinstance(output, torch.Tensor) else output[0]
        torch.autograd.grad(output, leaves, torch.ones_like(output))

    try:
        with torch.enable_grad(), warnings.catch_warnings(action="ignore"):  # torch warns why a kernel is not used
            for _ in range(2):
                both()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(_REPEATS):
                both()
            torch.cuda.synchronize()
    except RuntimeError as error:  # torch has no such kernel for these inputs
        return str(error).partition("\n")[0]
    return call.flops * _REPEATS / (time.perf_counter() - began) / 1e12
