"""Causal attention for training through transformers' attention interface, without a mask and without a host sync.

transformers builds its masks by asking the device whether rows hold packed documents, once per forward: the host
waits. Training rows here hold one sample and padding on the right, which no earlier token attends to, so causality
and the layer's sliding window are all there is to say; a kernel knows the first, a band of indices is the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from components.config.schema.model import CAUSAL_SDPA

KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def use_causal_sdpa(model: PreTrainedModel) -> bool:
    """Switch a model that attends by sdpa to attention without masks; return False where its layers need more.

    Layers other than full and sliding attention (chunks, linear attention, both directions) keep transformers' own
    masks, and its host sync.
    """
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config._attn_implementation != "sdpa" or not layers <= KNOWN_LAYERS:
        return False
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return False
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)
    model.set_attn_implementation(CAUSAL_SDPA)
    return True


def causal_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the left, at most `sliding_window` tokens far (the token itself counts).

    Args:
        query: (batch, heads, seq, head_dim); key and value may have fewer heads and, with a cache, a longer seq.
        attention_mask: None in training; a mask that somebody else made is taken as it is.

    Returns ((batch, seq, heads, head_dim), None).
    """
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and sliding_window is not None and keys > sliding_window:
        place = torch.arange(keys, device=query.device)
        distance = place[keys - queries :, None] - place[None, :]  # (seq of queries, seq of keys)
        attention_mask = ((distance >= 0) & (distance < sliding_window))[None, None]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
