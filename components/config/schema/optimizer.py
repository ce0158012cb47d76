"""`optimizer`: update rule and learning-rate schedule. One class per kind of optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from components.protocol.errors import IMPORT_PATH, above, at_least, own_kind, pattern_problems, raise_all, within

if TYPE_CHECKING:
    from components.config.schema.training import StageConfig, TrainingConfig


class OptimizerKind(StrEnum):
    """adamw, sgd: torch's; adamw8bit: AdamW with 8-bit moments; lion: Lion, with one moment; muon, normuon: Muon or
    NorMuon for matrices and AdamW for the rest; custom: a function of yours."""

    adamw = "adamw"
    adamw8bit = "adamw8bit"
    lion = "lion"
    muon = "muon"
    normuon = "normuon"
    sgd = "sgd"
    custom = "custom"


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
    """Decoupled weight decay, applied to matrices; norms and biases are not decayed."""
    schedule: Schedule = Schedule.cosine
    """Learning rate after the warmup: constant, linear or cosine (decay over all remaining steps), or wsd (constant,
    then linear decay over decay_steps)."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to lr; 0: no warmup."""
    decay_steps: int = 0
    """Optimizer steps of the final decay under wsd, at most those after the warmup; 0: a tenth of the run's steps.
    Other schedules ignore it."""
    min_lr_ratio: float = 0.1
    """Learning rate of the last step as a fraction of lr, in [0, 1]; ignored by the constant schedule."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Other rates for some of the trained parameters: [{match: embed_tokens, lr: 1e-5, weight_decay: 0}, ...]. `match`
    is a regular expression that is found in transformers' name of the parameter; of several groups the first that
    matches counts. lr is the peak of the same schedule; weight_decay also applies to norms and biases. Either may be
    left out."""

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
            *self._group_problems(),
        ]

    def _group_problems(self) -> list[str]:
        problems: list[str] = []
        for number, group in enumerate(self.groups):
            key = f"optimizer.groups[{number}]={group}"
            numbers = {name: value for name, value in group.items() if name in ("lr", "weight_decay")}
            if unknown := sorted(group.keys() - {"match", "lr", "weight_decay"}):
                problems.append(f"{key}: has no key {unknown[0]}; use match, lr and weight_decay")
            if not isinstance(group.get("match"), str) or not numbers:
                problems.append(
                    f"{key}: needs match, a regular expression, and lr or weight_decay; add what is missing"
                )
            for name, value in numbers.items():
                given = f"optimizer.groups[{number}].{name}"
                if type(value) not in (int, float):
                    problems.append(f"{given}={value}: must be a number")
                elif name == "weight_decay":
                    problems += at_least(given, value, 0)
                elif value == 0:
                    problems.append(
                        f"{given}=0: must be greater than 0; to keep weights as they are, set training.freeze"
                    )
                else:
                    problems += above(given, value, 0)
        matches = [group["match"] for group in self.groups if isinstance(group.get("match"), str)]
        return problems + pattern_problems("optimizer.groups.match", matches)

    def decay_problems(self, training: TrainingConfig | None, steps: int | None = None) -> list[str]:
        """Require the final decay under wsd to begin after the warmup; `steps` None: training.max_steps, if set."""
        steps = steps if training is None or steps is not None else training.max_steps
        if training is None or steps is None or self.schedule is not Schedule.wsd or not self.decay_steps:
            return []
        longest = max(0, steps - self.warmup_steps)
        if self.decay_steps <= longest:
            return []
        return [
            f"optimizer.decay_steps={self.decay_steps}: must fit, after optimizer.warmup_steps={self.warmup_steps}, "
            f"into {training.length(steps)}; set it to at most {longest}, or change the others"
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
        return [*OptimizerConfig._problems(self), *_adamw_problems(self.betas, self.eps)]


@dataclass(kw_only=True, slots=True)
class AdamW8bitConfig(OptimizerConfig):
    """AdamW whose moments are stored in 8 bits, with torchao's quantization; torch's AdamW for norms, biases, and
    parameters of fewer than 4,096 values or with rows that are no multiple of 16."""

    kind: OptimizerKind = OptimizerKind.adamw8bit
    """adamw8bit."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the first and the second moment, each in [0, 1)."""
    eps: float = 1e-8
    """Term added to the square root of the second moment, greater than 0."""

    def _problems(self) -> list[str]:
        return [*OptimizerConfig._problems(self), *_adamw_problems(self.betas, self.eps)]


@dataclass(kw_only=True, slots=True)
class LionConfig(OptimizerConfig):
    """Lion (Chen et al. 2023): every weight moves by the learning rate, in the direction of the sign of a moving
    average of its gradients. Use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the
    same factor."""

    kind: OptimizerKind = OptimizerKind.lion
    """lion."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to matrices; norms and biases are not decayed."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    """Weight of the moving average beside the gradient in the update, and the average's decay rate, each in [0, 1)."""

    def _problems(self) -> list[str]:
        return [*OptimizerConfig._problems(self), *_beta_problems(self.betas)]


class MatrixScale(StrEnum):
    """Factors of Muon's learning rate that depend on the shape of a matrix."""

    rms = "rms"
    shape = "shape"


class NewtonSchulzDtype(StrEnum):
    """Dtypes of Newton-Schulz iterations."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


@dataclass(kw_only=True, slots=True)
class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024) for the matrices of decoder layers, and AdamW for embeddings, head, norms, biases and
    routers."""

    kind: OptimizerKind = OptimizerKind.muon
    """muon."""
    lr: float = 2e-4
    """Peak learning rate of matrices, greater than 0."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to matrices; norms and biases are not decayed."""
    momentum: float = 0.95
    """Decay rate of the (Nesterov) momentum, in [0, 1)."""
    ns_steps: int = 5
    """Newton-Schulz iterations, 1 to 99."""
    ns_dtype: NewtonSchulzDtype = NewtonSchulzDtype.bfloat16
    """Dtype of the Newton-Schulz iterations."""
    scale: MatrixScale = MatrixScale.rms
    """Factor of lr for a matrix. rms: 0.2 sqrt(max(outputs, inputs)), which suits AdamW's learning rates (Liu et al.
    2025); shape: sqrt(max(1, outputs / inputs)), for learning rates of about 0.02 (Jordan et al. 2024)."""
    adamw_lr: float | None = None
    """Peak learning rate of AdamW's parameters, greater than 0, with the same schedule; null: lr."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's decay rates of the first and the second moment, each in [0, 1)."""
    eps: float = 1e-8
    """Term added to the square root of AdamW's second moment, greater than 0."""

    def _problems(self) -> list[str]:
        problems = [
            *OptimizerConfig._problems(self),
            *_adamw_problems(self.betas, self.eps),
            *at_least("optimizer.ns_steps", self.ns_steps, 1),
        ]
        if self.adamw_lr is not None:
            problems += above("optimizer.adamw_lr", self.adamw_lr, 0)
        if not 0 <= self.momentum < 1:
            problems.append(f"optimizer.momentum={self.momentum}: must be in [0, 1)")
        if self.ns_steps >= 100:
            problems.append(f"optimizer.ns_steps={self.ns_steps}: must be less than 100")
        return problems


@dataclass(kw_only=True, slots=True)
class NorMuonConfig(MuonConfig):
    """NorMuon (Li et al. 2025): Muon whose orthogonalized update is divided by the root mean square that each of its
    rows (neurons) had in recent steps. With scale=rms the update of a matrix has a root mean square of 0.2."""

    kind: OptimizerKind = OptimizerKind.normuon
    """normuon."""
    beta2: float = 0.95
    """Decay rate of the mean square of each row, in [0, 1)."""

    def _problems(self) -> list[str]:
        problems = MuonConfig._problems(self)
        if not 0 <= self.beta2 < 1:
            problems.append(f"optimizer.beta2={self.beta2}: must be in [0, 1)")
        return problems


@dataclass(kw_only=True, slots=True)
class SGDConfig(OptimizerConfig):
    """torch.optim.SGD; its weight decay is added to the gradient."""

    kind: OptimizerKind = OptimizerKind.sgd
    """sgd."""
    lr: float = 1e-3
    """Peak learning rate, greater than 0."""
    weight_decay: float = 0.0
    """Coefficient of the weights in the gradient, for matrices; 0 for norms and biases."""
    momentum: float = 0.0
    """Decay rate of the momentum, in [0, 1); 0: none."""
    nesterov: bool = False
    """Nesterov momentum; needs a momentum greater than 0."""

    def _problems(self) -> list[str]:
        problems = OptimizerConfig._problems(self)
        if not 0 <= self.momentum < 1:
            problems.append(f"optimizer.momentum={self.momentum}: must be in [0, 1)")
        elif self.nesterov and not self.momentum:
            problems.append("optimizer.nesterov=true: needs optimizer.momentum greater than 0")
        return problems


@dataclass(kw_only=True, slots=True)
class CustomOptimizerConfig(OptimizerConfig):
    """An optimizer from a function of yours. Its state must consist of scalars (numbers or tensors) and
    tensors of the parameter's shape."""

    kind: OptimizerKind = OptimizerKind.custom
    """custom."""
    factory: str
    """Function as module:function, or a class; called with parameter groups (with their weight_decay) and lr=."""

    def _problems(self) -> list[str]:
        problems = OptimizerConfig._problems(self)
        if not re.fullmatch(IMPORT_PATH, self.factory):
            problems.append(f"optimizer.factory={self.factory}: must be module:function")
        return problems


def _adamw_problems(betas: list[float], eps: float) -> list[str]:
    return [*above("optimizer.eps", eps, 0), *_beta_problems(betas)]


def _beta_problems(betas: list[float]) -> list[str]:
    if len(betas) == 2 and all(0 <= beta < 1 for beta in betas):
        return []
    return [f"optimizer.betas={betas}: must be two numbers in [0, 1)"]


def learning_rate(config: OptimizerConfig, step: int, max_steps: int, stages: Sequence[StageConfig] = ()) -> float:
    """Return the learning rate of optimizer step `step` (the first is 0) of `max_steps`.

    The warmup rises linearly to `lr`; under every decaying schedule the last step has `lr x min_lr_ratio`. A run
    shorter than its warmup never reaches `lr`. Stages multiply the rate by a factor that changes linearly to the
    `lr_ratio` of a stage's last step.
    """
    factor, start = 1.0, 0
    for stage in stages:
        end = max_steps if stage.until_step is None else stage.until_step
        target = factor if stage.lr_ratio is None else stage.lr_ratio
        if step < end:
            factor += (target - factor) * (step - start + 1) / (end - start)
            break
        factor, start = target, end
    return factor * _scheduled_rate(config, step, max_steps)


def _scheduled_rate(config: OptimizerConfig, step: int, max_steps: int) -> float:
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
