"""Materialization of a model from the meta device: memory for parameters, values for buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from components.models.anatomy import plain_tensors
from components.models.lora import quantized_layers
from components.models.meta_copy import copy_with_buffers
from components.models.quantization.nf4 import level_pairs
from components.models.weights.names import tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def materialize(model: PreTrainedModel, device: torch.device | str, *, offload: bool = False) -> None:
    """Allocate every parameter on `device`, uninitialized, and set every buffer.

    The model comes from `build_on_meta`, with or without tensor parallelism and `fully_shard`. Only this rank's shards
    are allocated; modules of other pipeline stages may be missing. Buffers such as rotary frequencies are not in weight
    files: they are computed by the model's constructor on the CPU, so that they are equal on every device. Tied
    parameters stay tied.

    Args:
        offload: Allocate parameters in host memory, as FSDP2's CPU offloading requires; buffers still go to `device`.

    Raises RuntimeError for a buffer that the constructor does not compute.
    """
    tied = tied_names(model)
    model.to_empty(device="cpu" if offload else device)
    for name, original in tied.items():
        _set(model, name, model.get_parameter(original))
    pairs = level_pairs(device)
    for layer in quantized_layers(model).values():
        layer.pairs = pairs
    computed_model = copy_with_buffers(model)
    computed = dict(computed_model.named_buffers(remove_duplicate=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        value = pairs if buffer is pairs else computed.get(name)
        if value is None or value.is_meta:
            raise RuntimeError(f"buffer {name} of {type(model).__name__} is not computed by its constructor")
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._buffers[attribute] = buffer.to(device).copy_(value)
    # Some models store computed tensors as plain attributes, which `to_empty` does not move.
    computed_modules = dict(computed_model.named_modules())
    for name, module in model.named_modules():
        attributes = plain_tensors(computed_modules[name]) if name in computed_modules else {}
        for attribute in attributes.keys() & plain_tensors(module):
            setattr(module, attribute, attributes[attribute].to(device))


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    model.get_submodule(path).register_parameter(attribute, parameter)
