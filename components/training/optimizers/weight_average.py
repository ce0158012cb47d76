"""Exponential moving average (EMA) of the trained weights, sharded like them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from components.checkpoint.tensors import AVERAGE, AVERAGE_UPDATES, MODEL, Tensors, model_tensors
from components.config.schema.training import EvalWeights
from components.training.optimizers.gradients import local_tensor

_CHUNK_BYTES = 64 * 1024**2
"""Approximate bytes of the averages that are updated at a time: an update needs as much temporary memory."""


class WeightAverage:
    """Exponential moving average of a model's trained weights, in float32 or in their dtype if that is wider.

    After n applied updates the average is sum_i d^(n-i) w_i / sum_i d^(n-i) with decay d and the weights w_1 ... w_n
    after each update. Without the normalization the weights before training would dominate the first 1 / (1 - d)
    steps; Adam corrects its moments in the same way (Kingma and Ba 2015, section 3). Each rank averages its own shards,
    without communication.
    """

    def __init__(self, module: nn.Module, decay: float, evaluated: EvalWeights = EvalWeights.average) -> None:
        """Begin with the current weights of `module`, which must be sharded and loaded.

        Args:
            decay: Weight of the average relative to new weights, in (0, 1).
            evaluated: The weights that `training.evaluate` evaluates.
        """
        self.decay, self.evaluated = decay, evaluated
        self._module = module
        self._parameters = self._trained()
        self._averages: Tensors = {}
        for name, parameter in self._parameters.items():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._averages[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        device = next((each.device for each in self._parameters.values()), torch.device("cpu"))
        self._updates = torch.zeros((), dtype=torch.float64, device=device)
        self.restart()

    @property
    def tensors(self) -> Tensors:
        """This rank's shards of the average and the number of applied updates, by their names in a checkpoint."""
        return {AVERAGE + name: each for name, each in self._averages.items()} | {AVERAGE_UPDATES: self._updates}

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's shards of the average."""
        shards = [local_tensor(each) for each in self._averages.values()]
        return sum(shard.numel() * shard.element_size() for shard in shards)

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the current weights, which later updates do not count."""
        self._updates.zero_()
        for name, parameter in self._parameters.items():
            local_tensor(self._averages[name]).copy_(local_tensor(parameter))

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Add the current weights to the average, without effect if `skipped`, a scalar, is not 0.

        The decision is made on the device, so the host does not wait.
        """
        applied = 1 - skipped.to(self._updates).clamp(max=1)
        self._updates += applied
        # (1 - d) / (1 - d^n); expm1 is exact for decays near 1. The bound is reached at n = 1, and replaces n = 0.
        total = -torch.expm1(self._updates * math.log(self.decay))
        weight = applied * (1 - self.decay) / total.clamp(min=1 - self.decay)
        for averages, weights in self._chunks():
            change = torch._foreach_sub([each.to(averages[0].dtype) for each in weights], averages)
            torch._foreach_mul_(change, weight.to(averages[0].dtype))
            torch._foreach_add_(averages, change)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the module holds the averaged weights, cast to its dtypes.

        The trained weights are copied meanwhile, which takes the memory of the gradients that a step frees.
        """
        with torch.no_grad():
            self._trained()
            shards = {name: local_tensor(parameter) for name, parameter in self._parameters.items()}
            trained = {name: shard.clone() for name, shard in shards.items()}
            for name, shard in shards.items():
                shard.copy_(local_tensor(self._averages[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                self._trained()
                for name, shard in shards.items():
                    shard.copy_(trained[name])

    def _trained(self) -> Tensors:
        """Return the trained parameters by name.

        `model_tensors` makes FSDP2 reshard. A forward without a backward may leave parameters all-gathered, and the
        next forward would use these values although the shards have changed.
        """
        stored = model_tensors(self._module)
        return {name.removeprefix(MODEL): each for name, each in stored.items() if each.requires_grad}

    def _chunks(self) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Yield the local shards of averages of one dtype, _CHUNK_BYTES at a time, and those of their weights."""
        averages: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        size = 0
        for name, parameter in self._parameters.items():
            average = local_tensor(self._averages[name])
            if averages and (size > _CHUNK_BYTES or averages[0].dtype != average.dtype):
                yield averages, weights
                averages, weights, size = [], [], 0
            averages.append(average)
            weights.append(local_tensor(parameter.detach()))
            size += average.numel() * average.element_size()
        if averages:
            yield averages, weights
