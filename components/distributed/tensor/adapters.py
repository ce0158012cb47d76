"""Tensor parallelism of layers with LoRA adapters.

The adapter follows its layer, and costs no collective in the forward. Column-wise, W and B are cut by outputs and A is
whole; row-wise, W and A are cut by inputs, B is whole, and what both give is summed over tp at once. Either way, the
gradient of the whole matrix is a partial sum on each rank, summed once, when FSDP reduces it. An adapted layer is any
module with parameters `lora_A`, `lora_B` and maybe `lora_magnitude_vector` beside `weight` and `bias`, and a method
`compute` that takes its input and these as plain tensors. A packed weight has a row for every output and, `compute`
knows how, bytes for its columns, so many of them together (`columns_together`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from components.config.errors import ConfigError
from components.distributed.tensor.tensor_parallel import (
    KVHeadSlice,
    ReplicatedParameters,
    TransformersStyle,
    as_replicated,
    redistribute,
)

NAMES = ("weight", "bias", "lora_A", "lora_B", "lora_magnitude_vector")
"""Parameters of an adapted layer, in the order in which `compute` takes them."""


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a linear layer with an adapter."""
    return module._parameters.get("lora_A") is not None


def adapted_style(name: str, style: ParallelStyle) -> ParallelStyle:
    """Return the style that lays an adapted layer out as `style` would the layer alone.

    Raises ConfigError for a style whose split of the weight is not known.
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
        f"parallelism.tp: {name} has an adapter, and its plan ({kind}) does not tell how to cut one; leave it out of "
        "peft.targets, or set parallelism.tp=1"
    )


class AdaptedColwise(ParallelStyle):
    """Each rank has all inputs and computes its part of the outputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _lay_out(module, device_mesh, {"lora_A": Replicate()}, other=Shard(0))

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, in) -> (batch, seq, out / tp)
            hidden = as_replicated(hidden, device_mesh).to_local(grad_placements=[Partial()])
            return module.compute(hidden, *_local(module, partial=("lora_A",)))  # type: ignore[operator]

        module.forward = forward
        return module


class AdaptedRowwise(ParallelStyle):
    """Each rank has its part of the inputs, and the outputs are summed, or summed and cut along the sequence."""

    def __init__(self, name: str, output_layout: Placement) -> None:
        super().__init__()
        self.name, self.output_layout = name, output_layout

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        inputs = _InputsShard(device_mesh, module.lora_A.shape[1])
        together = module.columns_together
        if inputs.features % (together * device_mesh.size()):
            raise ConfigError(
                f"parallelism.tp={device_mesh.size()}: {self.name} has {inputs.features} inputs, which are quantised "
                f"{together} at a time and so cannot be shared evenly; change parallelism.tp, or set peft=lora"
            )
        _lay_out(module, device_mesh, {"weight": Shard(1), "lora_A": Shard(1)}, other=Replicate())

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, in / tp) -> (batch, seq, out)
            weight, bias, *adapter = _local(module, partial=("lora_B", "lora_magnitude_vector"))
            part = module.compute(hidden, weight, None, *adapter, inputs)
            whole = redistribute(part, device_mesh, Partial(), self.output_layout)
            return whole if bias is None else whole + bias

        module.forward = forward
        return module


class AdaptedKVHeadSlice(KVHeadSlice):
    """A key or value projection with fewer heads than ranks: each computes the one head that it needs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _lay_out(module, device_mesh, {}, other=Replicate())
        head = device_mesh.get_local_rank() // (device_mesh.size() // self.kv_heads)

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, hidden) -> (batch, seq, head_dim)
            hidden = as_replicated(hidden, device_mesh).to_local(grad_placements=[Partial()])
            parts = zip(NAMES, _local(module, partial=NAMES), strict=True)
            cut = [
                part if part is None or name == "lora_A" else part.chunk(self.kv_heads)[head] for name, part in parts
            ]
            return module.compute(hidden, *cut)  # type: ignore[operator]

        module.forward = forward
        return module


@dataclass(frozen=True, slots=True)
class _InputsShard:
    """This rank's part of a layer's inputs."""

    mesh: DeviceMesh
    features: int
    """Inputs of all ranks."""

    def dropout(self, hidden: torch.Tensor, probability: float) -> torch.Tensor:
        """Drop out of (..., inputs of this rank) what one process would drop.

        tp ranks draw alike: each draws for all inputs and takes its part, so that no two parts drop alike.
        """
        kept = F.dropout(hidden.new_ones(*hidden.shape[:-1], self.features), probability)
        return hidden * kept.chunk(self.mesh.size(), dim=-1)[self.mesh.get_local_rank()]

    def norms(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the norms of whole rows, given those of this rank's part of them, (out,)."""
        return redistribute(norms.square(), self.mesh, Partial(), Replicate()).sqrt()


def _lay_out(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement], *, other: Placement) -> None:
    """Make the module's parameters DTensors; every rank already holds the same values."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter.data, mesh, [placements.get(name, other)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def _local(module: Any, partial: tuple[str, ...]) -> list[torch.Tensor | None]:
    """This rank's parts of NAMES; gradients of those in `partial` are to be summed over the ranks."""
    parts: list[torch.Tensor | None] = []
    held = (module.weight, module.bias, module.lora_A, module.lora_B, module.lora_magnitude_vector)
    for name, parameter in zip(NAMES, held, strict=True):
        if isinstance(parameter, DTensor):
            parameter = parameter.to_local(grad_placements=[Partial()] if name in partial else None)
        parts.append(parameter)
    return parts
