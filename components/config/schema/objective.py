"""`objective`: what is optimized. One class per kind of objective."""

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
    """Base of every objective. A recipe takes the kinds that it can compute, by the annotation in its config."""

    kind: ObjectiveKind
    """Selects one of the subclasses below."""

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> list[str]:
        return own_kind("objective", self)


@dataclass(kw_only=True, slots=True)
class NextTokenConfig(ObjectiveConfig):
    """Cross-entropy of the next token. Held-out losses are the plain cross-entropy, whatever is set here."""

    kind: ObjectiveKind = ObjectiveKind.next_token
    """next_token."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax's denominator; 1e-4 is usual in pretraining, 0 leaves it out."""

    def _problems(self) -> list[str]:
        problems = [*ObjectiveConfig._problems(self), *at_least("objective.z_loss", self.z_loss, 0)]
        if not 0 <= self.label_smoothing < 1:
            problems.append(f"objective.label_smoothing={self.label_smoothing}: must be in [0, 1)")
        return problems


@dataclass(kw_only=True, slots=True)
class PreferenceConfig(ObjectiveConfig):
    """Direct preference optimization (Rafailov et al. 2023) of pairs of a chosen and a rejected answer."""

    kind: ObjectiveKind = ObjectiveKind.dpo
    """dpo."""
    beta: float = 0.1
    """Strength of the pull towards the reference model; smaller values let the policy move further from it."""
    label_smoothing: float = 0.0
    """Share of the preferences that is taken to be the wrong way round (cDPO)."""

    def _problems(self) -> list[str]:
        problems = [*ObjectiveConfig._problems(self), *above("objective.beta", self.beta, 0)]
        if not 0 <= self.label_smoothing < 0.5:
            problems.append(f"objective.label_smoothing={self.label_smoothing}: must be in [0, 0.5)")
        return problems
