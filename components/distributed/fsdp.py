"""FSDP2: choice of units, mixed precision, prefetching, and gradient reduction under gradient accumulation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from components.config.compute_rules import sharded_bytes_problem
from components.distributed.expert import experts_modules
from components.protocol.errors import ConfigError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward, which cannot be FSDP2 units themselves; their children are."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Modules before and after the decoder layers that are FSDP2 units of their own, not part of the root's unit."""

    embedding: nn.Module | None = None
    """An untied input embedding."""
    head: tuple[nn.Module, ...] = ()
    """One unit: the last norm and an untied head. Its gradients are reduced during the backward of the layers."""


_WHOLE_ROOT = Ends()
"""The root's unit includes both ends."""


def apply_fsdp_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: CPUOffloadPolicy | None = None,
) -> None:
    """Make every child of a ModuleList or ModuleDict an FSDP2 unit, in place.

    Same signature as in NeMo AutoModel's parallelizer. `module` may itself be such a container, and nested containers
    are descended into. The last unit is not resharded after the forward, because the backward uses it first; all others
    are, including the last child of every container but the last.
    """
    # A pipeline stage's placeholders have no parameters; as units they would only warn about returning a view.
    units = [unit for unit in _units(module) if next(unit.parameters(), None) is not None]
    for index, unit in enumerate(units):
        _shard(unit, mesh, mp_policy, offload_policy, reshard=index < len(units) - 1)


def shard_with_fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    reshard_after_forward: bool = True,
    expert_mesh: DeviceMesh | None = None,
    ends: Ends = _WHOLE_ROOT,
) -> None:
    """Shard a model in place: one FSDP2 unit per decoder layer, those of `ends`, and one for all other parameters.

    Gradients are SUMMED over the mesh, never averaged: the training step divides once, by the global number of
    targets. Tied embeddings stay in the root's unit, because torch 2.13 rejects tied parameters in different units.

    Args:
        expert_mesh: Mesh for the units of expert-parallel experts, without the ep axis; None: no expert parallelism.
        ends: Units before and after the layers.
    """
    # Only the root casts its output: a layer that did would pass the next layer a dtype other than its weights'.
    inner = replace(mp_policy, output_dtype=None) if mp_policy else None
    if expert_mesh is not None:
        # Expert inputs are in the compute dtype already, except router weights, which may be float32 on purpose.
        uncast = replace(inner, cast_forward_inputs=False) if inner else None
        for experts in experts_modules(model).values():
            _shard(experts, expert_mesh, uncast, offload_policy, reshard=True)
    apply_fsdp_sharding_recursively(model, mesh, inner, offload_policy)
    if ends.embedding is not None:
        _shard(ends.embedding, mesh, inner, offload_policy, reshard=True)
    if ends.head:  # used last in the forward and first in the backward
        _shard(list(ends.head), mesh, inner, offload_policy, reshard=False)
    _shard(model, mesh, mp_policy, offload_policy, reshard=False)
    _gather_early(model, ends)
    for unit in _fsdp_units(model):
        if not reshard_after_forward:
            unit.set_reshard_after_forward(False, recurse=False)
        # Sum instead of FSDP2's default average. Forcing ReduceOp.SUM avoids PREMUL_SUM, which gloo does not support.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def keep_uncast(model: nn.Module, parameters: Sequence[tuple[nn.Module, str]]) -> None:
    """Let FSDP2 gather some parameters in their stored dtype, as groups of their own, before the first forward.

    A group has one dtype and one policy. A unit may have several groups, but torch makes them only for several meshes.

    Args:
        parameters: Modules and names of their own parameters, of which the model need not have all.
    """
    for unit in _fsdp_units(model) if parameters else ():
        if "_fsdp_param_groups" not in vars(unit._get_fsdp_state()):  # an older torch, whose units have one group
            if len({parameter.dtype for parameter in model.parameters() if parameter.requires_grad}) > 1:
                raise ConfigError(
                    f"model.dtype: this model keeps parameters in float32 beside 16 bits, which FSDP2 of torch "
                    f"{torch.__version__} cannot shard; set model.dtype=float32, or install a newer torch"
                )
            return
        for group in param_groups(unit):
            infos = [(param, (param._module_info.module, param._module_info.param_name)) for param in group.fsdp_params]
            kept = [each for each, owner in infos if owner in parameters and not _casts_its_input(owner[0])]
            if kept and len(kept) < len(infos):
                _split_off(unit, group, kept)
            elif kept:
                group.mp_policy = replace(group.mp_policy, param_dtype=None)


def _casts_its_input(module: nn.Module) -> bool:
    """Return whether a matmul gets its input in the compute dtype: FSDP2 casts the arguments of a unit."""
    return isinstance(module, nn.Linear) and isinstance(module, FSDPModule)


def _split_off(unit: FSDPModule, group: Any, kept: list[Any]) -> None:
    """Move parameters of a group to one of their own that casts nothing; both have the state of a new group."""
    new = copy.copy(group)
    new.fsdp_params, new._post_forward_indices = kept, []
    new.mp_policy = replace(group.mp_policy, param_dtype=None)
    group.fsdp_params = [param for param in group.fsdp_params if param not in kept]
    unit._get_fsdp_state()._fsdp_param_groups.append(new)


def mixed_precision(compute_dtype: torch.dtype, param_dtype: torch.dtype) -> MixedPrecisionPolicy | None:
    """Return the policy that computes in `compute_dtype`, or None if nothing has to be cast.

    16-bit gradients are accumulated and reduced in float32, even if the parameters are 16-bit as well.
    """
    if compute_dtype != param_dtype:
        return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32) if param_dtype.itemsize == 2 else None


def offload_to_cpu(enabled: bool) -> CPUOffloadPolicy | None:
    """Return the policy that keeps parameters, gradients and optimizer state in host memory, pinned if CUDA exists."""
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if enabled else None


def prefetch_layers(model: nn.Module, ahead: int) -> None:
    """Make the FSDP2 unit of each layer prefetch the next `ahead` layers, in reverse order in the backward.

    With ahead=0, FSDP2's default prefetching is kept.
    """
    layers: list[Any] = [unit for unit in _units(model) if isinstance(unit, FSDPModule)]
    for index, layer in enumerate(layers if ahead else []):
        if index + 1 < len(layers):  # the last one prefetches the head
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - ahead) : index][::-1])


def _gather_early(model: Any, ends: Ends) -> None:
    """Issue the all-gathers of the embedding and the first layer together when the forward begins, and that of the head
    together with the last layer's.

    In the backward the embedding is not gathered: its gradient depends on token ids only. FSDP2 would also prefetch a
    frozen embedding, whose backward never runs.
    """
    layers: list[Any] = [unit for unit in _units(model) if isinstance(unit, FSDPModule)]
    first, embedding = layers[:1], ends.embedding
    if layers and ends.head:
        head: Any = ends.head[0]
        layers[-1].set_modules_to_forward_prefetch([head])
        # A private method, without which FSDP2 keeps the buffer of the last all-gather until the forward ends, and so
        # a second copy of the head beside the logits.
        head._set_unshard_async_op(True)
    if isinstance(embedding, FSDPModule):
        first.insert(0, embedding)
        if isinstance(embedding, nn.Embedding):
            embedding.set_unshard_in_backward(False)
        # Itself, which is without effect: by default it prefetches the unit that ran before it, in an earlier forward.
        embedding.set_modules_to_backward_prefetch([embedding])
    model.set_modules_to_forward_prefetch(first)


def _fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Return all FSDP2 units of a model, the root first; of a unit of several modules, the first one."""
    modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(module._get_fsdp_state()): module for module in reversed(modules)}.values())[::-1]


def reshard(model: nn.Module, kept: nn.Module | None = None) -> None:
    """Free the gathered parameters of all FSDP2 units; a forward without a backward leaves some of them unsharded.

    Args:
        kept: Module whose unit stays as it is, if it is in the model: a unit itself, or else part of the root's.
    """
    units = _fsdp_units(model)
    states = [unit._get_fsdp_state() for unit in units]
    keeps = None
    if units and kept is not None and any(module is kept for module in model.modules()):
        keeps = kept._get_fsdp_state() if isinstance(kept, FSDPModule) else states[0]
    for unit, state in zip(units, states, strict=True):
        if state is not keeps:
            unit.reshard()


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Iterator[None]:
    """Unshard all parameters within the context, as in NeMo AutoModel's parallelizer.

    Every rank holds the full model in memory. Resharding after the forward is disabled, so that forwards within the
    context run no all-gather, and restored at the end.
    """
    units = _fsdp_units(model)
    previous = [_reshards_after_forward(unit) for unit in units]
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        for unit, reshards in zip(units, previous, strict=True):
            unit.set_reshard_after_forward(reshards, recurse=False)
            unit.reshard()


def unsharded_bytes(model: nn.Module) -> int:
    """Return the bytes that `unshard_fsdp2_model` allocates on this rank for the parameters of all units.

    Under tp these are the rank's shards over tp. With mixed precision they are in the compute dtype.
    """
    total = 0
    for unit in _fsdp_units(model):
        for group in param_groups(unit):
            compute = group.mp_policy.param_dtype
            for param in group.fsdp_params:  # torch has no public access to the size over the FSDP axis alone
                stored = param.sharded_param.dtype
                dtype = compute if compute is not None and stored.is_floating_point else stored
                total += param._orig_size.numel() * dtype.itemsize
    return total


def _reshards_after_forward(unit: FSDPModule) -> bool:
    return any(group.post_forward_mesh_info is not None for group in param_groups(unit))


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost containers, descending into containers nested directly in them."""
    in_list = isinstance(module, _CONTAINERS)
    for child in module.children():
        if in_list and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from _units(child)


def _shard(
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None,
    *,
    reshard: bool,
) -> None:
    ranks = mesh.shape[-1]
    try:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda parameter: Shard(_sharded_dim(parameter, ranks)),
            mp_policy=mp_policy or MixedPrecisionPolicy(),
            offload_policy=offload_policy or OffloadPolicy(),
        )
    except RuntimeError as error:
        modules = module if isinstance(module, list) else [module]
        if all(parameter.is_floating_point() for each in modules for parameter in each.parameters()):
            raise
        raise ConfigError(sharded_bytes_problem(torch.__version__)) from error


def _sharded_dim(parameter: nn.Parameter, ranks: int) -> int:
    """Return the dim to shard: 0, or 1 for fused experts whose number is no multiple of the ranks.

    On dim 0 FSDP2 would pad every shard to whole experts.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    uneven_experts = local.dim() == 3 and local.shape[0] % ranks != 0
    return 1 if uneven_experts and local.shape[1] % ranks == 0 else 0


class UnknownShardingError(TypeError):
    """Error for a module wrapped in FSDP1, whose gradient reduction get_sync_ctx does not control."""


@contextmanager
def get_sync_ctx(model: nn.Module, is_optim_step: bool, defer_fsdp_grad_sync: bool) -> Iterator[None]:
    """Control gradient reduction within the context, which must wrap forward and backward of one micro-batch.

    Same signature as NeMo AutoModel's distributed.utils.get_sync_ctx. DDP all-reduces in the last micro-batch only. So
    does FSDP2 with `defer_fsdp_grad_sync=True`: less traffic, but unsharded gradients stay in memory. With False, FSDP2
    reduce-scatters in every micro-batch, and HSDP all-reduces over its replicas in the last one only.

    Applies to every DDP or FSDP2 module inside `model`, also below wrappers such as torch.compile's. Previous settings
    are restored at the end, also after an exception. Raises UnknownShardingError for FSDP1.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, FullyShardedDataParallel):
                raise UnknownShardingError("FSDP1 (FullyShardedDataParallel) is not supported; use FSDP2 (fully_shard)")
            if isinstance(module, DistributedDataParallel) and not is_optim_step:
                stack.enter_context(module.no_sync())
            elif isinstance(module, FSDPModule):
                stack.enter_context(_fsdp2_sync(module, is_optim_step, defer_fsdp_grad_sync))
        yield


@contextmanager
def _fsdp2_sync(unit: FSDPModule, is_optim_step: bool, defer: bool) -> Iterator[None]:
    groups = param_groups(unit)
    previous = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    unit.set_requires_gradient_sync(is_optim_step or not defer, recurse=False)
    unit.set_requires_all_reduce(is_optim_step, recurse=False)
    try:
        yield
    finally:
        for group, (reduces, all_reduces) in zip(groups, previous, strict=True):
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces


def param_groups(unit: FSDPModule) -> list:
    """Return the parameter groups of an FSDP2 unit; empty for a unit without parameters.

    They hold the gradient-sync flags, for which FSDP2 has public setters but no getters.
    """
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older torch versions have a single group per unit
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]
