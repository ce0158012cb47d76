"""From gradients to new weights: equal tp replicas, the global norm, clipping, and updates that skip bad steps.

A step of any optimizer is undone on the device if the gradients are not finite, or if its loss or norm is a spike.
Weights and state on the device are copied before the step and restored by a mask after it. State on the host (step
counters on the CPU, Python numbers, state that the step created) is restored once the host reads the decision: before
the next step, or before the optimizer's state dict is read. By then the device has computed the decision, so the host
does not wait.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from components.config.schema.training import TrainingConfig
from components.training.state import HostCopy

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


def equalize_replicas(parameters: Iterable[torch.Tensor]) -> None:
    """Broadcast the gradients of parameters that are replicated over tp from the first tp rank, in place.

    Norm layers, and attention whose heads tp does not divide, are computed by every tp rank from the same input, so
    their gradients are equal up to rounding. GPU kernels may sum in a different order each time, and without the
    broadcast the replicas and the clipping factor would drift apart. One broadcast per gradient dtype; the host does
    not wait.
    """
    shared: dict[tuple[dist.ProcessGroup, torch.dtype], list[torch.Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)):
        axes = gradient.device_mesh.mesh_dim_names or ()
        if "tp" in axes and gradient.placements[axes.index("tp")].is_replicate():
            key = gradient.device_mesh.get_group("tp"), gradient.dtype
            shared.setdefault(key, []).append(gradient.to_local())
    for (group, _), gradients in shared.items():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.broadcast(flat, group=group, group_src=0)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(target) for part, target in zip(parts, gradients, strict=True)])


def gradient_norm(parameters: Iterable[torch.Tensor], stages: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the global L2 norm of the gradients as a float64 scalar on their device, the same on every rank.

    Gradients may be plain tensors or DTensors on different meshes: squares are summed over the axes that shard a
    gradient, and counted once over those that replicate it. One small collective per sharding mesh axis; the host does
    not wait.

    Args:
        stages: Process group of the pipeline stages, which hold different parameters; None: one stage.

    Raises ValueError if there is no gradient, or for a gradient that is still a partial sum.
    """
    by_groups: dict[tuple[str, ...], list[torch.Tensor]] = {}
    process_groups: dict[str, dist.ProcessGroup] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        groups = _sharding_groups(gradient)
        process_groups |= {group.group_name: group for group in groups}
        by_groups.setdefault(tuple(group.group_name for group in groups), []).append(local_tensor(gradient))
    if not by_groups:
        raise ValueError("no parameter has a gradient; call backward() first")
    squares = {names: _sum_of_squares(gradients) for names, gradients in by_groups.items()}
    for name, group in process_groups.items():
        sharded = [names for names in squares if name in names]
        part = torch.stack([squares[names] for names in sharded])  # indexing by a list would make the host wait
        dist.all_reduce(part, group=group)
        squares.update(zip(sharded, part.unbind(), strict=True))
    total = torch.stack(list(squares.values())).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def clip_gradients(parameters: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`; 0: no clipping. The host does not wait.

    Args:
        norm: The global norm, from `gradient_norm`.
    """
    if max_norm == 0:
        return
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharding_groups(gradient: torch.Tensor) -> list[dist.ProcessGroup]:
    if not isinstance(gradient, DTensor):
        return []
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"a gradient is still a partial sum ({gradient.placements}): it was not reduced")
    mesh = gradient.device_mesh
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(gradient.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    if gradients[0].device.type == "cpu":
        norms = [part for gradient in gradients for part in _norms_of_rows(gradient.reshape(-1), dtype)]
        return torch.cat(norms).double().square().sum()
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).double().square().sum()


def _norms_of_rows(flat: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norms of a flat gradient's rows of 1,024 elements, and of the remaining elements.

    torch's CPU norm adds float32 squares sequentially: its relative error is 1e-3 for the 28 million elements of
    SmolLM2's embedding. Within rows of 1,024 it is 1e-7, at the same speed. GPU kernels sum in trees, so they do not
    need this.
    """
    in_rows = flat.numel() - flat.numel() % 1024
    rows = torch.linalg.vector_norm(flat[:in_rows].view(-1, 1024), dim=1, dtype=dtype)
    return [rows, torch.linalg.vector_norm(flat[in_rows:], dtype=dtype)[None]]


_RELATIVE_ROUNDING = 1e-6
"""Relative difference up to which values are equal, far above rounding: with a constant loss the deviation is 0."""


class SpikeWindow:
    """Losses and gradient norms of the last steps, on the device, and whether those of a new step are a spike.

    The values of a skipped step enter the window, too, as in OLMo-core's SkipStepOptimizer: if the level has risen for
    good, mean and deviation follow it within the window. Values that are not finite do not enter.
    """

    def __init__(self, deviations: float, size: int, device: torch.device) -> None:
        """Begin with an empty window of `size` steps.

        Args:
            deviations: Standard deviations above the mean beyond which a value is a spike.
        """
        self.deviations = deviations
        self._values = torch.full((2, size), torch.nan, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, training: TrainingConfig, device: torch.device) -> SpikeWindow | None:
        """Return the window of a run; None without training.skip_spikes."""
        return None if training.skip_spikes is None else cls(training.skip_spikes, training.spike_window, device)

    def note(self, steps: int) -> str:
        """Return the rule for the banner of a run of `steps` steps."""
        window = self._values.shape[1]
        never = f"; no update of this run is skipped, since its {steps:,} steps do not fill half of the window"
        return (
            f"spikes: updates are skipped if the loss or the gradient norm lies more than {self.deviations:g} standard "
            f"deviations above the mean of the last {window:,} steps{never if steps <= window // 2 else ''}"
        )

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Add a step's loss and gradient norm, (2,) float64; return whether one is a spike, a scalar on the device.

        A norm that is not finite is no spike, and neither is a value that differs from the mean by rounding only.
        """
        present = self._values.isfinite()
        count = present.sum(1)
        mean = torch.where(present, self._values, 0.0).sum(1) / count
        squares = torch.where(present, self._values - mean[:, None], 0.0).square().sum(1)
        margin = self.deviations * (squares / (count - 1)).sqrt()
        spikes = values > mean + margin.maximum(_RELATIVE_ROUNDING * mean.abs())
        is_finite = values.isfinite()
        moved = torch.cat([self._values[:, 1:], values[:, None]], dim=1)
        self._values = torch.where(is_finite.all(), moved, self._values)
        return (spikes & (count >= self._values.shape[1] // 2)).any() & is_finite[1]

    def state(self) -> list[list[float]]:
        """Return the losses and the gradient norms, oldest first, for a checkpoint. Waits for the device."""
        return [[value for value in each if value == value] for each in self._values.tolist()]

    def load_state(self, saved: list[list[float]]) -> None:
        """Continue with the values that `state` returned, the newest of them if the window is smaller now."""
        window = torch.full_like(self._values, torch.nan, device="cpu")
        size = window.shape[1]
        for row, values in zip(window, saved, strict=True):
            newest = values[-size:]
            row[size - len(newest) :] = torch.tensor(newest, dtype=window.dtype)
        self._values.copy_(window)


def step_if_finite(
    optimizer: torch.optim.Optimizer, norm: torch.Tensor, is_spike: torch.Tensor | None = None
) -> torch.Tensor:
    """Update the weights unless `norm` is not finite or `is_spike`; return 1 if the update was skipped, else 0.

    The decision is made on the device, so the host does not wait. Adam's fused kernels read it themselves; for any
    other optimizer `masked_step` restores weights, moments and step counters.
    """
    is_bad = ~torch.isfinite(norm) if is_spike is None else ~torch.isfinite(norm) | is_spike
    skipped = is_bad.to(torch.float32)
    if _honors_found_inf(optimizer):
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    else:
        masked_step(optimizer, skipped)
    return skipped


def _honors_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of the optimizer changes nothing if `found_inf` is set.

    `found_inf` and `grad_scale` are the attributes through which torch.amp.GradScaler passes the decision to fused
    optimizers. Of torch's, only Adam and AdamW qualify: a skipped first step of fused SGD leaves its momentum
    uninitialized. Meshbook's own declare `found_inf`; a subclass of theirs may compute anything around the kernel.
    """
    kind, fused = type(optimizer), all(group["fused"] for group in optimizer.param_groups if "fused" in group)
    return fused and (kind in (torch.optim.Adam, torch.optim.AdamW) or "found_inf" in vars(kind))


@torch.no_grad()
def masked_step(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Step `optimizer`, without effect if `skipped`, a scalar on the parameters' device, is not 0.

    The step needs memory for a second copy of the weights and of the optimizer's state. State that an optimizer stores
    outside `state` and `param_groups` is not restored.
    """
    _undo_skipped_step(optimizer)
    mask = skipped.bool()
    weights = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    copies = [weight.detach().clone() for weight in weights]
    owners = set(optimizer.state)
    values = [_Value.of(container, key) for container in _containers(optimizer) for key in container if key != "params"]
    keys = [(container, set(container)) for container in _containers(optimizer)]
    optimizer.step()
    for weight, old in zip(weights, copies, strict=True):
        _restore(weight.detach(), old, mask)
    # On the meta device, and in a simulation, there is no decision to read.
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


def _undo_skipped_step(optimizer: torch.optim.Optimizer) -> None:
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
    return leaf if isinstance(leaf, _IMMUTABLE) else copy.deepcopy(leaf)


def _restore(new: Any, old: Any, mask: torch.Tensor) -> bool:
    """Copy `old` into `new` on the device if `mask` is set; return False if the host must do it later."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return new is old or (isinstance(old, _IMMUTABLE) and type(new) is type(old) and new == old)
    new, old = local_tensor(new), local_tensor(old)
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        return False
    if new.device != mask.device:
        return new.device.type == "cpu" and torch.equal(new, old)
    torch.where(mask, old, new, out=new)
    return True
