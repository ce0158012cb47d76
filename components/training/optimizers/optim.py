"""Optimizers of a config, learning-rate schedules as pure functions, and updates that skip non-finite gradients.

A step of any optimizer is undone on the device if the gradients are not finite. Weights and state on the device are
copied before the step and restored by a mask after it. State on the host (step counters on the CPU, Python numbers,
state that the step created) is restored once the host reads the decision: before the next step, or before the
optimizer's state dict is read. By then the device has computed the decision, so the host does not wait.
"""

from __future__ import annotations

import copy
import math
import pkgutil
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from components.checkpoint.tensors import Optimizers
from components.config.schema.optimizer import (
    AdamW8bitConfig,
    AdamWConfig,
    CustomOptimizerConfig,
    MuonConfig,
    OptimizerConfig,
    Schedule,
    SGDConfig,
)
from components.models.anatomy import Anatomy
from components.models.layers import vector_parameters
from components.protocol.errors import ConfigError
from components.training.optimizers.adamw8bit import AdamW8bit, is_quantized
from components.training.optimizers.gradients import local_tensor
from components.training.optimizers.muon import Muon, divide_parameters
from components.training.prepared import Prepared
from components.training.state import HostCopy

_LR_SCALE = "lr_scale"
"""Key of a parameter group: factor of the schedule's learning rate; 1 if it is missing."""
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


def build_optimizer(model: Prepared | nn.Module, config: OptimizerConfig) -> Optimizers:
    """Return the optimizer of the trainable parameters, or two by name for Muon and 8-bit moments.

    Call it after sharding and loading.

    A collective for Muon. Weight decay applies to matrices, not to norms, biases and other vectors.

    Raises:
        ConfigError: An optimizer.factory that cannot be imported, or that does not return an optimizer; torchao is not
            installed for 8-bit moments.
        TypeError: Muon for a model without its anatomy: pass the result of `prepare`.
    """
    module = model.module if isinstance(model, Prepared) else model
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    vectors = vector_parameters(module)
    match config:
        case AdamWConfig():
            return _adamw(trained, vectors, config, config.lr)
        case AdamW8bitConfig():
            return _adamw8bit(trained, vectors, config)
        case SGDConfig():
            return torch.optim.SGD(
                _groups(trained, vectors, config), lr=config.lr, momentum=config.momentum, nesterov=config.nesterov
            )
        case MuonConfig():
            if not isinstance(model, Prepared) or model.anatomy is None:
                raise TypeError("build_optimizer needs the model from training.prepare for optimizer=muon")
            return _muon(module, model.anatomy, vectors, config)
        case CustomOptimizerConfig():
            return _custom(_groups(trained, vectors, config), config)
    raise TypeError(f"build_optimizer: there is no optimizer for {type(config).__name__}")


def _groups(
    parameters: list[nn.Parameter], vectors: set[nn.Parameter], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the parameter groups with and without weight decay that are not empty."""
    groups = [
        {"params": [p for p in parameters if p not in vectors], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p in vectors], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(
    parameters: list[nn.Parameter],
    vectors: set[nn.Parameter],
    config: AdamWConfig | AdamW8bitConfig | MuonConfig,
    lr: float,
) -> AdamW:
    """Return AdamW with fused kernels, except on the meta device, which has none."""
    fused = parameters[0].device.type != "meta"
    return AdamW(
        _groups(parameters, vectors, config),
        lr=lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=fused,
        foreach=None if fused else True,
    )


def _adamw8bit(parameters: list[nn.Parameter], vectors: set[nn.Parameter], config: AdamW8bitConfig) -> Optimizers:
    quantized = [parameter for parameter in parameters if is_quantized(parameter)]
    others = [parameter for parameter in parameters if not is_quantized(parameter)]
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if quantized:
        optimizers["adamw8bit"] = AdamW8bit(_groups(quantized, vectors, config), config)
    if others:
        optimizers["adamw"] = _adamw(others, vectors, config, config.lr)
    return optimizers


def _muon(module: nn.Module, anatomy: Anatomy, vectors: set[nn.Parameter], config: MuonConfig) -> Optimizers:
    divided = divide_parameters(module, anatomy, vectors)
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if divided.matrices:  # some pipeline stage may hold none
        optimizers["muon"] = Muon(divided.matrices, config)
    if divided.others:
        lr = config.lr if config.adamw_lr is None else config.adamw_lr
        optimizers["adamw"] = _adamw(divided.others, vectors, config, lr)
        for group in optimizers["adamw"].param_groups:
            group[_LR_SCALE] = lr / config.lr
    return optimizers


def _custom(groups: list[dict[str, Any]], config: CustomOptimizerConfig) -> torch.optim.Optimizer:
    key = f"optimizer.factory={config.factory}"
    try:
        factory = pkgutil.resolve_name(config.factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}: cannot be imported: {error}") from error
    if not callable(factory):
        raise ConfigError(f"{key}: is a {type(factory).__name__}, not a function")
    optimizer = factory(groups, lr=config.lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{key}: returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return optimizer


def learning_rate(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (the first is 0) of `max_steps`.

    The warmup rises linearly to `lr`; under every decaying schedule the last step has `lr x min_lr_ratio`. A run
    shorter than its warmup never reaches `lr`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    floor = config.lr * config.min_lr_ratio
    decay_steps = max_steps - config.warmup_steps
    if config.schedule == Schedule.wsd:
        decay_steps = config.decay_steps or max(1, max_steps // 10)
    done = (step - (max_steps - decay_steps) + 1) / decay_steps  # 1 at the last step
    match config.schedule:
        case Schedule.constant:
            return config.lr
        case Schedule.cosine:
            return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * done))
        case Schedule.linear | Schedule.wsd:
            return config.lr + (floor - config.lr) * max(0.0, done)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: int, max_steps: int) -> None:
    """Set the learning rate of every parameter group to that of optimizer step `step` (the first is 0)."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step, max_steps) * group.get(_LR_SCALE, 1.0)


def keep_group_rates(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Let the schedule scale each parameter group's own learning rate, which relates to optimizer.lr.

    Call it before the first `set_learning_rate`, which overwrites the groups' rates.
    """
    for group in optimizer.param_groups:
        group.setdefault(_LR_SCALE, float(group["lr"]) / config.lr)


def step_if_finite(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> torch.Tensor:
    """Update the weights unless `norm` is not finite; return 1 if the update was skipped, else 0 (a scalar).

    The decision is made on the device, so the host does not wait. Adam's fused kernels read it themselves; for any
    other optimizer `masked_step` restores weights, moments and step counters.
    """
    skipped = (~torch.isfinite(norm)).to(torch.float32)
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
    uninitialized, and a subclass other than Meshbook's AdamW may compute anything around the kernel.
    """
    if isinstance(optimizer, Muon | AdamW8bit):
        return True
    fused = all(group["fused"] for group in optimizer.param_groups if "fused" in group)
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, AdamW) and fused


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW; a step passes local shards to the kernel instead of DTensors.

    The update is elementwise, so the bits are the same. For a list of DTensors, torch derives the placements of each
    result at the first step and hashes them at each later one: 1.7 s and 15 ms of processor time for 270 parameters on
    a mesh of two axes, where local shards take 16 ms and 5 ms. State dicts hold DTensors as before.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill the lists of parameters, gradients, moments and step counters with local shards.

        Overrides a private method of torch.optim.Adam, whose `step` passes the lists to the kernel.
        """
        is_complex: bool = super()._init_group(group, *lists)
        parameters, gradients, *moments, _steps = lists
        for index, parameter in enumerate(parameters):
            if isinstance(parameter, DTensor):
                for each in (gradients, *filter(None, moments)):
                    each[index] = _shard_like(parameter, each[index])
        parameters[:] = map(local_tensor, parameters)
        return is_complex


def _shard_like(parameter: DTensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor with the placements of its parameter."""
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a gradient or moment of a DTensor is a {type(tensor).__name__}")
    if tensor.placements != parameter.placements:
        tensor = tensor.redistribute(parameter.device_mesh, parameter.placements)
    return tensor.to_local()


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
