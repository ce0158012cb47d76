"""`peft`: adapters (LoRA). Low-rank matrices are trained next to frozen base weights."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum

from components.config.schema.checks import above, at_least, field_values, raise_all

ALL_LINEAR = "all-linear"
"""Target that selects every linear layer except the output head."""


class PeftMethod(StrEnum):
    """none: train every parameter; lora: train a pair of low-rank matrices per target layer (Hu et al. 2021).

    qlora: lora with the frozen weights of the target layers stored in 4 bits (NF4, Dettmers et al. 2023).
    """

    none = "none"
    lora = "lora"
    qlora = "qlora"


class PeftExport(StrEnum):
    """adapter: the adapters in PEFT's format; merged: the model with the adapters added to its weights; or both."""

    adapter = "adapter"
    merged = "merged"
    both = "both"


@dataclass(kw_only=True, slots=True)
class PeftConfig:
    """Layers that get adapters, and their size: y = W x + (alpha / rank) B A x, with W frozen."""

    method: PeftMethod = PeftMethod.none
    """none (train every parameter), lora or qlora (lora over 4-bit base weights). With none, the other keys must keep
    their defaults."""
    rank: int = 16
    """Rank of the update: number of rows of A and of columns of B."""
    alpha: float = 32.0
    """Numerator of the scaling alpha / rank of the update B A x; greater than 0."""
    dropout: float = 0.0
    """Dropout probability of the inputs of A in training, in [0, 1)."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Layers that get adapters: [all-linear] for every linear layer except the output head, or suffixes of module
    names, such as [q_proj, mlp.up_proj]."""
    target_parameters: list[str] = field(default_factory=list)
    """Matrices of fused experts that get adapters, one pair per expert: suffixes of parameter names, such as
    [mlp.experts.gate_up_proj, mlp.experts.down_proj]. Their base weights are not quantized under qlora."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rank-stabilized LoRA, Kalajdzievski 2023); useful for large ranks."""
    dora: bool = False
    """Also train the norm of each row of W + (alpha / rank) B A (weight-decomposed LoRA, Liu et al. 2024); slower."""
    export: PeftExport = PeftExport.both
    """What to export at the end: adapter (RUN_DIR/adapter, loaded by PEFT), merged (RUN_DIR/export, loaded by
    transformers) or both."""

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained and the base weights are frozen."""
        return self.method != PeftMethod.none

    @property
    def quantizes(self) -> bool:
        """Whether the weights of the target layers are stored in 4 bits."""
        return self.method == PeftMethod.qlora

    @property
    def scaling(self) -> float:
        """Factor of the update B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __post_init__(self) -> None:
        problems = [*at_least("peft.rank", self.rank, 1), *above("peft.alpha", self.alpha, 0)]
        if not 0 <= self.dropout < 1:
            problems.append(f"peft.dropout={self.dropout}: must be at least 0 and less than 1")
        if self.target_parameters and self.dropout:
            problems.append(
                f"peft.dropout={self.dropout}: experts are adapted by their matrices (peft.target_parameters), whose "
                "inputs dropout cannot reach; set peft.dropout=0"
            )
        if self.target_parameters and self.dora:
            problems.append("peft.dora=true: is not defined for peft.target_parameters; set peft.dora=false")
        if not self.targets and not self.target_parameters:
            problems.append(
                f"peft.targets=[]: name at least one layer, or {ALL_LINEAR}, or experts by peft.target_parameters"
            )
        elif ALL_LINEAR in self.targets and len(self.targets) > 1:
            problems.append(f"peft.targets={self.targets}: {ALL_LINEAR} cannot be combined with names; remove either")
        if not self.adapts:
            problems += [
                f"peft.{name}={value}: peft.method=none trains every parameter, without adapters; add peft=lora"
                for name, value in self._changed().items()
            ]
        raise_all(problems)

    def _changed(self) -> dict[str, object]:
        """Return the fields whose value differs from the default, by name."""
        defaults = {each.name: each.default for each in fields(self) if each.default is not MISSING}
        defaults |= {"targets": [ALL_LINEAR], "target_parameters": []}
        return {name: value for name, value in field_values(self).items() if value != defaults[name]}
