"""Optimizers of a config, learning-rate schedules as pure functions, and updates that skip non-finite gradients."""

from __future__ import annotations

import math
import pkgutil
from typing import Any

import torch
from torch import nn

from components.checkpoint.tensors import Optimizers
from components.config.errors import ConfigError
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
from components.training.optimizers.adamw import AdamW
from components.training.optimizers.adamw8bit import AdamW8bit, is_quantized
from components.training.optimizers.masked_step import masked_step
from components.training.optimizers.muon import Muon, divide_parameters
from components.training.setup.prepared import Prepared

LR_SCALE = "lr_scale"
"""Key of a parameter group: factor of the schedule's learning rate; 1 if it is missing."""


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
            group[LR_SCALE] = lr / config.lr
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
        group["lr"] = learning_rate(config, step, max_steps) * group.get(LR_SCALE, 1.0)


def keep_group_rates(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Let the schedule scale each parameter group's own learning rate, which relates to optimizer.lr.

    Call it before the first `set_learning_rate`, which overwrites the groups' rates.
    """
    for group in optimizer.param_groups:
        group.setdefault(LR_SCALE, float(group["lr"]) / config.lr)


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
