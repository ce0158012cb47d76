"""The kinds of each section, for composition, typing and error messages.

A section with kinds is a base dataclass with a field `kind` and one subclass per kind. To add a kind, add a member to
the section's enum, a subclass in schema/, a line in `KINDS`, and an option conf/SECTION/NAME.yaml with the line
`kind: KIND`. Its requirements on other sections go into rules.py. docs/extend.md lists the files that turn a kind into
an object.

The annotation of a recipe's config field selects the kinds that the recipe accepts: the base class accepts all
(`optimizer: OptimizerConfig`), a subclass only its own (`objective: NextTokenConfig`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any, ClassVar, get_origin, get_type_hints

from components.config.schema.cluster import (
    ClusterKind,
    CustomClusterConfig,
    KubernetesClusterConfig,
    LocalClusterConfig,
    SlurmClusterConfig,
)
from components.config.schema.data import (
    ChatDataConfig,
    CustomDataConfig,
    DataKind,
    DocsDataConfig,
    LabelsDataConfig,
    MixtureDataConfig,
    PreferencesDataConfig,
    SftDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from components.config.schema.model import CausalLMConfig, ModelKind
from components.config.schema.objective import (
    CISPOConfig,
    ClassificationConfig,
    DAPOConfig,
    DistillationConfig,
    DPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    KTOConfig,
    NextTokenConfig,
    ObjectiveKind,
    ORPOConfig,
    ReinforcePPConfig,
    RewardConfig,
    RLOOConfig,
    SimPOConfig,
)
from components.config.schema.optimizer import (
    AdamW8bitConfig,
    AdamWConfig,
    CustomOptimizerConfig,
    LionConfig,
    MuonConfig,
    NorMuonConfig,
    OptimizerKind,
    SGDConfig,
)
from components.config.schema.rollouts import PromptsDataConfig

KINDS: Mapping[str, Mapping[StrEnum, type[Any]]] = {
    "cluster": {
        ClusterKind.local: LocalClusterConfig,
        ClusterKind.slurm: SlurmClusterConfig,
        ClusterKind.k8s: KubernetesClusterConfig,
        ClusterKind.custom: CustomClusterConfig,
    },
    "data": {
        DataKind.docs: DocsDataConfig,
        DataKind.sft: SftDataConfig,
        DataKind.chat: ChatDataConfig,
        DataKind.text: TextDataConfig,
        DataKind.custom: CustomDataConfig,
        DataKind.mixture: MixtureDataConfig,
        DataKind.preferences: PreferencesDataConfig,
        DataKind.labels: LabelsDataConfig,
        DataKind.tokens: TokensDataConfig,
        DataKind.prompts: PromptsDataConfig,
    },
    "model": {ModelKind.causal_lm: CausalLMConfig},
    "objective": {
        ObjectiveKind.next_token: NextTokenConfig,
        ObjectiveKind.distillation: DistillationConfig,
        ObjectiveKind.dpo: DPOConfig,
        ObjectiveKind.simpo: SimPOConfig,
        ObjectiveKind.orpo: ORPOConfig,
        ObjectiveKind.kto: KTOConfig,
        ObjectiveKind.classification: ClassificationConfig,
        ObjectiveKind.reward: RewardConfig,
        ObjectiveKind.grpo: GRPOConfig,
        ObjectiveKind.dr_grpo: DrGRPOConfig,
        ObjectiveKind.dapo: DAPOConfig,
        ObjectiveKind.cispo: CISPOConfig,
        ObjectiveKind.gspo: GSPOConfig,
        ObjectiveKind.rloo: RLOOConfig,
        ObjectiveKind.reinforce_pp: ReinforcePPConfig,
    },
    "optimizer": {
        OptimizerKind.adamw: AdamWConfig,
        OptimizerKind.adamw8bit: AdamW8bitConfig,
        OptimizerKind.lion: LionConfig,
        OptimizerKind.muon: MuonConfig,
        OptimizerKind.normuon: NorMuonConfig,
        OptimizerKind.sgd: SGDConfig,
        OptimizerKind.custom: CustomOptimizerConfig,
    },
}
"""Section -> kind -> dataclass."""

WITHOUT_KIND: Mapping[str, StrEnum] = {
    "cluster": ClusterKind.local,
    "model": ModelKind.causal_lm,
    "objective": ObjectiveKind.next_token,
    "optimizer": OptimizerKind.adamw,
}
"""Default kind of a section without the key `kind`, as in frozen configs of older versions. `data` has no default."""


def section_of(schema: object) -> str | None:
    """Return the section (config group) of a field annotated with `schema`, or None if the class has no kinds."""
    if not isinstance(schema, type):
        return None
    return next(
        (name for name, kinds in KINDS.items() if any(issubclass(kind, schema) for kind in kinds.values())), None
    )


def _field_types(schema: type) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(schema).items() if get_origin(hint) is not ClassVar}


type_hints: Callable[[type], dict[str, Any]] = functools.cache(_field_types)
"""The types of a dataclass's fields by name. typing.get_type_hints evaluates the annotations anew in each call."""


def kinds_of(schema: Any) -> dict[StrEnum, type[Any]]:
    """Return the kinds that a field annotated with `schema` accepts; empty if the class has no kinds."""
    section = section_of(schema)
    if section is None:
        return {}
    return {kind: each for kind, each in KINDS[section].items() if issubclass(each, schema)}


def kind_named(values: Mapping[str, Any], schema: type) -> StrEnum | None:
    """Return the kind that the values of a section select, or None if a field of type `schema` does not accept it."""
    kinds = kinds_of(schema)
    name = values.get("kind", WITHOUT_KIND.get(section_of(schema) or ""))
    return next((kind for kind in kinds if str(kind) == str(name)), None)


def have_same_keys(first: Any, second: Any) -> bool:
    """Return whether two kinds have the same fields, so that `kind` may be set without choosing another option."""
    return {field.name for field in fields(first)} == {field.name for field in fields(second)}


def at_key(section: str, key: str, problems: Iterable[str]) -> list[str]:
    """Return the problems of a section's dataclass with its keys (model.path) rewritten to KEY.path."""
    keys = "|".join(sorted({field.name for schema in KINDS[section].values() for field in fields(schema)}))
    return [re.sub(rf"\b{section}\.(?=({keys})\b(?!\.\w))", f"{key}.", problem) for problem in problems]


def of_source(name: str, problems: Iterable[str]) -> list[str]:
    """Return the problems of a source of a mixture with its keys (data.path) rewritten to data.sources.NAME.path."""
    problems = [problem.replace("write data=", f"write +data@data.sources.{name}=") for problem in problems]
    return at_key("data", f"data.sources.{name}", problems)
