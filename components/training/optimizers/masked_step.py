"""An optimizer step that leaves no trace where gradients are not finite, for any optimizer, decided on the device.

Weights and state on the device are copied before the step and put back by a mask after it. What the host holds (step
counters on the CPU, Python numbers, state that the step created) is put back when the host learns of the decision:
before the next step, or before the optimizer's state dict is read. By then the device has long passed the decision.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from components.training.metrics import HostCopy
from components.training.optimizers.gradients import local_part

IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


@torch.no_grad()
def masked_step(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Step `optimizer`, without effect where `skipped`, a scalar on the parameters' device, is not 0.

    The step needs memory for a second copy of the weights and of the optimizer's state. State that an optimizer keeps
    outside `state` and `param_groups` is not put back.
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
        _put_back(weight.detach(), old, mask)
    undo = _Undo(
        replaced=[value for value in values if not value.put_back(mask)],
        created=[(optimizer.state, owner, optimizer.state[owner]) for owner in optimizer.state if owner not in owners]
        + [(container, key, container[key]) for container, before in keys for key in container if key not in before],
    )
    if (undo.replaced or undo.created) and not mask.is_meta:  # the meta device computes nothing to put back
        pending = _pending_of(optimizer)
        if pending is None:
            pending = _Pending()
            optimizer.register_state_dict_pre_hook(pending)
        undo.decision = HostCopy(skipped)
        pending.undo = undo


def undo_skipped_step(optimizer: torch.optim.Optimizer) -> None:
    """Put back what the host holds of `optimizer`'s state if the last masked step was skipped."""
    pending = _pending_of(optimizer)
    if pending is not None:
        pending(optimizer)


class _Pending:
    """State-dict hook of an optimizer that holds what to put back if its last step is to be skipped."""

    undo: _Undo | None = None

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        undo, self.undo = self.undo, None
        if undo is not None and undo.decision is not None and undo.decision.read().item():
            undo.apply()


def _pending_of(optimizer: torch.optim.Optimizer) -> _Pending | None:
    """Return the hook of an optimizer that a masked step was done with before.

    The optimizer's own list of hooks is the one place of torch that keeps an object with it as long as it lives.
    """
    hooks = optimizer._optimizer_state_dict_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, _Pending)), None)


@dataclass(slots=True)
class _Value:
    """A value of an optimizer's state or of a parameter group before a step, and a copy of it."""

    container: dict[Any, Any]
    key: Any
    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, container: dict[Any, Any], key: Any) -> _Value:
        leaves, spec = tree_flatten(container[key])
        return cls(container, key, [_copy(leaf) for leaf in leaves], spec)

    def put_back(self, mask: torch.Tensor) -> bool:
        """Put the copy back where `mask` is set; return False if the host has to, or some of it."""
        if self.key not in self.container:
            return False
        leaves, spec = tree_flatten(self.container[self.key])
        if spec != self.spec:
            return False
        return all(_put_back(new, old, mask) for new, old in zip(leaves, self.leaves, strict=True))

    def undo(self) -> None:
        """Put the copy back."""
        self.container[self.key] = tree_unflatten(self.leaves, self.spec)


@dataclass(slots=True)
class _Undo:
    """What the host puts back of a step once it knows that the step was skipped."""

    replaced: list[_Value]
    created: list[tuple[dict[Any, Any], Any, Any]]
    """Container, key and value."""
    decision: HostCopy | None = field(default=None)

    def apply(self) -> None:
        for value in self.replaced:
            value.undo()
        for container, key, value in self.created:
            if container.get(key) is value:  # else other state was loaded meanwhile
                del container[key]


def _containers(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any]]:
    return [*optimizer.param_groups, *(each for each in optimizer.state.values() if isinstance(each, dict))]


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf if isinstance(leaf, IMMUTABLE) else copy.deepcopy(leaf)


def _put_back(new: Any, old: Any, mask: torch.Tensor) -> bool:
    """Put `old` back into `new` where `mask` is set; return False if only the host can, and has to."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return new is old or (isinstance(old, IMMUTABLE) and type(new) is type(old) and new == old)
    new, old = local_part(new), local_part(old)
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        return False
    if new.device != mask.device:
        return new.device.type == "cpu" and torch.equal(new, old)
    torch.where(mask, old, new, out=new)
    return True
