"""Names of a model's tensors: which are saved, and which are the same tensor under a second name."""

from __future__ import annotations

import torch
from torch import nn


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, each under its first name, in the model's order.

    Asking for the state dict also makes FSDP put the parameters back into shards after a forward.
    """
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of shared parameters -> the first name of each."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            tied[name] = original
    return tied
