"""When gradients are reduced: once per optimizer step, or after every micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


class UnknownShardingError(TypeError):
    """A module is sharded in a way whose gradient reduction cannot be controlled here."""


@contextmanager
def get_sync_ctx(model: nn.Module, is_optim_step: bool, defer_fsdp_grad_sync: bool) -> Iterator[None]:
    """Forward and backward of one micro-batch belong into this context (seed page 001, NeMo AutoModel).

    DDP reduces in the last micro-batch only. FSDP2 does too with `defer_fsdp_grad_sync=True` (less traffic, gradients
    of the whole model in memory); with False it reduce-scatters every micro-batch, and hybrid sharding all-reduces
    over its replicas in the last one only.

    Whatever wraps the model (torch.compile, a module of yours) is looked into. What was set before is put back at the
    end, also after an exception. Raises UnknownShardingError for FSDP1.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, FullyShardedDataParallel):
                raise UnknownShardingError("FSDP1 (FullyShardedDataParallel) is not supported; use FSDP2")
            if isinstance(module, DistributedDataParallel) and not is_optim_step:
                stack.enter_context(module.no_sync())
            elif isinstance(module, FSDPModule):
                stack.enter_context(_fsdp2_sync(module, is_optim_step, defer_fsdp_grad_sync))
        yield


@contextmanager
def _fsdp2_sync(unit: FSDPModule, is_optim_step: bool, defer: bool) -> Iterator[None]:
    groups = param_groups(unit)
    before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    unit.set_requires_gradient_sync(is_optim_step or not defer, recurse=False)
    unit.set_requires_all_reduce(is_optim_step, recurse=False)
    try:
        yield
    finally:
        for group, (reduces, all_reduces) in zip(groups, before, strict=True):
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces


def param_groups(unit: FSDPModule) -> list:
    """Return the parameter groups of an FSDP2 unit, none for one without parameters of its own.

    They hold the flags for which FSDP2 has setters and no getters.
    """
    state = unit._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:
        found = [state._fsdp_param_group]
    return [group for group in found if group is not None]
