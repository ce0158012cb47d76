"""`objective`: what is optimized."""

from __future__ import annotations

from dataclasses import dataclass

from components.config.schema.checks import at_least, raise_all


@dataclass(kw_only=True, slots=True)
class NextTokenConfig:
    """Cross-entropy of the next token. Held-out losses are the plain cross-entropy, whatever is set here."""

    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax's denominator; 1e-4 is usual in pretraining, 0 leaves it out."""

    def __post_init__(self) -> None:
        problems = at_least("objective.z_loss", self.z_loss, 0)
        if not 0 <= self.label_smoothing < 1:
            problems.append(f"objective.label_smoothing={self.label_smoothing}: must be in [0, 1)")
        raise_all(problems)
