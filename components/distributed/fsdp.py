"""FSDP2 over a model: which modules are gathered together, in which precision, and what their gradients are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from components.config.errors import ConfigError
from components.distributed.expert import experts_modules
from components.distributed.gradient_sync import param_groups

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward of their own: they cannot be gathered, their children are."""


def apply_fsdp_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: CPUOffloadPolicy | None = None,
) -> None:
    """Make every child of a ModuleList or ModuleDict one FSDP2 unit, in place (seed page 004, NeMo AutoModel).

    `module` may be such a list itself. Lists within lists are descended into. The last unit of all is not resharded
    after the forward, because the backward asks for it first; every other one is, also the last of a list that others
    follow.
    """
    # A pipeline stage's placeholders have nothing to gather; as units they would only warn about the views they return.
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
    embedding: nn.Module | None = None,
) -> None:
    """Shard a whole model in place: a unit per decoder layer, one for `embedding`, one for the rest.

    With `expert_mesh`, experts that lie on ranks of their own are units of their own on that mesh.

    Args:
        embedding: An untied input embedding; None: the root's unit includes it.

    Gradients are SUMMED over the mesh, never averaged: the training step divides once, by the global number of
    target tokens. Only the root casts its output, as the policy says: layers that did would hand the next one a type
    its weights do not have. Tied embeddings share the root's unit (torch 2.13 refuses to split them).
    """
    inner = replace(mp_policy, output_dtype=None) if mp_policy else None
    if expert_mesh is not None:
        # Their inputs have the right type already; the router's weights may be float32 on purpose.
        uncast = replace(inner, cast_forward_inputs=False) if inner else None
        for experts in experts_modules(model).values():
            _shard(experts, expert_mesh, uncast, offload_policy, reshard=True)
    apply_fsdp_sharding_recursively(model, mesh, inner, offload_policy)
    if embedding is not None:
        _shard(embedding, mesh, inner, offload_policy, reshard=True)
    _shard(model, mesh, mp_policy, offload_policy, reshard=False)
    for unit in fsdp_units(model):
        if not reshard_after_forward:
            unit.set_reshard_after_forward(False, recurse=False)
        # gloo has no pre-multiplied sum; dividing by 1 leaves the plain sum on every backend.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def mixed_precision(compute_dtype: torch.dtype, param_dtype: torch.dtype) -> MixedPrecisionPolicy | None:
    """Return the policy that computes in `compute_dtype`, or None where there is nothing to cast.

    Gradients of 16 bits are summed in float32, over micro-batches and ranks, also where parameters have 16 bits too.
    """
    if compute_dtype != param_dtype:
        return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32) if param_dtype.itemsize == 2 else None


def offload_to_cpu(enabled: bool) -> CPUOffloadPolicy | None:
    """Return the policy that keeps state in host memory; pinned only where there is a device to copy to."""
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if enabled else None


def prefetch_layers(model: nn.Module, ahead: int) -> None:
    """Let each FSDP2 unit that is in a list of layers gather the next `ahead` of the list; 0: leave FSDP2's own order.

    The backward goes through the list the other way.
    """
    layers: list[Any] = [unit for unit in _units(model) if isinstance(unit, FSDPModule)]
    for index, layer in enumerate(layers if ahead else []):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - ahead) : index][::-1])


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Return every FSDP2 unit of a model, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Iterator[None]:
    """Hold every parameter gathered within the context, forwards included (seed page 004, NeMo AutoModel).

    The whole model is in the memory of every rank. Resharding after the forward is switched off within and what it
    was is put back, so that several forwards gather nothing.
    """
    units = fsdp_units(model)
    before = [_reshards_after_forward(unit) for unit in units]
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        for unit, reshards in zip(units, before, strict=True):
            unit.set_reshard_after_forward(reshards, recurse=False)
            unit.reshard()


def _reshards_after_forward(unit: FSDPModule) -> bool:
    return any(group.post_forward_mesh_info is not None for group in param_groups(unit))


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what is in the outermost lists, those within lists included."""
    in_list = isinstance(module, CONTAINERS)
    for child in module.children():
        if in_list and not isinstance(child, CONTAINERS):
            yield child
        else:
            yield from _units(child)


def _shard(
    module: nn.Module,
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
        if all(parameter.is_floating_point() for parameter in module.parameters()):
            raise
        raise ConfigError(
            f"peft.method=qlora: FSDP2 of torch {torch.__version__} does not shard bytes ({error}); install torch 2.13 "
            "or later, or set parallelism=ddp or peft=lora"
        ) from error


def _sharded_dim(parameter: nn.Parameter, ranks: int) -> int:
    """0; but 1 for fused experts that are too few for the ranks: FSDP2 would pad each rank's part to an expert."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    few = local.dim() == 3 and local.shape[0] % ranks != 0
    return 1 if few and local.shape[1] % ranks == 0 else 0
