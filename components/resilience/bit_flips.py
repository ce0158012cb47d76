"""Injected bit flips in one rank's tensors, which simulate silent data corruption.

For tests of the comparison of replicas. MESHBOOK_FAULT names the point, the rank and the step: see faults.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from components.resilience.faults import STEP_POINTS, VARIABLE, fault_point

if TYPE_CHECKING:
    import torch


def arm_bit_flips(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Register the points of STEP_POINTS around each step of the optimizers, if MESHBOOK_FAULT names any of them."""
    if not any(f":{point}" in os.environ.get(VARIABLE, "") for point in STEP_POINTS):
        return
    before, *after = STEP_POINTS

    def pre_hook(*_: Any) -> None:
        fault_point(before, partial(flip_random_bit, tensors_at(before, optimizers)))

    def post_hook(*_: Any) -> None:
        for point in after:
            fault_point(point, partial(flip_random_bit, tensors_at(point, optimizers)))

    optimizers[0].register_step_pre_hook(pre_hook)
    optimizers[-1].register_step_post_hook(post_hook)


def tensors_at(point: str, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return this rank's shards of the tensors of a point: gradients, weights or optimizer state."""
    import torch  # here, as in flip_random_bit: most users of this file have no tensors
    from torch.distributed.tensor import DTensor

    parameters = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    if point == "reduced_gradients":
        tensors = [parameter.grad for parameter in parameters if parameter.grad is not None]
    elif point == "weights":
        tensors = [parameter.detach() for parameter in parameters]
    else:
        states = [optimizer.state[each] for optimizer in optimizers for each in optimizer.state]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    shards = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return [shard for shard in shards if shard.numel()]


def flip_random_bit(tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Flip one bit of one of the tensors in place, drawn with `seed`; tensors are drawn in proportion to their size."""
    import torch

    draw = random.Random(seed)
    (tensor,) = draw.choices(tensors, weights=[each.numel() * each.element_size() for each in tensors])
    element, byte, bit = draw.randrange(tensor.numel()), draw.randrange(tensor.element_size()), draw.randrange(8)
    index = []
    for size in reversed(tensor.shape):
        element, position = divmod(element, size)
        index.append(position)
    value = tensor[tuple(reversed(index))].reshape(1).clone()
    value.view(torch.uint8)[byte] ^= 1 << bit
    tensor[tuple(reversed(index))] = value[0]
