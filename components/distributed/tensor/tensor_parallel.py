"""Parallel styles that torch does not have: what a module does at the border between tp ranks.

Parameters are DTensors on the tp axis, so that FSDP2 and checkpoints know their global shape; each style says how a
module's local computation relates to them. With torch's ColwiseParallel and RowwiseParallel they cover Megatron's
scheme (Shoeybi et al. 2019) and its sequence parallelism (Korthikanti et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode


class ReplicatedParameters(ParallelStyle):
    """Every tp rank holds the module's own parameters whole and computes with them on plain tensors.

    `partial_grad=False`: all ranks see the same input, so their gradients are equal. `partial_grad=True`: each rank
    sees its own heads or its own part of the sequence, so the gradient is the sum over ranks: q_norm and k_norm of
    sharded heads, and every norm under sequence parallelism. Left out, such norms drift apart rank by rank while the
    loss looks fine.
    """

    def __init__(self, *, partial_grad: bool = False) -> None:
        super().__init__()
        self.partial_grad = partial_grad

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate_parameters(module, device_mesh)
        placement: Placement = Partial() if self.partial_grad else Replicate()
        compute = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with local_parameters(module, [placement]):
                return compute(*args, **kwargs)

        module.forward = forward
        return module


class KVHeadSlice(ParallelStyle):
    """A key or value projection with fewer heads than tp ranks: each rank computes the one head that it needs.

    The weight is replicated; `tp / kv_heads` neighbouring ranks share a head, and its gradient is their sum.
    """

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate_parameters(module, device_mesh)
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


class TransformersStyle(ParallelStyle):
    """A style of transformers' own registry, for layouts that torch's styles do not have (packed, MLA, MoE)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.config: Any = None
        """The model's, for styles that must know more than the module (where MLA's projection is split)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # The registry is empty until this module, which fills it, is imported.
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        style = ALL_PARALLEL_STYLES[self.name]
        if self.config is not None:
            module.config = self.config
        for name, _ in list(module.named_parameters(recurse=False)):
            style.shard_param(module, name, device_mesh)
        style.install_forward(module, device_mesh)
        return module


class BlockInput(ParallelStyle):
    """The border where hidden states enter attention or an MLP.

    Args:
        sequence_parallel: The input is this rank's part of the sequence and is gathered; else every rank has it all.
        shared: The projections inside take a DTensor, so that the gradients of q, k and v (or gate and up) are summed
            over tp in one collective instead of one each. Only where every consumer is a known sharded style.
    """

    def __init__(self, *, sequence_parallel: bool, shared: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.shared = shared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(
            hidden: torch.Tensor,
        ) -> torch.Tensor:  # (batch, seq or seq / tp, hidden) -> (batch, seq, hidden)
            source = Shard(1) if self.sequence_parallel else Replicate()
            whole = DTensor.from_local(hidden, device_mesh, [source], run_check=False)
            whole = whole.redistribute(placements=[Replicate()])
            return whole if self.shared else whole.to_local()

        convert_input(module, enter)
        return module


class ShardSequence(ParallelStyle):
    """Cut hidden states that every tp rank has along the sequence: `where` is the module's input or its output."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, hidden) -> (batch, seq / tp, hidden)
            return redistribute(hidden, device_mesh, Replicate(), Shard(1))

        (convert_input if self.where == "input" else convert_output)(module, cut)
        return module


class GatherSequence(ParallelStyle):
    """Give every tp rank the whole sequence of the module's output: the end of the sequence-parallel region."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq / tp, hidden) -> (batch, seq, hidden)
            return as_writable(redistribute(hidden, device_mesh, Shard(1), Replicate()))

        convert_output(module, gather)
        return module


class ShardedDropout(ParallelStyle):
    """A decoder layer of which each tp rank has a part of the sequence: no two parts drop alike.

    tp ranks draw equal random numbers, so each draws for the whole sequence and takes its own part of the mask, which
    is then the mask of tp without sequence parallelism. The mask is drawn in the layer's forward, so it can be
    recomputed and compiled. Dropout of whole sequences and of attention weights inside the layer is left as it is.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        compute, ranks, rank = module.forward, device_mesh.size(), device_mesh.get_local_rank()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return compute(*args, **kwargs)
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]  # (batch, seq / tp, hidden)
            with _DropoutOfShards(hidden.shape[1], ranks, rank):
                return compute(*args, **kwargs)

        module.forward = forward
        return module


class _DropoutOfShards(TorchFunctionMode):
    """Replaces `dropout` of (batch, `tokens`, features) by one whose mask is drawn for the tokens of all ranks."""

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
        whole = hidden.new_ones(hidden.shape[0], self.tokens * self.ranks, hidden.shape[2])
        kept = (F.dropout(whole, p) != 0).chunk(self.ranks, dim=1)[self.rank]
        return hidden * kept / (1 - p)  # not times 1 / (1 - p), which bfloat16 would round


@contextmanager
def local_parameters(module: nn.Module, grad_placements: Sequence[Placement]) -> Iterator[None]:
    """Within the context the module's own DTensor parameters are plain tensors with gradients of these placements."""
    own: dict[str, Any] = {name: value for name, value in module._parameters.items() if isinstance(value, DTensor)}
    plain: dict[str, Any] = {name: value.to_local(grad_placements=grad_placements) for name, value in own.items()}
    module._parameters.update(plain)
    try:
        yield
    finally:
        module._parameters.update(own)


def replicate_parameters(module: nn.Module, device_mesh: DeviceMesh) -> None:
    """Make the module's own parameters replicated DTensors; every rank already holds the same values."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.data, device_mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def as_replicated(tensor: torch.Tensor, device_mesh: DeviceMesh) -> DTensor:
    """Return `tensor`, the same on every rank, as a DTensor (whose partial gradients are summed over ranks)."""
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, device_mesh, [Replicate()], run_check=False)


def redistribute(tensor: torch.Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> torch.Tensor:
    """Move a plain tensor from one layout over the ranks to another; the gradient takes the way back."""
    return DTensor.from_local(tensor, mesh, [source], run_check=False).redistribute(placements=[target]).to_local()


def as_writable(output: torch.Tensor) -> torch.Tensor:
    """Return a tensor that left a DTensor as one that the model may change in place.

    `DTensor.to_local` returns a view made inside a custom function. autograd refuses to change such a view in place
    (OLMo clamps its projections so), and FSDP2 warns about a unit that returns one. The alias returned here is no view,
    so nothing may have saved `output` for the backward: it is what a linear layer, an embedding or a collective made.
    """
    return output if isinstance(output, DTensor) else torch.ops.aten._unsafe_view(output, output.shape)


def convert_input(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Convert the hidden states that enter `module`: its `hidden_states` keyword or its first argument."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": convert(kwargs["hidden_states"])}
        return (convert(args[0]), *args[1:]), kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def convert_output(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Convert the hidden states that leave `module`: its output or the first item of it."""

    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return (convert(output[0]), *output[1:]) if isinstance(output, tuple) else convert(output)

    module.register_forward_hook(hook)


def sharded_fraction(parameters: list[torch.Tensor]) -> float:
    """Return which part of the elements of `parameters` is sharded over the (innermost) tp axis."""
    total = sum(math.prod(parameter.shape) for parameter in parameters)
    sharded = sum(
        math.prod(parameter.shape)
        for parameter in parameters
        if isinstance(parameter, DTensor) and not parameter.placements[-1].is_replicate()
    )
    return sharded / total if total else 0.0
