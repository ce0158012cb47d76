"""Causal attention for training through transformers' attention interface, without a mask and without a host sync.

transformers builds its masks by asking the device whether rows hold packed documents, once per forward: the host
waits. Training rows here hold one sample and padding on the right, which no earlier token attends to, so causality
and the layer's sliding window are all there is to say; a kernel knows the first, a band of indices is the second. Of
packed rows a keyword says where their documents are; it reaches attention through the layers' keywords.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from components.config.errors import ConfigError
from components.config.schema.model import (
    CAUSAL_FLASH,
    CAUSAL_SDPA,
    DOCUMENTS,
    NO_FLEX_BACKWARD,
    Attention,
    ModelConfig,
)
from components.models.documents import Documents, attend_by_kernel, has_kernel

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def use_causal_sdpa(model: PreTrainedModel, flash: bool = False) -> bool:
    """Switch a model that attends by sdpa to attention without masks; return False where its layers need more.

    Layers other than full and sliding attention (chunks, linear attention, both directions) keep transformers' own
    masks, and its host sync. Such a model refuses packed rows.

    Args:
        flash: Attend by torch's flash kernel or not at all. Raises ConfigError for a model that keeps its masks.
    """
    needed = _what_it_needs(model)
    packed = _Packed(model, needed)
    model.base_model.register_forward_pre_hook(packed.before, with_kwargs=True)
    model.base_model.register_forward_hook(packed.after, with_kwargs=True)
    if needed and flash:
        raise ConfigError(
            f"model.attention=sdpa_flash: {type(model).__name__} {needed.partition(';')[0]}; set model.attention=sdpa"
        )
    if needed:
        return False
    name, attend = (CAUSAL_FLASH, _causal_flash) if flash else (CAUSAL_SDPA, causal_sdpa)
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)
    return True


def attention_kernel(
    model: PreTrainedModel, cfg: ModelConfig, dtype: torch.dtype, device: torch.device, packed: bool
) -> str:
    """Return a sentence on how a model attends on `device` to hidden states of `dtype`, for the banner.

    packed: Rows hold documents. Raises ConfigError where what was asked for cannot train here.
    """
    config: Any = model.config.get_text_config()
    if not config._attn_implementation.startswith((CAUSAL_SDPA, CAUSAL_FLASH)):
        if cfg.attention == Attention.flex_attention and device.type == "cpu":
            raise ConfigError(NO_FLEX_BACKWARD)
        return f"attention: {cfg.attention}, transformers' own with its masks"
    query, key, value = _like_those_of(config, dtype, device)
    dropout = float(getattr(config, "attention_dropout", 0.0))
    if packed and has_kernel(query, value, dropout):
        return f"attention: {cfg.attention}, documents by torch's kernel for unequal lengths (varlen_attn)"
    needs = {
        "documents": packed,
        "windows": "sliding_attention" in (getattr(config, "layer_types", None) or []),
        "the parts of a row": "_all_gather_" in config._attn_implementation,
    }
    masked = next((what for what, needed in needs.items() if needed), None)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=device) if masked else None
    chosen = SDPBackend(
        torch._fused_sdp_choice(query, key, value, mask, dropout, mask is None, enable_gqa=query.shape != key.shape)
    )
    why = f"heads of {query.shape[-1]} in {str(dtype).removeprefix('torch.')} on {device.type}"
    why += f" and a mask, for {masked}" if masked else ""
    why += f" and dropout {dropout:g}" if dropout else ""
    if cfg.attention == Attention.sdpa_flash and chosen != SDPBackend.FLASH_ATTENTION:
        raise ConfigError(f"model.attention=sdpa_flash: torch has no flash kernel for {why}; set model.attention=sdpa")
    return f"attention: {cfg.attention}, for {why} torch's kernel {chosen.name.lower()}"


def _like_those_of(
    config: Any, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of one row of 16 tokens, as an accelerator's kernels see them."""
    heads, nope = config.num_attention_heads, getattr(config, "qk_nope_head_dim", None)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    of_keys = size if nope is None else nope + config.qk_rope_head_dim
    of_values = getattr(config, "v_head_dim", None) or size
    # transformers repeats keys and values where the kernels would not share them.
    shared = (getattr(config, "num_key_value_heads", None) or heads) if of_keys == of_values <= 256 else heads
    shapes = ((heads, of_keys), (shared, of_keys), (shared, of_values))
    query, key, value = (
        torch.empty(1, count, 16, width, dtype=dtype, device=device, requires_grad=True) for count, width in shapes
    )
    return query, key, value


def _what_it_needs(model: PreTrainedModel) -> str:
    """Return what the model's attention needs besides causality and windows, and what to set; "": nothing."""
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or []) - KNOWN_LAYERS
    if config._attn_implementation != "sdpa":
        return f"attends by {config._attn_implementation}, which is not told of them; set model.attention=sdpa or"
    if others:
        return f"has layers of {', '.join(sorted(others))}, which see more than their document; set"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "attends to both sides; set"
    if getattr(config, "sliding_window", None) and not any(map(_is_told_of_windows, model.modules())):
        return "keeps its sliding window in a mask that its attention is not told of; set"
    return ""


def _is_told_of_windows(module: nn.Module) -> bool:
    """Whether a module's forward hands the width of its window on, by the keyword that attention functions take."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return any(isinstance(const, tuple) and "sliding_window" in const for const in getattr(code, "co_consts", ()))


class _Packed:
    """Hooks of the module that runs the layers: packed rows are attended to by document, or refused."""

    def __init__(self, model: PreTrainedModel, needed: str) -> None:
        mixes = next((type(each).__name__ for each in model.modules() if isinstance(each, CONVOLUTIONS)), "")
        self._refusal = needed or (f"mixes neighbours by {mixes}, across documents too; set" if mixes else "")
        self._name = type(model).__name__

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give all layers of this forward one object."""
        bounds = kwargs.get(DOCUMENTS)
        if bounds is None:
            return args, kwargs
        if self._refusal:
            raise ConfigError(f"data.pack=true: {self._name} {self._refusal} data.pack=false")
        return args, {**kwargs, DOCUMENTS: Documents(bounds)}

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Refuse a model whose attention was never told of the documents, and so saw across them."""
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
