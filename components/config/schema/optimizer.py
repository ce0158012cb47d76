"""`optimizer`: update rule and learning-rate schedule. One class per kind of optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from components.config.schema.checks import above, at_least, own_kind, raise_all, within


class OptimizerKind(StrEnum):
    """adamw: torch's AdamW."""

    adamw = "adamw"


class Schedule(StrEnum):
    """Learning-rate schedules after the warmup."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Keys of every optimizer: learning rate, weight decay and schedule."""

    kind: OptimizerKind
    """Selects one of the subclasses below."""
    lr: float = 2e-5
    """Peak learning rate, greater than 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay, applied to parameters with two or more dims; norms and biases are not decayed."""
    schedule: Schedule = Schedule.cosine
    """Learning rate after the warmup: constant, linear or cosine (decay over all remaining steps), or wsd (constant,
    then linear decay over decay_steps)."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to lr; 0: no warmup."""
    decay_steps: int = 0
    """Optimizer steps of the final decay under wsd; 0: a tenth of training.max_steps. Other schedules ignore it."""
    min_lr_ratio: float = 0.1
    """Learning rate of the last step as a fraction of lr, in [0, 1]; ignored by the constant schedule."""

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> list[str]:
        return [
            *own_kind("optimizer", self),
            *above("optimizer.lr", self.lr, 0),
            *at_least("optimizer.weight_decay", self.weight_decay, 0),
            *at_least("optimizer.warmup_steps", self.warmup_steps, 0),
            *at_least("optimizer.decay_steps", self.decay_steps, 0),
            *within("optimizer.min_lr_ratio", self.min_lr_ratio, 0, 1),
        ]


@dataclass(kw_only=True, slots=True)
class AdamWConfig(OptimizerConfig):
    """torch.optim.AdamW (Loshchilov and Hutter 2019), with weight decay on matrices only."""

    kind: OptimizerKind = OptimizerKind.adamw
    """adamw."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the first and the second moment, each in [0, 1)."""
    eps: float = 1e-8
    """Term added to the square root of the second moment, greater than 0."""

    def _problems(self) -> list[str]:
        problems = [*OptimizerConfig._problems(self), *above("optimizer.eps", self.eps, 0)]
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            problems.append(f"optimizer.betas={self.betas}: must be two numbers in [0, 1)")
        return problems
