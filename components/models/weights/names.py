"""Names of a model's tensors: those that are saved, and those of tied parameters."""

from __future__ import annotations

import torch
from torch import nn


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers in the model's order, each once, under its first name.

    `state_dict` also makes FSDP reshard parameters that a forward left unsharded.
    """
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the additional names of shared parameters -> the first name of each."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            tied[name] = original
    return tied
