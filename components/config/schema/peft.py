"""`peft`: train small matrices beside the model's own (LoRA), which stay as they are."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum

from components.config.schema.checks import above, at_least, field_values, raise_all

ALL_LINEAR = "all-linear"
"""Every linear layer but the output head."""


class PeftMethod(StrEnum):
    """none: every parameter is trained; lora: a pair of matrices of low rank beside each target (Hu et al. 2021).

    qlora: lora, with the targets' own weights, which are frozen, in 4 bits (NF4, Dettmers et al. 2023).
    """

    none = "none"
    lora = "lora"
    qlora = "qlora"


class PeftExport(StrEnum):
    """adapter: what was trained, in PEFT's own format; merged: the model with it added in; both."""

    adapter = "adapter"
    merged = "merged"
    both = "both"


@dataclass(kw_only=True, slots=True)
class PeftConfig:
    """Which layers get adapters, and of what size: y = W x + alpha / rank B A x, with W frozen."""

    method: PeftMethod = PeftMethod.none
    """none, lora or qlora; the other keys are theirs."""
    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float = 32.0
    """What A and B give is scaled by alpha / rank."""
    dropout: float = 0.0
    """Probability with which an input of A is dropped in training; 0: none."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """all-linear (every linear layer but the output head), or ends of module names, such as q_proj or mlp.up_proj."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rank-stabilised, Kalajdzievski 2023): for large ranks."""
    dora: bool = False
    """Train the length of each row of W + alpha / rank B A as well (weight-decomposed, Liu et al. 2024)."""
    export: PeftExport = PeftExport.both
    """adapter: RUN/adapter, for PEFT; merged: RUN/export, for transformers; or both."""

    @property
    def adapts(self) -> bool:
        """Whether there are adapters, and the model's own weights are frozen."""
        return self.method != PeftMethod.none

    @property
    def quantizes(self) -> bool:
        """Whether weights that have adapters are held in 4 bits."""
        return self.method == PeftMethod.qlora

    @property
    def scaling(self) -> float:
        """By what the product of B and A is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __post_init__(self) -> None:
        problems = [*at_least("peft.rank", self.rank, 1), *above("peft.alpha", self.alpha, 0)]
        if not 0 <= self.dropout < 1:
            problems.append(f"peft.dropout={self.dropout}: must be at least 0 and less than 1")
        if not self.targets:
            problems.append(f"peft.targets=[]: name at least one layer, or {ALL_LINEAR}")
        elif ALL_LINEAR in self.targets and len(self.targets) > 1:
            problems.append(f"peft.targets={self.targets}: {ALL_LINEAR} stands alone; leave it or the other names out")
        if not self.adapts:
            problems += [
                f"peft.{name}={value}: peft.method=none trains every parameter, without adapters; add peft=lora"
                for name, value in self._changed().items()
            ]
        raise_all(problems)

    def _changed(self) -> dict[str, object]:
        """Return the values of the fields that are not at their default."""
        defaults = {each.name: [ALL_LINEAR] if each.default is MISSING else each.default for each in fields(self)}
        return {name: value for name, value in field_values(self).items() if value != defaults[name]}
