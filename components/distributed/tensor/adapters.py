"""Tensor parallelism of linear layers with LoRA adapters.

The adapter is sharded like its layer and adds no collective to the forward. Column-wise, W and B are sharded by output
features and A is replicated; row-wise, W and A are sharded by input features, B is replicated, and one reduction sums
the outputs of layer and adapter. The gradient of the replicated matrix is a partial sum on each rank, which is summed
over tp once, when FSDP reduces gradients.

An adapted layer is a module with the parameters `lora_A`, `lora_B` and optionally `lora_magnitude_vector` besides
`weight` and `bias`, and a method `compute` that takes the input and these parameters as plain tensors. A packed
(quantized) weight has one row of bytes per output feature, and its input features are packed in groups of
`columns_together`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from components.config.errors import ConfigError
from components.distributed.tensor.tensor_parallel import (
    KVHeadSlice,
    ReplicatedParameters,
    TransformersStyle,
    as_replicated,
    distribute_parameters,
    redistribute,
)

NAMES = ("weight", "bias", "lora_A", "lora_B", "lora_magnitude_vector")
"""Parameters of an adapted layer, in the argument order of `compute`."""


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with a LoRA adapter."""
    return module._parameters.get("lora_A") is not None


def adapted_style(name: str, style: ParallelStyle) -> ParallelStyle:
    """Return the style that shards an adapted layer like `style` shards the layer without adapter.

    Raises ConfigError for a style without an adapted counterpart.
    """
    if isinstance(style, ReplicatedParameters):
        return style
    if isinstance(style, KVHeadSlice):
        return AdaptedKVHeadSlice(style.kv_heads)
    if (
        type(style) is ColwiseParallel
        and style.input_layouts == (Replicate(),)
        and style.output_layouts == (Shard(-1),)
    ):
        return AdaptedColwise()
    if type(style) is RowwiseParallel and style.input_layouts == (Shard(-1),):
        return AdaptedRowwise(name, style.output_layouts[0])
    kind = style.name if isinstance(style, TransformersStyle) else type(style).__name__
    raise ConfigError(
        f"parallelism.tp: {name} has an adapter, which its style ({kind}) cannot shard; leave it out of peft.targets, "
        "or set parallelism.tp=1"
    )


class AdaptedColwise(ParallelStyle):
    """Column-wise: each rank takes all input features and computes its shard of the output features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, [Shard(0)], {"lora_A": [Replicate()]})

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, in) -> (batch, seq, out / tp)
            hidden = as_replicated(hidden, device_mesh).to_local(grad_placements=[Partial()])
            return module.compute(hidden, *_local(module, partial=("lora_A",)))  # type: ignore[operator]

        module.forward = forward
        return module


class AdaptedRowwise(ParallelStyle):
    """Row-wise: each rank takes its shard of the input features; outputs are all-reduced or reduce-scattered."""

    def __init__(self, name: str, output_layout: Placement) -> None:
        super().__init__()
        self.name, self.output_layout = name, output_layout

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        inputs = _InputShard(device_mesh, module.lora_A.shape[1])
        columns = module.columns_together
        if inputs.features % (columns * device_mesh.size()):
            raise ConfigError(
                f"parallelism.tp={device_mesh.size()}: {self.name} has {inputs.features} inputs, which are quantized "
                f"{columns} at a time and cannot be divided evenly; change parallelism.tp, or set peft=lora"
            )
        distribute_parameters(module, device_mesh, by_name={"weight": [Shard(1)], "lora_A": [Shard(1)]})

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, in / tp) -> (batch, seq, out)
            weight, bias, *adapter = _local(module, partial=("lora_B", "lora_magnitude_vector"))
            partial_output = module.compute(hidden, weight, None, *adapter, inputs)
            output = redistribute(partial_output, device_mesh, Partial(), self.output_layout)
            return output if bias is None else output + bias

        module.forward = forward
        return module


class AdaptedKVHeadSlice(KVHeadSlice):
    """Key or value projection with fewer heads than tp ranks; each rank computes the one head it needs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh)
        head = device_mesh.get_local_rank() // (device_mesh.size() // self.kv_heads)

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, hidden) -> (batch, seq, head_dim)
            hidden = as_replicated(hidden, device_mesh).to_local(grad_placements=[Partial()])
            parameters = zip(NAMES, _local(module, partial=NAMES), strict=True)
            of_head = [
                each if each is None or name == "lora_A" else each.chunk(self.kv_heads)[head]
                for name, each in parameters
            ]
            return module.compute(hidden, *of_head)  # type: ignore[operator]

        module.forward = forward
        return module


@dataclass(frozen=True, slots=True)
class _InputShard:
    """Operations of `compute` that depend on all input features, for a layer with sharded ones."""

    mesh: DeviceMesh
    features: int
    """Global number of input features."""

    def dropout(self, hidden: torch.Tensor, probability: float) -> torch.Tensor:
        """Apply dropout to (..., features / tp) with the mask of an unsharded layer.

        tp ranks have equal random streams: each draws the mask for all features and takes its shard.
        """
        mask = F.dropout(hidden.new_ones(*hidden.shape[:-1], self.features), probability)
        return hidden * mask.chunk(self.mesh.size(), dim=-1)[self.mesh.get_local_rank()]

    def norms(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the norms of full weight rows, given those of this rank's column shard, (out,)."""
        return redistribute(norms.square(), self.mesh, Partial(), Replicate()).sqrt()


def _local(module: Any, partial: tuple[str, ...]) -> list[torch.Tensor | None]:
    """Return the local tensors of NAMES; gradients of those in `partial` are partial sums over the ranks."""
    local: list[torch.Tensor | None] = []
    parameters = (module.weight, module.bias, module.lora_A, module.lora_B, module.lora_magnitude_vector)
    for name, parameter in zip(NAMES, parameters, strict=True):
        if isinstance(parameter, DTensor):
            parameter = parameter.to_local(grad_placements=[Partial()] if name in partial else None)
        local.append(parameter)
    return local
