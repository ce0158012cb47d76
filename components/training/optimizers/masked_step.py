"""Optimizer step for any optimizer that is undone on the device if the gradients are not finite.

Weights and state on the device are copied before the step and restored by a mask after it. State on the host (step
counters on the CPU, Python numbers, state that the step created) is restored once the host reads the decision: before
the next step, or before the optimizer's state dict is read. By then the device has computed the decision, so the host
does not wait.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from components.training.metrics import HostCopy
from components.training.optimizers.gradients import local_tensor

IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


@torch.no_grad()
def masked_step(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Step `optimizer`, without effect if `skipped`, a scalar on the parameters' device, is not 0.

    The step needs memory for a second copy of the weights and of the optimizer's state. State that an optimizer stores
    outside `state` and `param_groups` is not restored.
    """
    undo_skipped_step(optimizer)
    mask = skipped.bool()
    weights = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    copies = [weight.detach().clone() for weight in weights]
    owners = set(optimizer.state)
    values = [_Value.of(container, key) for container in _containers(optimizer) for key in container if key != "params"]
    keys = [(container, set(container)) for container in _containers(optimizer)]
    optimizer.step()
    for weight, old in zip(weights, copies, strict=True):
        _restore(weight.detach(), old, mask)
    # On the meta device, and in a dry run, there is no decision to read.
    has_decision = not mask.is_meta and not isinstance(mask, FakeTensor)
    undo = _Undo(
        replaced=[value for value in values if not value.restore_on_device(mask)],
        created=[(optimizer.state, owner, optimizer.state[owner]) for owner in optimizer.state if owner not in owners]
        + [(container, key, container[key]) for container, before in keys for key in container if key not in before],
    )
    if (undo.replaced or undo.created) and has_decision:
        pending = _pending_of(optimizer)
        if pending is None:
            pending = _Pending()
            optimizer.register_state_dict_pre_hook(pending)
        undo.decision = HostCopy(skipped)
        pending.undo = undo


def undo_skipped_step(optimizer: torch.optim.Optimizer) -> None:
    """Restore the part of `optimizer`'s state that is on the host if the last masked step was skipped."""
    pending = _pending_of(optimizer)
    if pending is not None:
        pending(optimizer)


class _Pending:
    """State-dict pre-hook of an optimizer that undoes its last step on the host if it was skipped."""

    undo: _Undo | None = None

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        undo, self.undo = self.undo, None
        if undo is not None and undo.decision is not None and undo.decision.read().item():
            undo.apply()


def _pending_of(optimizer: torch.optim.Optimizer) -> _Pending | None:
    """Return the hook that an earlier masked step registered on the optimizer, or None.

    The optimizer's list of hooks (a private attribute) serves as the storage, because it lives as long as the optimizer
    and is not part of its state.
    """
    hooks = optimizer._optimizer_state_dict_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, _Pending)), None)


@dataclass(slots=True)
class _Value:
    """Copy of a value of an optimizer's state or of a parameter group, made before a step."""

    container: dict[Any, Any]
    key: Any
    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, container: dict[Any, Any], key: Any) -> _Value:
        leaves, spec = tree_flatten(container[key])
        return cls(container, key, [_copy(leaf) for leaf in leaves], spec)

    def restore_on_device(self, mask: torch.Tensor) -> bool:
        """Restore the copy on the device if `mask` is set; return False if the host must restore some or all of it."""
        if self.key not in self.container:
            return False
        leaves, spec = tree_flatten(self.container[self.key])
        if spec != self.spec:
            return False
        return all(_restore(new, old, mask) for new, old in zip(leaves, self.leaves, strict=True))

    def undo(self) -> None:
        """Restore the copy on the host."""
        self.container[self.key] = tree_unflatten(self.leaves, self.spec)


@dataclass(slots=True)
class _Undo:
    """State that the host restores if the decision turns out to be that the step was skipped."""

    replaced: list[_Value]
    created: list[tuple[dict[Any, Any], Any, Any]]
    """(container, key, value) of state that the step created, which is deleted."""
    decision: HostCopy | None = field(default=None)

    def apply(self) -> None:
        for value in self.replaced:
            value.undo()
        for container, key, value in self.created:
            if container.get(key) is value:  # otherwise a state dict was loaded since
                del container[key]


def _containers(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any]]:
    return [*optimizer.param_groups, *(each for each in optimizer.state.values() if isinstance(each, dict))]


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf if isinstance(leaf, IMMUTABLE) else copy.deepcopy(leaf)


def _restore(new: Any, old: Any, mask: torch.Tensor) -> bool:
    """Copy `old` into `new` on the device if `mask` is set; return False if the host must do it later."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return new is old or (isinstance(old, IMMUTABLE) and type(new) is type(old) and new == old)
    new, old = local_tensor(new), local_tensor(old)
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        return False
    if new.device != mask.device:
        return new.device.type == "cpu" and torch.equal(new, old)
    torch.where(mask, old, new, out=new)
    return True
