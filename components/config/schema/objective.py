"""`objective`: the training loss. One class per kind of objective."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from components.config.schema.checks import above, at_least, own_kind, raise_all


class ObjectiveKind(StrEnum):
    """next_token: cross-entropy of the next token; dpo: direct preference optimization."""

    next_token = "next_token"
    dpo = "dpo"


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """Base of every objective. A recipe accepts the kinds that the annotation of its config field admits."""

    kind: ObjectiveKind
    """Selects one of the subclasses below."""

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> list[str]:
        return own_kind("objective", self)


@dataclass(kw_only=True, slots=True)
class NextTokenConfig(ObjectiveConfig):
    """Cross-entropy of the next token. The held-out loss is always the plain cross-entropy, without the terms below."""

    kind: ObjectiveKind = ObjectiveKind.next_token
    """next_token."""
    label_smoothing: float = 0.0
    """Share of each target distribution that is spread evenly over the vocabulary, in [0, 1)."""
    z_loss: float = 0.0
    """Coefficient of the z-loss, the squared log of the softmax denominator (logsumexp of the logits); 1e-4 is common
    in pretraining; 0: none."""

    def _problems(self) -> list[str]:
        problems = [*ObjectiveConfig._problems(self), *at_least("objective.z_loss", self.z_loss, 0)]
        if not 0 <= self.label_smoothing < 1:
            problems.append(f"objective.label_smoothing={self.label_smoothing}: must be in [0, 1)")
        return problems


@dataclass(kw_only=True, slots=True)
class PreferenceConfig(ObjectiveConfig):
    """Direct preference optimization (Rafailov et al. 2023) on pairs of a chosen and a rejected answer."""

    kind: ObjectiveKind = ObjectiveKind.dpo
    """dpo."""
    beta: float = 0.1
    """Strength of the implicit KL penalty towards the reference model, greater than 0; smaller values let the policy
    move further away."""
    label_smoothing: float = 0.0
    """Assumed share of pairs whose preference label is flipped (conservative DPO), in [0, 0.5)."""

    def _problems(self) -> list[str]:
        problems = [*ObjectiveConfig._problems(self), *above("objective.beta", self.beta, 0)]
        if not 0 <= self.label_smoothing < 0.5:
            problems.append(f"objective.label_smoothing={self.label_smoothing}: must be in [0, 0.5)")
        return problems
