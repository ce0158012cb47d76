"""Causal attention for training through transformers' attention interface, without a mask and without a host sync.

transformers builds its masks by asking the device whether rows hold packed documents, once per forward: the host
waits. Training rows here hold one sample and padding on the right, which no earlier token attends to, so causality
and the layer's sliding window are all there is to say; a kernel knows the first, a band of indices is the second. Of
packed rows a keyword says where their documents are; it reaches attention through the layers' keywords.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from components.config.errors import ConfigError
from components.config.schema.model import CAUSAL_SDPA, DOCUMENTS
from components.models.documents import Documents, attend_by_kernel, has_kernel

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def use_causal_sdpa(model: PreTrainedModel) -> bool:
    """Switch a model that attends by sdpa to attention without masks; return False where its layers need more.

    Layers other than full and sliding attention (chunks, linear attention, both directions) keep transformers' own
    masks, and its host sync. Such a model refuses packed rows.
    """
    needed = _what_it_needs(model)
    packed = _Packed(model, needed)
    model.base_model.register_forward_pre_hook(packed.before, with_kwargs=True)
    model.base_model.register_forward_hook(packed.after, with_kwargs=True)
    if needed:
        return False
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)
    model.set_attn_implementation(CAUSAL_SDPA)
    return True


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
    return ""


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

    Returns ((batch, seq, heads, head_dim), None).
    """
    queries, keys = query.shape[2], key.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < keys else None
    if attention_mask is None and documents is not None:
        if has_kernel(query, kwargs.get("dropout", 0.0)):
            return attend_by_kernel(query, key, value, documents, window, kwargs.get("scaling")), None
        attention_mask = documents.mask(keys, window)
    elif attention_mask is None and window is not None:
        place = torch.arange(keys, device=query.device)
        distance = place[keys - queries :, None] - place[None, :]  # (seq of queries, seq of keys)
        attention_mask = ((distance >= 0) & (distance < window))[None, None]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
