"""Rules about an objective together with other sections."""

from __future__ import annotations

from components.config.schema.model import LossMethod, ModelConfig
from components.config.schema.peft import PeftConfig


def preference_problems(model: ModelConfig, peft: PeftConfig | None) -> list[str]:
    """Require what an objective of two passes needs: no dropout, and losses weighted by row."""
    problems = []
    if peft is not None and peft.adapts and peft.dropout:
        problems.append(
            f"peft.dropout={peft.dropout}: the two passes of objective.kind=dpo would drop different values; set "
            "peft.dropout=0"
        )
    if model.loss == LossMethod.liger:
        problems.append("model.loss=liger: its kernel cannot weight the losses of rows; set model.loss=chunked")
    return problems
