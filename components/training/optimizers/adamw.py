"""AdamW that updates the local shards of DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from components.training.optimizers.gradients import local_tensor


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW; a step passes local shards to the kernel instead of DTensors.

    The update is elementwise, so the bits are the same. For a list of DTensors, torch derives the placements of each
    result at the first step and hashes them at each later one: 1.7 s and 15 ms of processor time for 270 parameters on
    a mesh of two axes, where local shards take 16 ms and 5 ms. State dicts hold DTensors as before.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill the lists of parameters, gradients, moments and step counters with local shards.

        Overrides a private method of torch.optim.Adam, whose `step` passes the lists to the kernel.
        """
        is_complex: bool = super()._init_group(group, *lists)
        parameters, gradients, *moments, _steps = lists
        for index, parameter in enumerate(parameters):
            if isinstance(parameter, DTensor):
                for each in (gradients, *filter(None, moments)):
                    each[index] = _shard_like(parameter, each[index])
        parameters[:] = map(local_tensor, parameters)
        return is_complex


def _shard_like(parameter: DTensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor with the placements of its parameter."""
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a gradient or moment of a DTensor is a {type(tensor).__name__}")
    if tensor.placements != parameter.placements:
        tensor = tensor.redistribute(parameter.device_mesh, parameter.placements)
    return tensor.to_local()
