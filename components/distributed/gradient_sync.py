"""Gradient reduction under gradient accumulation: once per optimizer step, or after every micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


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
