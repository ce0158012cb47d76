"""Optimizers of a config, and learning-rate schedules as pure functions."""

from __future__ import annotations

import math
import pkgutil
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

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

_LR_SCALE = "lr_scale"
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


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW; a step passes local shards to the kernel instead of DTensors.

    The update is elementwise, so the bits are the same. For a list of DTensors, torch derives the placements of each
    result at the first step and hashes them at each later one: 1.7 s and 15 ms of processor time for 270 parameters on
    a mesh of two axes, where local shards take 16 ms and 5 ms. State dicts hold DTensors as before.
    """

    found_inf: torch.Tensor | None = None
    """Whether to skip the next step (not 0), a scalar; read by the fused kernel."""

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
