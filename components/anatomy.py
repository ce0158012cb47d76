"""What a Hugging Face model is made of, for the packages that may not import one another."""

from __future__ import annotations

from typing import Any

from torch import nn


def named_decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers of a model by name, in order, placeholders of other pipeline stages included.

    They are the first ModuleList of `num_hidden_layers` modules, one of the decoder's before one of an image encoder's.
    Where no list has this length, the longest one is taken: a config may count something else (the encoder of
    Blenderbot, the attention blocks of LongCat), and a model that is not from Hugging Face has none. Empty for a model
    without a ModuleList.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    decoder: Any = getattr(model, "get_decoder", lambda: None)()
    inside = {id(module) for module in decoder.modules()} if isinstance(decoder, nn.Module) else set()
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    lists = {name: layers for name, layers in lists.items() if id(layers) in inside} or lists
    longest = max(lists, key=lambda name: len(lists[name]), default=None)
    found = next((name for name, layers in lists.items() if len(layers) == count), longest)
    return {} if found is None else {f"{found}.{index}": layer for index, layer in enumerate(lists[found])}
