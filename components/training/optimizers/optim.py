"""AdamW, learning-rate schedules as pure functions of the step, and updates that skip non-finite gradients."""

from __future__ import annotations

import math

import torch
from torch import nn

from components.config.schema.optimizer import AdamWConfig, OptimizerConfig, Schedule
from components.training.optimizers.masked_step import masked_step


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; call it after sharding and loading.

    Weight decay applies to matrices, not to parameters with fewer than two dims (norms, biases). The kernel is fused
    except on the meta device, which has no fused one.
    """
    if not isinstance(config, AdamWConfig):
        raise TypeError(f"build_optimizer builds AdamW from an AdamWConfig, not from {type(config).__name__}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=trained[0].device.type != "meta",
        foreach=True if trained[0].device.type == "meta" else None,
    )


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
        group["lr"] = learning_rate(config, step, max_steps)


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
    """Return whether the optimizer's fused kernels change nothing if `found_inf` is set.

    `found_inf` and `grad_scale` are the attributes through which torch.amp.GradScaler passes the decision to fused
    optimizers. Only Adam and AdamW qualify: a skipped first step of fused SGD leaves its momentum uninitialized, and a
    subclass may compute anything around the kernel.
    """
    fused = all(group["fused"] for group in optimizer.param_groups if "fused" in group)
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and fused
