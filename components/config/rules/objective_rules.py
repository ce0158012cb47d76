"""Rules about what an objective requires of the model and the adapters."""

from __future__ import annotations

from components.config.schema.model import LossMethod, ModelConfig
from components.config.schema.peft import PeftConfig


def preference_problems(model: ModelConfig, peft: PeftConfig | None) -> list[str]:
    """Require what DPO with its two forward passes needs: no dropout, and a loss kernel that supports row weights."""
    problems = []
    if peft is not None and peft.adapts and peft.dropout:
        problems.append(
            f"peft.dropout={peft.dropout}: the two forward passes of objective.kind=dpo would drop different values; "
            "set peft.dropout=0"
        )
    if model.loss == LossMethod.liger:
        problems.append("model.loss=liger: liger-kernel does not support per-row weights; set model.loss=chunked")
    return problems
