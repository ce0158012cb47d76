"""Rules about data: held-out split, weights of sources, preference pairs and what they require of the model."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import get_type_hints

from components.config.kinds import KINDS, kinds_of
from components.config.schema.data import (
    DataConfig,
    DataKind,
    LabelsDataConfig,
    MixtureDataConfig,
    PreferencesDataConfig,
    RowsDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from components.config.schema.model import LossMethod, ModelConfig
from components.config.schema.objective import (
    DPOConfig,
    KTOConfig,
    PreferenceConfig,
    Reference,
    RewardConfig,
    ScoreConfig,
)
from components.config.schema.peft import PeftConfig
from components.config.schema.recipes import RecipeConfig
from components.config.schema.training import GenerationConfig, TrainingConfig


def accepted_kinds(recipe: type[RecipeConfig], section: str) -> Collection[StrEnum]:
    """Return the kinds of a section that a recipe accepts: those of its field, pairs only with an objective of pairs.

    Labels are accepted only with an objective of labels. A field annotated with a class that is not in the registry of
    kinds accepts every kind.
    """
    hints = get_type_hints(recipe)
    kinds = set(kinds_of(hints.get(section)) or KINDS[section])
    objective = hints.get("objective", object)
    classes = [each for each in (objective, *kinds_of(objective).values()) if isinstance(each, type)]
    if not any(issubclass(each, PreferenceConfig | RewardConfig) for each in classes):
        kinds.discard(DataKind.preferences)
    if not any(issubclass(each, ScoreConfig) for each in classes):
        kinds.discard(DataKind.labels)
    return kinds


def data_problems(data: DataConfig, *, takes_pairs: bool, takes_labels: bool = False) -> list[str]:
    """Require a held-out split, weights only on sources of a mixture, and pairs or labels only if the recipe takes
    them."""
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
    problems += [
        f"{key}.kind={part.kind}: holds labeled texts, which this recipe does not train on; use recipes/classify.py, "
        f"or choose another option of {key}"
        for key, part in parts.items()
        if isinstance(part, LabelsDataConfig) and not takes_labels
    ]
    if data.weight is not None:
        problems.append(f"data.weight={data.weight}: only sources of a mixture have weights; remove it")
    sources = data.sources if isinstance(data, MixtureDataConfig) else {"": data}
    if any(
        each.eval_fraction
        or each.eval_split is not None
        or (isinstance(each, RowsDataConfig | TokensDataConfig) and each.eval_path)
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
        other = "data.eval_path" if isinstance(data, TokensDataConfig) else other
        problems.append(f"data.eval_fraction={data.eval_fraction}: {rule}; set it above 0, or set {other}")
    return problems


def ramp_problems(training: TrainingConfig, data: DataConfig) -> list[str]:
    """Require plain text for a ramp of the length: a cut sample of another kind would lose its prompt."""
    if not training.seq_len_ramp:
        return []
    sources = data.sources.values() if isinstance(data, MixtureDataConfig) else [data]
    return [
        f"training.seq_len_ramp={training.seq_len_ramp}: cuts rows into shorter ones, which would separate answers "
        f"from their prompts under data.kind={each.kind}; use data=text or data=tokens, or remove the ramp"
        for each in sources
        if not isinstance(each, TextDataConfig | TokensDataConfig)
    ]


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


def score_problems(
    objective: ScoreConfig, data: DataConfig, model: ModelConfig, generation: GenerationConfig
) -> list[str]:
    """Require the data that a score objective learns from, and reject settings that a score head does not have."""
    kind, problems = objective.kind, []
    if isinstance(objective, RewardConfig):
        if not isinstance(data, PreferencesDataConfig):
            problems.append(f"objective.kind={kind}: learns from pairs of answers; set data=preferences")
        elif data.label_column is not None:
            problems.append(
                f"data.label_column={data.label_column}: objective.kind={kind} learns from pairs of answers; remove it"
            )
        elif data.pack:
            problems.append(
                f"data.pack=true: objective.kind={kind} compares the scores of neighboring rows with one answer each, "
                "but a packed row holds several; set data.pack=false"
            )
    elif not isinstance(data, LabelsDataConfig):
        problems.append(
            f"data.kind={data.kind}: objective.kind={kind} learns from labeled texts; set data=labels, or "
            "objective=reward for preference pairs"
        )
    if model.loss not in (LossMethod.auto, LossMethod.logits):
        problems.append(
            f"model.loss={model.loss}: there is no LM head; the loss of a score head needs few logits; set "
            "model.loss=auto"
        )
    if generation.prompts or (generation.samples and generation != GenerationConfig()):
        problems.append("generation: a model with a score head generates no text; remove generation.*")
    return problems
