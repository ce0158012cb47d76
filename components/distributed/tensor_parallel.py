"""Parallel styles that torch does not have, also for parameters per attention head, and helpers for DTensors on tp.

Parameters are DTensors on the tp axis, so that FSDP2 and checkpoints can read their global shape. Together with torch's
ColwiseParallel and RowwiseParallel, the styles implement Megatron's tensor parallelism (Shoeybi et al. 2019) and
sequence parallelism (Korthikanti et al. 2022).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode

_HEAD_COUNTS = ("num_heads", "num_key_value_heads")
"""Attributes by which some attention modules count their heads; most families count them by the width instead."""


class ReplicatedParameters(ParallelStyle):
    """Replicated direct parameters; the module computes on plain tensors.

    `partial_grad=False`: all ranks have the same input, so their gradients are equal. `partial_grad=True`: each rank
    has its own heads or its own shard of the sequence, so gradients are summed over ranks: q_norm and k_norm of sharded
    heads, and every norm under sequence parallelism. Without the sum, such norms diverge between ranks although the
    loss looks normal.
    """

    def __init__(self, *, partial_grad: bool = False) -> None:
        super().__init__()
        self.partial_grad = partial_grad

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh)
        placement: Placement = Partial() if self.partial_grad else Replicate()
        compute = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with local_parameters(module, [placement]):
                return compute(*args, **kwargs)

        module.forward = forward
        return module


class KVHeadSlice(ParallelStyle):
    """Key or value projection with fewer heads than tp ranks; each rank computes the one head it needs.

    The weight is replicated. `tp / kv_heads` consecutive ranks use the same head, and their gradients are summed.
    """

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh)
        head = device_mesh.get_local_rank() // (device_mesh.size() // self.kv_heads)

        def this_head(parameter: torch.Tensor | None) -> torch.Tensor | None:
            if not isinstance(parameter, DTensor):
                return None
            return parameter.to_local(grad_placements=[Partial()]).chunk(self.kv_heads)[head]

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, hidden) -> (batch, seq, head_dim)
            hidden = as_replicated(hidden, device_mesh).to_local(grad_placements=[Partial()])
            weight = this_head(module.weight)  # type: ignore[arg-type]
            return F.linear(hidden, weight, this_head(module.bias))  # type: ignore[arg-type]

        module.forward = forward
        return module


class ReplicatedConvolution(ParallelStyle):
    """A token mixer whose forward reads the weight of its convolution `conv` instead of calling it; replicated."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        compute, convolution = module.forward, module.get_submodule("conv")

        def forward(*args: Any, **kwargs: Any) -> Any:
            with local_parameters(convolution, [Replicate()]):
                return compute(*args, **kwargs)

        module.forward = forward
        return module


class TransformersStyle(ParallelStyle):
    """A style from transformers' registry, for layouts that torch's styles do not cover (packed, MLA, MoE)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.config: Any = None
        """Model config, for styles that need more than the module (e.g. the split point of MLA's projection)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Imported from the module that fills the registry, which is empty before.
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        style = ALL_PARALLEL_STYLES[self.name]
        if self.config is not None:
            module.config = self.config
        for name, _ in list(module.named_parameters(recurse=False)):
            style.shard_param(module, name, device_mesh)
        if not any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            # MLA's style shards nothing. Plain parameters would seem to be different ones on each rank.
            parallelize_module(module, device_mesh, ReplicatedParameters(), src_data_rank=None)
        style.install_forward(module, device_mesh)
        return module


@contextmanager
def whole_sequences(models: Iterable[nn.Module]) -> Iterator[None]:
    """Within the context no module divides the sequence over tp, as for the single new tokens of generation.

    A style that divides it notes so in the attribute `shards_sequence` of its module, which its hooks read.
    """
    modules: list[Any] = [module for model in models for module in model.modules() if "shards_sequence" in vars(module)]
    for module in modules:
        module.shards_sequence = False
    try:
        yield
    finally:
        for module in modules:
            module.shards_sequence = True


class BlockInput(ParallelStyle):
    """Conversion of the hidden states that enter attention or an MLP.

    Args:
        sequence_parallel: The input is sharded along the sequence and is all-gathered; otherwise it is replicated.
        shared: Pass a DTensor to the projections inside, so that the input gradients of q, k and v (or gate and up) are
            summed over tp in one collective instead of one each. Requires that all of them support a DTensor input.
    """

    def __init__(self, *, sequence_parallel: bool, shared: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.shared = shared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.sequence_parallel:
            module.shards_sequence = True  # type: ignore[assignment]

        def enter(
            hidden: torch.Tensor,
        ) -> torch.Tensor:  # (batch, seq or seq / tp, hidden) -> (batch, seq, hidden)
            source = Shard(1) if self.sequence_parallel and module.shards_sequence else Replicate()
            gathered = DTensor.from_local(hidden, device_mesh, [source], run_check=False)
            gathered = gathered.redistribute(placements=[Replicate()])
            return gathered if self.shared else gathered.to_local()

        _convert_input(module, enter)
        return module


class RowwiseSequence(RowwiseParallel):
    """Row-wise linear layer whose output is reduce-scattered along the sequence."""

    def __init__(self, input_layouts: Placement) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=Shard(1))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.shards_sequence = True  # type: ignore[assignment]
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        layouts = output_layouts if mod.shards_sequence else (Replicate(),)
        return RowwiseParallel._prepare_output_fn(layouts, use_local_output, mod, outputs, device_mesh)


class ShardSequence(ParallelStyle):
    """Shard replicated hidden states along the sequence, at a module's input or output.

    Args:
        where: "input" or "output".
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.shards_sequence = True  # type: ignore[assignment]

        def shard(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, hidden) -> (batch, seq / tp, hidden)
            return redistribute(hidden, device_mesh, Replicate(), Shard(1)) if module.shards_sequence else hidden

        (_convert_input if self.where == "input" else convert_output)(module, shard)
        return module


class GatherSequence(ParallelStyle):
    """All-gather a module's output along the sequence: the end of the sequence-parallel region."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.shards_sequence = True  # type: ignore[assignment]

        def gather(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq / tp, hidden) -> (batch, seq, hidden)
            if not module.shards_sequence:
                return hidden
            return as_writable(redistribute(hidden, device_mesh, Shard(1), Replicate()))

        convert_output(module, gather)
        return module


class ShardedDropout(ParallelStyle):
    """Dropout of hidden states in a decoder layer under sequence parallelism.

    tp ranks have equal random streams, so each draws the mask of the full sequence and applies its shard: the same mask
    as tp without sequence parallelism. It is drawn in the layer's forward, so it can be recomputed and compiled.
    Dropout of full sequences and of attention weights inside the layer is not changed.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        compute, ranks, rank = module.forward, device_mesh.size(), device_mesh.get_local_rank()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return compute(*args, **kwargs)
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]  # (batch, seq / tp, hidden)
            with _SequenceShardDropout(hidden.shape[1], ranks, rank):
                return compute(*args, **kwargs)

        module.forward = forward
        return module


class _SequenceShardDropout(TorchFunctionMode):
    """Mode that replaces F.dropout of (batch, `tokens`, features): the mask is drawn for the tokens of all ranks.

    A function mode, because transformers' layers call F.dropout directly instead of a module that could be replaced.
    """

    def __init__(self, tokens: int, ranks: int, rank: int) -> None:
        super().__init__()
        self.tokens, self.ranks, self.rank = tokens, ranks, rank

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout and args[0].dim() == 3 and args[0].shape[1] == self.tokens:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(
        self, hidden: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            return hidden
        ones = hidden.new_ones(hidden.shape[0], self.tokens * self.ranks, hidden.shape[2])
        mask = (F.dropout(ones, p) != 0).chunk(self.ranks, dim=1)[self.rank]
        return hidden * mask / (1 - p)  # not times 1 / (1 - p), which bfloat16 would round


@contextmanager
def local_parameters(module: nn.Module, grad_placements: Sequence[Placement]) -> Iterator[None]:
    """Replace the module's direct DTensor parameters by their local tensors within the context.

    Args:
        grad_placements: Placements of the local gradients.
    """
    dtensors: dict[str, Any] = {name: value for name, value in module._parameters.items() if isinstance(value, DTensor)}
    plain: dict[str, Any] = {name: value.to_local(grad_placements=grad_placements) for name, value in dtensors.items()}
    module._parameters.update(plain)
    try:
        yield
    finally:
        module._parameters.update(dtensors)


def distribute_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Sequence[Placement] = (Replicate(),),
    by_name: Mapping[str, Sequence[Placement]] | None = None,
) -> None:
    """Make the module's direct parameters DTensors without communication: all ranks hold the same values.

    Args:
        placements: One placement per mesh dim.
        by_name: Parameter name -> placements that replace `placements`.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        dtensor = distribute_tensor(parameter.data, mesh, (by_name or {}).get(name, placements), src_data_rank=None)
        module.register_parameter(name, nn.Parameter(dtensor, requires_grad=parameter.requires_grad))


def as_replicated(tensor: torch.Tensor, device_mesh: DeviceMesh) -> DTensor:
    """Return a tensor with equal values on all ranks as a replicated DTensor; partial gradients are summed over tp."""
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, device_mesh, [Replicate()], run_check=False)


def redistribute(tensor: torch.Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> torch.Tensor:
    """Redistribute a plain tensor from one placement to another; its gradient is redistributed back."""
    return DTensor.from_local(tensor, mesh, [source], run_check=False).redistribute(placements=[target]).to_local()


def as_writable(output: torch.Tensor) -> torch.Tensor:
    """Return an alias of a local tensor from `DTensor.to_local` that the model may modify in place.

    `to_local` returns a view created in a custom autograd function. autograd rejects in-place operations on such a view
    (OLMo clamps its projections in place), and FSDP2 warns about a unit that returns one. The alias bypasses autograd's
    view tracking, so `output` must not be saved for the backward: it must come from a linear layer, an embedding or a
    collective.
    """
    return output if isinstance(output, DTensor) else torch.ops.aten._unsafe_view(output, output.shape)


def _convert_input(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Register a pre-hook that converts a module's `hidden_states` keyword, or else its first argument."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": convert(kwargs["hidden_states"])}
        return (convert(args[0]), *args[1:]), kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def convert_output(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Register a hook that converts a module's output, or its first item if it is a tuple."""

    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return (convert(output[0]), *output[1:]) if isinstance(output, tuple) else convert(output)

    module.register_forward_hook(hook)


class PerHead(ParallelStyle):
    """Direct parameters with one row per head, (heads, ...): attention sinks, and norms with weights for each head.

    Each rank computes with the rows of its heads. If there are fewer (kv) heads than ranks, the parameter is replicated
    and each rank takes the row of the one head it computes. Applied to an attention module, it also divides the
    module's _HEAD_COUNTS.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        for name in _HEAD_COUNTS:
            if isinstance(count := getattr(module, name, None), int):
                setattr(module, name, max(count // ranks, 1))
        sharded = {
            name: [Shard(0)] if parameter.shape[0] % ranks == 0 else [Replicate()]
            for name, parameter in module.named_parameters(recurse=False)
        }
        distribute_parameters(module, device_mesh, by_name=sharded)
        compute = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _rows_of_rank(module):
                return compute(*args, **kwargs)

        module.forward = forward
        return module


class PerHeadNorms(ParallelStyle):
    """A module with one nn.LayerNorm per head in the list `norms` (StableLM), applied to (batch, heads, seq, head_dim).

    The norms are replicated, and each rank applies those of its heads. All of them enter the forward, so that every
    rank has a gradient, possibly zero, of every norm, and the reductions over ranks match.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norms: Any = module.norms
        for norm in norms:
            distribute_parameters(norm, device_mesh)
        ranks, rank = device_mesh.size(), device_mesh.get_local_rank()

        def rows(name: str) -> torch.Tensor | None:  # (local heads, 1, head_dim)
            if norms[0]._parameters.get(name) is None:
                return None
            stacked = torch.stack([_local(norm._parameters[name], Partial()) for norm in norms])  # (heads, head_dim)
            return _chunk(stacked, ranks, rank)[:, None]

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, local heads, seq, head_dim)
            normalized = F.layer_norm(hidden, norms[0].normalized_shape, eps=norms[0].eps)
            weight, bias = rows("weight"), rows("bias")
            normalized = normalized if weight is None else normalized * weight.to(hidden.dtype)
            return normalized if bias is None else normalized + bias.to(hidden.dtype)

        module.forward = forward
        return module


@contextmanager
def _rows_of_rank(module: nn.Module) -> Iterator[None]:
    """Replace the module's direct parameters by the rows of this rank's heads within the context."""
    stored: dict[str, Any] = dict(module._parameters)
    local: dict[str, Any] = {}
    for name, parameter in stored.items():
        if isinstance(parameter, DTensor):
            mesh, placement = parameter.device_mesh, parameter.placements[0]
            local[name] = _local(parameter, placement if placement.is_shard() else Partial())
            if placement.is_replicate():
                local[name] = _chunk(local[name], mesh.size(), mesh.get_local_rank())
    module._parameters.update(local)
    try:
        yield
    finally:
        module._parameters.update(stored)


def _local(parameter: Any, gradient: Any) -> torch.Tensor:
    return parameter.to_local(grad_placements=[gradient]) if isinstance(parameter, DTensor) else parameter


def _chunk(rows: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return the rows of a rank's heads, (heads, ...) -> (heads / ranks or 1, ...)."""
    heads = rows.shape[0]
    return rows.chunk(ranks)[rank] if heads >= ranks else rows[rank // (ranks // heads)][None]


def with_heads(module: nn.Module, first: int, query: torch.Tensor, key: torch.Tensor) -> nn.Module:
    """Return a copy of an attention module with the heads of `query` (batch, heads, seq, head_dim) from `first` on."""
    heads, local = query.shape[1], copy.copy(module)
    # Its own parameters (sinks) have one row per query head; key may have fewer heads.
    rows: dict[str, Any] = {name: each[first : first + heads] for name, each in module.named_parameters(recurse=False)}
    local._parameters = {**module._parameters, **rows}
    local.num_key_value_groups = heads // key.shape[1]  # type: ignore[assignment]
    return local
