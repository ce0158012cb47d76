"""From the meta device to a real one: memory for the parameters, values for the buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from components.models.anatomy import plain_tensors
from components.models.lora import quantized_layers
from components.models.meta_copy import buffer_twin
from components.models.weights.names import tied_names
from components.models.weights.nf4 import level_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def materialize(model: PreTrainedModel, device: torch.device | str, *, offload: bool = False) -> None:
    """Give every parameter its memory on `device`, uninitialised, and every buffer its value there.

    For a model from `build_on_meta`, before or after tensor parallelism and `fully_shard`. Only this rank's
    parts are allocated; modules of other pipeline stages may be missing. Buffers, such as rotary frequencies, are in
    no file: they get what the model's own constructor computes on a CPU, the same on every device. Tied parameters
    stay tied.

    Args:
        offload: Parameters stay in host memory, as FSDP2's CPU offloading wants them; buffers do not.
    """
    tied = tied_names(model)
    model.to_empty(device="cpu" if offload else device)
    for name, original in tied.items():
        _set(model, name, model.get_parameter(original))
    pairs = level_pairs(device)
    for layer in quantized_layers(model).values():
        layer.pairs = pairs
    twin = buffer_twin(model)
    computed = dict(twin.named_buffers(remove_duplicate=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        value = pairs if buffer is pairs else computed.get(name)
        if value is None or value.is_meta:
            raise RuntimeError(f"buffer {name} of {type(model).__name__} is not computed by its constructor")
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._buffers[attribute] = buffer.to(device).copy_(value)
    # Some models keep computed tensors as plain attributes, which `to_empty` does not see.
    twins = dict(twin.named_modules())
    for name, module in model.named_modules():
        computed_here = plain_tensors(twins[name]) if name in twins else {}
        for attribute in computed_here.keys() & plain_tensors(module):
            setattr(module, attribute, computed_here[attribute].to(device))


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    model.get_submodule(path).register_parameter(attribute, parameter)
