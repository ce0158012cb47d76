"""Expert parallelism: each rank holds some experts of every layer, and tokens travel to the experts they chose.

For every model of transformers whose experts are one module with fused parameters, (experts, ...) each, and the
forward `(hidden_states, top_k_index, top_k_weights)`. Dispatch and combine follow GShard (Lepikhin et al. 2020), with
uneven splits in place of a capacity: no token is dropped. The experts' own forward computes, whichever
implementation transformers chose for it, on rows that each name one local expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from components.config.errors import ConfigError
from components.distributed.tensor_parallel import local_parameters, redistribute


class ExpertParallel(ParallelStyle):
    """Whole experts on the ranks of a mesh of `ep`, of `tp`, or of both; a module that is laid out already is left.

    tp ranks see the same tokens: each sends an equal part of them, and the results are put together again. Where ep x
    tp does not divide the experts, tp ranks hold the same experts and only share the tokens.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not is_experts(module) or is_laid_out(module):
            return module
        tp = device_mesh["tp"] if "tp" in (device_mesh.mesh_dim_names or ()) else None
        placements = _placements(device_mesh, _count(module))
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.data, device_mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        divided = _divided_over(device_mesh, placements)
        module.num_experts = _count(module) // (divided.size() if divided is not None else 1)
        compute, gradients = module.forward, _gradients(placements)

        # (tokens, hidden), (tokens, top_k), (tokens, top_k) -> (tokens, hidden)
        def forward(
            hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            # Asked for at each call: a group that is kept would outlive the end of the processes.
            group = None if divided is None else divided.get_group()
            with local_parameters(module, gradients):
                if tp is None:
                    return _send_and_compute(module, compute, group, hidden_states, top_k_index, top_k_weights)
                whole = (hidden_states, top_k_index, top_k_weights)
                mine = [redistribute(each, tp, Replicate(), Shard(0)) for each in whole]
                return _gather_tokens(_send_and_compute(module, compute, group, *mine), len(hidden_states), tp)

        module.forward = forward
        return module


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> tuple[str, ...]:
    """Lay every experts module of a model over `mesh` in place; return what a person should know.

    Args:
        model: On the meta device, or with the same values on every rank.
        mesh: Of the axes `ep`, `tp`, or both in this order. Ranks of `ep` bring samples of their own.

    Raises ConfigError for a model without such a module and where ep does not divide its experts.
    """
    found = experts_modules(model)
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if not found:
        raise ConfigError(
            f"parallelism.ep={sizes.get('ep', 1)}: {type(model).__name__} is dense, or keeps its experts apart: it has no "
            "module of fused experts to shard; set parallelism.ep=1"
        )
    counts = sorted({_count(module) for module in found.values()})
    problems = [
        f"parallelism.ep={sizes['ep']}: does not divide the {count} experts of {type(model).__name__}; change "
        "parallelism.ep"
        for count in counts
        if count % sizes.get("ep", 1)
    ]
    problems += [
        f"parallelism.ep: {name} of {type(model).__name__} holds parameters that are no experts ({', '.join(foreign)}); "
        "set parallelism.ep=1"
        for name, module in found.items()
        if (foreign := _foreign_parameters(module))
    ]
    if problems:
        raise ConfigError(problems)
    for module in found.values():
        ExpertParallel()._apply(module, mesh)
    degree = mesh.size()
    return tuple(
        f"each of the {sizes['tp']} tp ranks holds the same experts: ep x tp = {degree} does not divide the {count}"
        for count in counts
        if count % degree
    )


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of fused experts by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def is_experts(module: nn.Module) -> bool:
    """Whether a module counts its experts and holds matrices of all of them, (experts, ..., ...), as parameters."""
    own = list(module.parameters(recurse=False))
    counted = isinstance(getattr(module, "num_experts", None), int)
    return counted and any(each.dim() == 3 for each in own) and len({each.shape[0] for each in own}) == 1


def is_laid_out(module: nn.Module) -> bool:
    """Whether a module's own parameters lie on a mesh already."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))


def _count(module: nn.Module) -> int:
    """The number of experts on all ranks."""
    return next(module.parameters(recurse=False)).shape[0]


def _foreign_parameters(module: nn.Module) -> list[str]:
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return [name for name, _ in module.named_parameters() if name not in own]


def _placements(mesh: DeviceMesh, experts: int) -> list[Placement]:
    """Experts are sharded over every axis; over tp only where that leaves each rank the same number."""
    even = experts % mesh.size() == 0
    return [Replicate() if name == "tp" and not even else Shard(0) for name in mesh.mesh_dim_names or ()]


def _gradients(placements: list[Placement]) -> list[Placement]:
    """Of experts that tp ranks share, each rank has the gradient of its own tokens."""
    return [Partial() if placement.is_replicate() else placement for placement in placements]


def _divided_over(mesh: DeviceMesh, placements: list[Placement]) -> DeviceMesh | None:
    """The ranks among which the experts are divided, as a 1-D mesh; None where each holds them all."""
    axes = [axis for axis, place in zip(mesh.mesh_dim_names or (), placements, strict=True) if place.is_shard()]
    if len(axes) == 2:
        return mesh._flatten("ep_tp")
    return mesh[axes[0]] if axes else None


def _send_and_compute(
    module: nn.Module,
    compute: Callable[..., torch.Tensor],
    group: dist.ProcessGroup | None,
    hidden: torch.Tensor,  # (tokens, hidden)
    chosen: torch.Tensor,  # (tokens, top_k), numbers of experts
    weights: torch.Tensor,  # (tokens, top_k)
) -> torch.Tensor:  # (tokens, hidden)
    """Send each token to the experts it chose, and sum what comes back by the router's weights."""
    ranks = dist.get_world_size(group) if group else 1
    experts, order = chosen.reshape(-1).sort(stable=True)  # rank r holds the r-th part of the numbers
    counts = torch.zeros(ranks * module.num_experts, dtype=torch.int64, device=hidden.device)
    counts = counts.scatter_add_(0, experts, torch.ones_like(experts)).view(ranks, -1)  # (ranks, local experts)
    arriving = counts
    if group is not None:
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
    # The host must know how many rows go where: the one place where a step waits for the device.
    sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
    rows = _exchange(hidden[order // chosen.shape[1]], sent, received, group)  # (rows, hidden)
    local = torch.arange(module.num_experts, device=hidden.device).repeat(ranks)
    local = local.repeat_interleave(arriving.view(-1), output_size=len(rows))
    answers = _exchange(_compute(module, compute, rows, local), received, sent, group)  # (tokens x top_k, hidden)
    slots = torch.empty_like(answers).index_copy(0, order, answers).view(*chosen.shape, answers.shape[1])
    return (slots * weights[..., None]).sum(dim=1).to(hidden.dtype)


def _compute(
    module: nn.Module, compute: Callable[..., torch.Tensor], rows: torch.Tensor, local: torch.Tensor
) -> torch.Tensor:
    if len(rows) == 0:
        # Parameters without a gradient would leave this rank out of FSDP's reduction, where the others wait for it.
        return rows + sum(parameter.sum() for parameter in module.parameters()).to(rows.dtype)
    return compute(rows, local[:, None], torch.ones_like(rows[:, :1]))


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, the first `sent[0]` to the first; gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way_back = (received, sent, group)
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _Exchange.apply(grad, *ctx.way_back), None, None, None


def _exchange(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    return rows if group is None else _Exchange.apply(rows, sent, received, group)  # type: ignore[no-any-return]


def _gather_tokens(part: torch.Tensor, tokens: int, tp: DeviceMesh) -> torch.Tensor:
    """Give every tp rank the results of all its tokens; parts may be uneven or empty."""
    shape = torch.Size((tokens, part.shape[1]))
    whole = DTensor.from_local(part, tp, [Shard(0)], run_check=False, shape=shape, stride=(part.shape[1], 1))
    return whole.redistribute(placements=[Replicate()]).to_local()
