"""Expert parallelism: the experts of each layer are sharded over ranks, and tokens are sent to their experts.

Supports transformers models whose experts are one module with fused parameters (experts, ...) and the forward
`(hidden_states, top_k_index, top_k_weights)`. Dispatch and combine follow GShard (Lepikhin et al. 2020), with uneven
all-to-all splits instead of a capacity, so that no token is dropped. Local experts run the module's original forward,
in whichever implementation transformers selected, with each row routed to one local expert.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from components.distributed.mesh import share_timeout
from components.distributed.tensor_parallel import as_writable, distribute_parameters, local_parameters, redistribute
from components.models.anatomy import Anatomy, is_experts
from components.protocol.errors import ConfigError


class ExpertParallel(ParallelStyle):
    """Shard fused experts along the expert dim over a mesh with the axes `ep`, `tp`, or both in this order.

    tp ranks hold the same tokens: each dispatches an equal share of them, and the results are all-gathered over tp. If
    ep x tp does not divide the number of experts, the experts are replicated over tp, which then only splits the
    tokens. Modules other than experts, and experts that are sharded already, are left unchanged.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not is_experts(module) or holds_dtensors(module):
            return module
        placements = _placements(device_mesh, _num_experts(module))
        experts_mesh = _divided_over(device_mesh, placements)
        tokens_mesh = next((device_mesh[axis] for axis in _axes(device_mesh) if axis != "ep"), None)
        num_local = _num_experts(module) // (experts_mesh.size() if experts_mesh is not None else 1)
        distribute_parameters(module, device_mesh, placements)
        module.num_experts = num_local  # type: ignore[assignment]
        compute, gradients = module.forward, _gradients(placements)

        # (tokens, hidden), (tokens, top_k), (tokens, top_k) -> (tokens, hidden)
        def forward(hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
            tokens = [hidden, top_k_index, top_k_weights]
            if tokens_mesh is not None:
                tokens = [redistribute(token, tokens_mesh, Replicate(), Shard(0)) for token in tokens]
            with local_parameters(module, gradients):
                outputs = _Dispatch(module, compute, num_local, experts_mesh)(*tokens)
            return outputs if tokens_mesh is None else _gather_tokens(outputs, len(hidden), tokens_mesh)

        # Not compiled: the all-to-all split sizes depend on the routing, so the compiler cannot trace the forward.
        module.forward = torch.compiler.disable(forward)
        return module


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, anatomy: Anatomy) -> tuple[str, ...]:
    """Shard every experts module of a model over `mesh` in place; return notes for the banner.

    Args:
        model: On the meta device, or with the same values on every rank.
        mesh: Mesh with the axes `ep`, `tp`, or both in this order. Ranks along `ep` hold different samples.

    Raises ConfigError for a model without fused experts, or if ep does not divide their number.
    """
    modules = anatomy.parts(model, anatomy.experts)
    kind, ep = type(model).__name__, dict(zip(_axes(mesh), mesh.shape, strict=True)).get("ep", 1)
    if not modules:
        raise ConfigError(
            f"parallelism.ep={ep}: {kind} is dense, or its experts are separate modules; ep requires fused expert "
            "weights; set parallelism.ep=1"
        )
    counts = sorted({_num_experts(module) for module in modules.values()})
    problems = [
        f"parallelism.ep={ep}: does not divide the {count} experts of {kind}; change parallelism.ep"
        for count in counts
        if count % ep
    ]
    problems += [
        f"parallelism.ep={ep}: {name} of {kind} has parameters besides the experts ({', '.join(nested)}), which "
        "cannot be sharded yet; set parallelism.ep=1 and parallelism.tp=1"
        for name, module in modules.items()
        if (nested := _nested_parameters(module))
    ]
    unrouted = next((name for name, module in modules.items() if not takes_routing(module)), None)
    if unrouted is not None:
        problems.append(
            f"parallelism.ep={ep}: {unrouted} of {kind} does not receive the experts chosen for each token, so tokens "
            "cannot be sent to them; set parallelism.ep=1 and parallelism.tp=1"
        )
    if problems:
        raise ConfigError(problems)
    for module in modules.values():
        ExpertParallel()._apply(module, mesh)
    return tuple(
        f"experts are replicated over {mesh.size() // ep} tp ranks: ep x tp = {mesh.size()} does not divide {count}"
        for count in counts
        if count % mesh.size()
    )


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of fused experts by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def holds_dtensors(module: nn.Module) -> bool:
    """Return whether any direct parameter of a module is a DTensor, i.e. the module is parallelized already."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))


def _num_experts(module: nn.Module) -> int:
    """Return the global number of experts, which is dim 0 of every fused parameter."""
    return next(module.parameters(recurse=False)).shape[0]


def _nested_parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters of submodules."""
    direct = {name for name, _ in module.named_parameters(recurse=False)}
    return [name for name, _ in module.named_parameters() if name not in direct]


def takes_routing(module: nn.Module) -> bool:
    """Return whether a module's forward takes hidden states, expert indices and router weights."""
    kinds = [parameter.kind for parameter in inspect.signature(type(module).forward).parameters.values()]
    return len(kinds) > 3 or inspect.Parameter.VAR_POSITIONAL in kinds


def _axes(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _placements(mesh: DeviceMesh, experts: int) -> list[Placement]:
    """Shard experts over every axis, but replicate them over tp if ep x tp does not divide their number."""
    even = experts % mesh.size() == 0
    return [Shard(0) if axis == "ep" or even else Replicate() for axis in _axes(mesh)]


def _gradients(placements: list[Placement]) -> list[Placement]:
    """Return gradient placements: on replicated experts each tp rank computes the gradient of its own tokens only."""
    return [Partial() if placement.is_replicate() else placement for placement in placements]


def _divided_over(mesh: DeviceMesh, placements: list[Placement]) -> DeviceMesh | None:
    """Return the 1-D mesh that experts are sharded over; None if every rank holds all of them."""
    axes = [axis for axis, placement in zip(_axes(mesh), placements, strict=True) if placement.is_shard()]
    if len(axes) == 2:
        flat = mesh._flatten("ep_tp")
        share_timeout(flat.get_group())
        return flat
    return mesh[axes[0]] if axes else None


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """Forward of sharded experts: dispatch this rank's tokens, run the local experts, combine the results."""

    module: nn.Module
    compute: Callable[..., torch.Tensor]
    """The module's original forward, called with indices of local experts."""
    num_local: int
    """Experts per rank."""
    mesh: DeviceMesh | None
    """1-D mesh that experts are sharded over. Its process group is looked up at each call: a reference stored in the
    module would keep the group alive after `destroy_process_group`."""

    # (tokens, hidden), (tokens, top_k), (tokens, top_k) -> (tokens, hidden)
    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Send each token to its chosen experts and sum their outputs, weighted by the router."""
        group = None if self.mesh is None else self.mesh.get_group()
        ranks = 1 if self.mesh is None else self.mesh.size()
        experts, order = chosen.reshape(-1).sort(stable=True)  # experts are sharded contiguously: sorts by rank too
        counts = torch.zeros(ranks * self.num_local, dtype=torch.int64, device=hidden.device)
        counts = counts.scatter_add_(0, experts, torch.ones_like(experts)).view(ranks, self.num_local)
        arriving = counts
        if group is not None:
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts, group=group)
        # all_to_all_single takes host-side split sizes: the only host-device synchronization of a training step.
        if isinstance(counts, FakeTensor):  # a simulation has no routing to read: as many tokens to each rank
            sent = received = _balanced(len(experts), ranks)
        else:
            sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        rows = _exchange(hidden[order // chosen.shape[1]], sent, received, group)  # (rows, hidden)
        local = torch.arange(self.num_local, device=hidden.device).repeat(ranks)
        local = local.repeat_interleave(arriving.view(-1), output_size=len(rows))
        outputs = _exchange(self._compute(rows, local), received, sent, group)  # (tokens x top_k, hidden)
        unsorted = torch.empty_like(outputs).index_copy(0, order, outputs).view(*chosen.shape, outputs.shape[1])
        return (unsorted * weights[..., None]).sum(dim=1).to(hidden.dtype)

    def _compute(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if len(rows) == 0:
            # Without gradients this rank would skip FSDP's reduce-scatter, and its peers would hang. Adding a sum to
            # zero rows gives every parameter a zero gradient. That of a part is a dense tensor: torch 2.11 reduces an
            # expanded one over tp when it stores it, earlier than the other ranks reduce theirs.
            total = torch.stack([parameter[0].sum() for parameter in self.module.parameters()]).sum()
            return rows + total.to(rows.dtype)
        return self.compute(rows, local[:, None], torch.ones_like(rows[:, :1]))


def _balanced(tokens: int, ranks: int) -> list[int]:
    """Return numbers of tokens per rank that differ by at most one."""
    return [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]


class _AllToAllRows(torch.autograd.Function):
    """All-to-all of rows with uneven splits: `sent[r]` rows go to rank r. The backward is the reverse all-to-all."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.reverse = (received, sent, group)
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllToAllRows.apply(grad, *ctx.reverse), None, None, None


def _exchange(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    return rows if group is None else _AllToAllRows.apply(rows, sent, received, group)


def _gather_tokens(shard: torch.Tensor, tokens: int, tp: DeviceMesh) -> torch.Tensor:
    """All-gather (tokens / tp, hidden) to (tokens, hidden) over tp; shards may be uneven or empty."""
    shape = torch.Size((tokens, shard.shape[1]))
    sharded = DTensor.from_local(shard, tp, [Shard(0)], run_check=False, shape=shape, stride=(shard.shape[1], 1))
    return as_writable(sharded.redistribute(placements=[Replicate()]).to_local())
