"""Expert parallelism: each rank holds some experts of every layer, and tokens travel to the experts they chose.

For every model of transformers whose experts are one module with fused parameters, (experts, ...) each, and the
forward `(hidden_states, top_k_index, top_k_weights)`. Dispatch and combine follow GShard (Lepikhin et al. 2020), with
uneven splits in place of a capacity: no token is dropped. The experts' own forward computes, whichever
implementation transformers chose for it, on rows that each name one local expert.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from components.config.errors import ConfigError
from components.distributed.mesh import share_timeout
from components.distributed.tensor.tensor_parallel import as_writable, local_parameters, redistribute
from components.models.anatomy import Anatomy, is_experts


class ExpertParallel(ParallelStyle):
    """Whole experts on the ranks of a mesh: `ep`, an axis whose ranks see the same tokens (tp), or both in this order.

    tp ranks each send an equal part of their tokens, and the results are put together again. Where ep x tp does not
    divide the experts, tp ranks hold the same experts and only share the tokens. A module that is no experts module,
    or is laid out already, is left as it is.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not is_experts(module) or is_laid_out(module):
            return module
        placements = _placements(device_mesh, _count(module))
        divided = _divided_over(device_mesh, placements)
        shared = next((device_mesh[axis] for axis in _axes(device_mesh) if axis != "ep"), None)
        held = _count(module) // (divided.size() if divided is not None else 1)
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.data, device_mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.num_experts = held  # type: ignore[assignment]
        compute, gradients = module.forward, _gradients(placements)

        # (tokens, hidden), (tokens, top_k), (tokens, top_k) -> (tokens, hidden)
        def forward(hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
            tokens = [hidden, top_k_index, top_k_weights]
            if shared is not None:
                tokens = [redistribute(each, shared, Replicate(), Shard(0)) for each in tokens]
            with local_parameters(module, gradients):
                answers = _Dispatch(module, compute, held, divided)(*tokens)
            return answers if shared is None else _gather_tokens(answers, len(hidden), shared)

        # How many rows travel is known only when they do: no compiler can trace it.
        module.forward = torch.compiler.disable(forward)
        return module


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, anatomy: Anatomy) -> tuple[str, ...]:
    """Lay every experts module of a model over `mesh` in place; return what a person should know.

    Args:
        model: On the meta device, or with the same values on every rank.
        mesh: Of the axes `ep`, `tp`, or both in this order. Ranks of `ep` bring samples of their own.

    Raises ConfigError for a model without such a module and where ep does not divide its experts.
    """
    found = anatomy.parts(model, anatomy.experts)
    kind, ep = type(model).__name__, dict(zip(_axes(mesh), mesh.shape, strict=True)).get("ep", 1)
    if not found:
        raise ConfigError(
            f"parallelism.ep={ep}: {kind} is dense, or keeps its experts apart: it has no module of fused experts to "
            "shard; set parallelism.ep=1"
        )
    counts = sorted({_count(module) for module in found.values()})
    problems = [
        f"parallelism.ep={ep}: does not divide the {count} experts of {kind}; change parallelism.ep"
        for count in counts
        if count % ep
    ]
    problems += [
        f"parallelism.ep={ep}: {name} of {kind} holds parameters that are no experts ({', '.join(foreign)}), which "
        "cannot be laid out yet; set parallelism.ep=1 and parallelism.tp=1"
        for name, module in found.items()
        if (foreign := _foreign_parameters(module))
    ]
    untold = next((name for name, module in found.items() if not _takes_choices(module)), None)
    if untold is not None:
        problems.append(
            f"parallelism.ep={ep}: {untold} of {kind} is not told which experts each token chose, so that tokens "
            "cannot travel to them; set parallelism.ep=1 and parallelism.tp=1"
        )
    if problems:
        raise ConfigError(problems)
    for module in found.values():
        ExpertParallel()._apply(module, mesh)
    return tuple(
        f"the {mesh.size() // ep} tp ranks hold the same experts: ep x tp = {mesh.size()} does not divide the {count}"
        for count in counts
        if count % mesh.size()
    )


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of fused experts by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def is_laid_out(module: nn.Module) -> bool:
    """Whether a module's own parameters lie on a mesh already."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))


def _count(module: nn.Module) -> int:
    """The number of experts on all ranks."""
    return next(module.parameters(recurse=False)).shape[0]


def _foreign_parameters(module: nn.Module) -> list[str]:
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return [name for name, _ in module.named_parameters() if name not in own]


def _takes_choices(module: nn.Module) -> bool:
    """Whether a module's forward takes hidden states, the chosen experts and their weights."""
    given = [each.kind for each in inspect.signature(type(module).forward).parameters.values()]
    return len(given) > 3 or inspect.Parameter.VAR_POSITIONAL in given


def _axes(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _placements(mesh: DeviceMesh, experts: int) -> list[Placement]:
    """Experts are sharded over every axis; over tp only where that leaves each rank the same number."""
    even = experts % mesh.size() == 0
    return [Shard(0) if axis == "ep" or even else Replicate() for axis in _axes(mesh)]


def _gradients(placements: list[Placement]) -> list[Placement]:
    """Of experts that tp ranks share, each rank has the gradient of its own tokens."""
    return [Partial() if placement.is_replicate() else placement for placement in placements]


def _divided_over(mesh: DeviceMesh, placements: list[Placement]) -> DeviceMesh | None:
    """The ranks among which the experts are divided, as a 1-D mesh; None where each holds them all."""
    axes = [axis for axis, placement in zip(_axes(mesh), placements, strict=True) if placement.is_shard()]
    if len(axes) == 2:
        flat = mesh._flatten("ep_tp")
        share_timeout(flat.get_group())
        return flat
    return mesh[axes[0]] if axes else None


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """The way of the tokens of this rank to their experts and back."""

    module: nn.Module
    compute: Callable[..., torch.Tensor]
    """The module's own forward, which takes the numbers of local experts."""
    held: int
    """Experts on each rank."""
    divided: DeviceMesh | None
    """The ranks that have other experts; its group is asked for at each call, because one kept here would outlive the
    end of the processes."""

    # (tokens, hidden), (tokens, top_k), (tokens, top_k) -> (tokens, hidden)
    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Send each token to the experts it chose, and sum what comes back by the router's weights."""
        group = None if self.divided is None else self.divided.get_group()
        ranks = 1 if self.divided is None else self.divided.size()
        experts, order = chosen.reshape(-1).sort(stable=True)  # rank r holds the r-th part of the numbers
        counts = torch.zeros(ranks * self.held, dtype=torch.int64, device=hidden.device)
        counts = counts.scatter_add_(0, experts, torch.ones_like(experts)).view(ranks, self.held)
        arriving = counts
        if group is not None:
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts, group=group)
        # The host must know how many rows go where: the one place where a step waits for the device.
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        rows = _exchange(hidden[order // chosen.shape[1]], sent, received, group)  # (rows, hidden)
        local = torch.arange(self.held, device=hidden.device).repeat(ranks)
        local = local.repeat_interleave(arriving.view(-1), output_size=len(rows))
        answers = _exchange(self._compute(rows, local), received, sent, group)  # (tokens x top_k, hidden)
        slots = torch.empty_like(answers).index_copy(0, order, answers).view(*chosen.shape, answers.shape[1])
        return (slots * weights[..., None]).sum(dim=1).to(hidden.dtype)

    def _compute(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if len(rows) == 0:
            # Parameters without a gradient would leave this rank out of FSDP's reduction, where the others wait.
            nothing = torch.stack([parameter.sum() for parameter in self.module.parameters()]).sum()
            return rows + nothing.to(rows.dtype)
        return self.compute(rows, local[:, None], torch.ones_like(rows[:, :1]))


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
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Exchange.apply(grad, *ctx.way_back), None, None, None


def _exchange(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    return rows if group is None else _Exchange.apply(rows, sent, received, group)


def _gather_tokens(part: torch.Tensor, tokens: int, tp: DeviceMesh) -> torch.Tensor:
    """Give every tp rank the results of all its tokens; parts may be uneven or empty."""
    shape = torch.Size((tokens, part.shape[1]))
    whole = DTensor.from_local(part, tp, [Shard(0)], run_check=False, shape=shape, stride=(part.shape[1], 1))
    return as_writable(whole.redistribute(placements=[Replicate()]).to_local())
