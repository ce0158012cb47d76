"""Rules about data: held-out split, weights of sources, preference pairs and what they require of the model."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import get_type_hints

from components.config.kinds import KINDS, kinds_of
from components.config.schema.data import (
    DataConfig,
    DataKind,
    MixtureDataConfig,
    PreferencesDataConfig,
    RowsDataConfig,
)
from components.config.schema.model import LossMethod, ModelConfig
from components.config.schema.objective import DPOConfig, KTOConfig, PreferenceConfig, Reference
from components.config.schema.peft import PeftConfig
from components.config.schema.recipes import RecipeConfig


def accepted_kinds(recipe: type[RecipeConfig], section: str) -> Collection[StrEnum]:
    """Return the kinds of a section that a recipe accepts: those of its field, pairs only with an objective of pairs.

    A field annotated with a class that is not in the registry of kinds accepts every kind.
    """
    hints = get_type_hints(recipe)
    kinds = set(kinds_of(hints.get(section)) or KINDS[section])
    objective = hints.get("objective", object)
    classes = [each for each in (objective, *kinds_of(objective).values()) if isinstance(each, type)]
    if not any(issubclass(each, PreferenceConfig) for each in classes):
        kinds.discard(DataKind.preferences)
    return kinds


def data_problems(data: DataConfig, *, takes_pairs: bool) -> list[str]:
    """Require a held-out split, weights only on sources of a mixture, and preference pairs only if `takes_pairs`."""
    problems = []
    parts = {"data": data}
    if isinstance(data, MixtureDataConfig):
        parts |= {f"data.sources.{name}": source for name, source in data.sources.items()}
    problems += [
        f"{key}.kind={part.kind}: holds preference pairs, which this recipe does not train on; use recipes/dpo.py, "
        f"or choose another option of {key}"
        for key, part in parts.items()
        if isinstance(part, PreferencesDataConfig) and not takes_pairs
    ]
    if data.weight is not None:
        problems.append(f"data.weight={data.weight}: only sources of a mixture have weights; remove it")
    sources = data.sources if isinstance(data, MixtureDataConfig) else {"": data}
    if any(
        each.eval_fraction or each.eval_split is not None or (isinstance(each, RowsDataConfig) and each.eval_path)
        for each in sources.values()
    ):
        return problems
    rule = "nothing is held out, but every run evaluates at the end"
    if isinstance(data, MixtureDataConfig):
        problems.append(
            f"data.sources: {', '.join(sources)} have eval_fraction=0: {rule}; set data.sources.NAME.eval_fraction of "
            "one above 0, or its eval_split"
        )
    else:
        other = "data.eval_split or data.eval_path" if isinstance(data, RowsDataConfig) else "data.eval_split"
        problems.append(f"data.eval_fraction={data.eval_fraction}: {rule}; set it above 0, or set {other}")
    return problems


def preference_problems(
    objective: PreferenceConfig, data: DataConfig, model: ModelConfig, peft: PeftConfig | None
) -> list[str]:
    """Require the data that a preference objective compares, and what its two forward passes and its reference need."""
    kind, problems = objective.kind, []
    label = data.label_column if isinstance(data, PreferencesDataConfig) else None
    if isinstance(objective, KTOConfig) and label is None:
        problems.append(
            f"objective.kind={kind}: needs answers with a label; set data.label_column to the column with true and "
            "false, and data.completion_column to that with the answers"
        )
    if not isinstance(objective, KTOConfig) and label is not None:
        problems.append(
            f"data.label_column={label}: objective.kind={kind} compares pairs of answers; remove it, or set "
            "objective=kto"
        )
    adapts = peft is not None and peft.adapts
    reference = objective.reference if isinstance(objective, DPOConfig | KTOConfig) else None
    if reference is Reference.adapters_off and not adapts:
        problems.append(
            f"objective.reference={reference}: the model has no adapters; set objective.reference to precomputed or "
            "frozen_copy, or peft=lora"
        )
    if reference is Reference.frozen_copy and adapts:
        problems.append(
            f"objective.reference={reference}: the model without its adapters already is the reference, without a "
            "second copy; set objective.reference to adapters_off or precomputed"
        )
    if peft is not None and peft.adapts and peft.dropout:
        problems.append(
            f"peft.dropout={peft.dropout}: the two forward passes of objective.kind={kind} would drop different "
            "values; set peft.dropout=0"
        )
    if model.loss == LossMethod.liger:
        problems.append("model.loss=liger: liger-kernel does not support per-row weights; set model.loss=chunked")
    return problems
