"""From the meta device to a real one: memory for the parameters, values for the buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from components.models.names import tied_names
from components.models.twin import buffer_twin

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def materialize(model: PreTrainedModel, device: torch.device | str) -> None:
    """Give every parameter its memory on `device`, uninitialised, and every buffer its value.

    For a model from `build_on_meta`, before or after tensor parallelism and `fully_shard`. Only this rank's
    parts are allocated. Buffers, such as rotary frequencies, are in no file: they get what the model's own
    constructor computes on a CPU, the same on every device. Tied parameters stay tied.
    """
    tied = tied_names(model)
    model.to_empty(device=device)
    for name, original in tied.items():
        _set(model, name, model.get_parameter(original))
    twin = buffer_twin(model)
    for name, value in twin.named_buffers(remove_duplicate=False):
        if value.is_meta:
            raise RuntimeError(f"buffer {name} of {type(model).__name__} is not computed by its constructor")
        model.get_buffer(name).copy_(value)
    # Some models keep computed tensors as plain attributes, which `to_empty` does not see.
    for name, module in twin.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                setattr(model.get_submodule(name), attribute, value.to(device))


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    model.get_submodule(path).register_parameter(attribute, parameter)
