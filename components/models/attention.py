"""Causal attention for training through transformers' attention interface, without a mask and without a host sync.

transformers builds its masks by asking the device whether rows hold packed documents, once per forward: the host
waits. Training rows here hold one sample and padding on the right, which no earlier token attends to, so causality
and the layer's sliding window are all there is to say; a kernel knows the first, a band of indices is the second. Of
packed rows a keyword says where their documents are; it reaches attention through the layers' keywords.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

from components.config.errors import ConfigError
from components.config.schema.model import (
    CAUSAL_FLASH,
    CAUSAL_SDPA,
    DOCUMENTS,
    LONGEST_DOCUMENT,
    ModelConfig,
)
from components.models.anatomy import Anatomy, read_anatomy
from components.models.documents import Documents, attend_by_kernel, has_kernel

NO_KERNEL = ("No available kernel", "No viable backend")
"""How torch begins its errors where no kernel that is allowed takes an attention."""


def use_causal_sdpa(model: PreTrainedModel, flash: bool = False, anatomy: Anatomy | None = None) -> bool:
    """Switch a model that attends by sdpa to attention without masks; return False where its layers need more.

    Layers other than full and sliding attention (chunks, linear attention, both directions) keep transformers' own
    masks, and its host sync. Such a model refuses packed rows.

    Args:
        flash: Attend by torch's flash kernel or not at all. Raises ConfigError for a model that keeps its masks.
        anatomy: The model's; None: read it.
    """
    anatomy = anatomy or read_anatomy(model)
    implementation = model.config.get_text_config()._attn_implementation
    needed, refusal = anatomy.own_masks, anatomy.needs_unpacked_rows and f"{anatomy.needs_unpacked_rows}; set"
    if implementation != "sdpa":
        needed = f"attends by {implementation}, which does not receive them"
        refusal = f"{needed}; set model.attention=sdpa or"
    packed = _Packed(model, refusal)
    model.base_model.register_forward_pre_hook(packed.before, with_kwargs=True)
    model.base_model.register_forward_hook(packed.after, with_kwargs=True)
    if needed and flash:
        raise ConfigError(f"model.attention=sdpa_flash: {type(model).__name__} {needed}; set model.attention=sdpa")
    if needed:
        return False
    name, attend = (CAUSAL_FLASH, _causal_flash) if flash else (CAUSAL_SDPA, causal_sdpa)
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)
    return True


@dataclass(frozen=True, slots=True)
class ObservedAttention:
    """One way in which a model attended: what torch ran, and of what."""

    kernel: str
    """flash_attention, efficient_attention, cudnn_attention, varlen_attn, or math: no fused kernel."""
    head_dim: int
    dtype: torch.dtype
    device: str
    masked: bool
    dropout: float


class AttentionProbe(TorchFunctionMode):
    """Context that observes which kernels attend in the forwards within it.

    Queries, keys and values require gradients there, as in training, because some kernels have no backward for some
    widths of heads; none is kept.
    """

    def __init__(self, flash_only: bool = False) -> None:
        """`flash_only`: raise ConfigError, with the reason, where torch's flash kernel does not take an attention."""
        super().__init__()
        self.observed: list[ObservedAttention] = []
        """Every kind of attention once, in the order in which it was observed."""
        self._flash_only = flash_only

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Observe attention; call everything else as it is."""
        if func is scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if isinstance(func, OpOverload | OpOverloadPacket) and func.__name__.startswith("_varlen_attn"):
            self._note("varlen_attn", args[0], masked=False, dropout=0.0)
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
                if not self._flash_only or not any(message in str(error) for message in NO_KERNEL):
                    raise
                self._note("none", query, attn_mask is not None, dropout_p)
                raise ConfigError(
                    f"model.attention=sdpa_flash: torch has no flash kernel for {_inputs(self.observed[-1])}"
                    f"{' and a mask' if attn_mask is not None else ''}; set model.attention=sdpa"
                ) from error
        self._note(fused.name, query, attn_mask is not None, dropout_p)
        return output.detach()

    def _note(self, kernel: str, query: torch.Tensor, masked: bool, dropout: float) -> None:
        new = ObservedAttention(kernel, query.shape[-1], query.dtype, query.device.type, masked, dropout)
        if new not in self.observed:
            self.observed.append(new)


class _FusedKernels(TorchDispatchMode):
    """Finds the fused kernel that one call of scaled_dot_product_attention dispatches to."""

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
    """Return a sentence on how a model was observed to attend, for the banner; `packed`: rows hold documents."""
    if not observed:
        return f"attention: {cfg.attention}, transformers' own with its masks"
    implementation = model.config.get_text_config()._attn_implementation
    reason = "windows"
    if not implementation.startswith((CAUSAL_SDPA, CAUSAL_FLASH)):
        reason = "transformers' own rules"
    elif packed:
        reason = "documents"
    elif "_all_gather_" in implementation:
        reason = "the parts of a row"
    kinds = [
        f"torch's {each.kernel} for {_inputs(each)}{f' with a mask for {reason}' if each.masked else ''}"
        for each in observed
    ]
    return f"attention: {cfg.attention}, observed as {', and '.join(kinds)}"


def _inputs(observed: ObservedAttention) -> str:
    dtype = str(observed.dtype).removeprefix("torch.")
    dropout = f" with dropout {observed.dropout:g}" if observed.dropout else ""
    return f"heads of {observed.head_dim} in {dtype} on {observed.device}{dropout}"


class _Packed:
    """Hooks of the module that runs the layers: packed rows are attended to by document, or refused."""

    def __init__(self, model: PreTrainedModel, refusal: str) -> None:
        self._refusal = refusal
        self._name = type(model).__name__

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give all layers of this forward one object."""
        longest = kwargs.pop(LONGEST_DOCUMENT, None)
        bounds = kwargs.get(DOCUMENTS)
        if bounds is None:
            return args, kwargs
        if self._refusal:
            raise ConfigError(f"data.pack=true: {self._name} {self._refusal} data.pack=false")
        return args, {**kwargs, DOCUMENTS: Documents(bounds, longest)}

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Reject a model whose attention never read the document bounds, and so attended across documents."""
        documents = kwargs.get(DOCUMENTS)
        if documents is not None and not documents.reached:
            raise ConfigError(
                f"data.pack=true: {self._name} does not hand keywords down to its attention, which so would see "
                "across documents; set data.pack=false"
            )


def _causal_flash(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """`causal_sdpa` by torch's flash kernel, or its error that there is none."""
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
    """Attend to the left within a document, at most `sliding_window` tokens far (the token itself counts).

    Args:
        query: (batch, heads, seq, head_dim); key and value may have fewer heads and, with a cache, a longer seq.
        attention_mask: None in training; a mask that somebody else made is taken as it is.
        documents: Of packed rows; None: a row is one document.

    Returns ((batch, seq, heads, head_dim), None). Raises ConfigError for a mask of numbers: a model that makes one
    (Doge) adds it to the causal mask, and here was given none.
    """
    if attention_mask is not None and attention_mask.is_floating_point():
        raise ConfigError(
            f"model.attention=sdpa: {type(module).__name__} makes a mask of its own on top of transformers' causal "
            "one; set model.attention=eager"
        )
    query, key, value = _cast_by_autocast(query, key, value)
    queries, keys = query.shape[2], key.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < keys else None
    if attention_mask is None and documents is not None:
        if has_kernel(query, value, kwargs.get("dropout", 0.0)):
            return attend_by_kernel(query, key, value, documents, window, kwargs.get("scaling")), None
        attention_mask = documents.mask(keys, window)
    elif attention_mask is None and window is not None:
        place = torch.arange(keys, device=query.device)
        distance = place[keys - queries :, None] - place[None, :]  # (seq of queries, seq of keys)
        attention_mask = ((distance >= 0) & (distance < window))[None, None]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _cast_by_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast queries, keys and values as autocast would within torch's attention: kernels are chosen by their types.

    Rotary embeddings, which are float32 under autocast, promote queries and keys to float32.
    """
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [each if each.dtype == torch.float64 else each.to(dtype) for each in tensors]
