"""The kinds of each section: one registry for composition, typing, messages and lists of keys.

A section with kinds is a base dataclass with a field `kind`, and a subclass per kind. To add a kind: a member of the
section's enum and a subclass in schema/, a line in `KINDS`, and an option conf/SECTION/NAME.yaml that begins with
`defaults: [/schema/SECTION/KIND@_here_, _self_]`. What it requires of other sections goes into rules/.

A recipe's config selects the kinds that it takes by the annotation of its field: the base takes every kind
(`optimizer: OptimizerConfig`), a subclass its own kind (`objective: NextTokenConfig`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from components.config.schema.cluster import ClusterKind, LocalClusterConfig, SlurmClusterConfig
from components.config.schema.data import (
    ChatDataConfig,
    CustomDataConfig,
    DataKind,
    DocsDataConfig,
    MixtureDataConfig,
    PreferencesDataConfig,
    SftDataConfig,
    TextDataConfig,
)
from components.config.schema.model import CausalLMConfig, ModelKind
from components.config.schema.objective import NextTokenConfig, ObjectiveKind, PreferenceConfig
from components.config.schema.optimizer import AdamWConfig, OptimizerKind

KINDS: Mapping[str, Mapping[StrEnum, type[Any]]] = {
    "cluster": {
        ClusterKind.local: LocalClusterConfig,
        ClusterKind.slurm: SlurmClusterConfig,
    },
    "data": {
        DataKind.docs: DocsDataConfig,
        DataKind.sft: SftDataConfig,
        DataKind.chat: ChatDataConfig,
        DataKind.text: TextDataConfig,
        DataKind.custom: CustomDataConfig,
        DataKind.mixture: MixtureDataConfig,
        DataKind.preferences: PreferencesDataConfig,
    },
    "model": {ModelKind.causal_lm: CausalLMConfig},
    "objective": {ObjectiveKind.next_token: NextTokenConfig, ObjectiveKind.dpo: PreferenceConfig},
    "optimizer": {OptimizerKind.adamw: AdamWConfig},
}
"""Section -> kind -> dataclass."""

WITHOUT_KIND: Mapping[str, StrEnum] = {
    "cluster": ClusterKind.local,
    "model": ModelKind.causal_lm,
    "objective": ObjectiveKind.next_token,
    "optimizer": OptimizerKind.adamw,
}
"""Kind of a section whose values name none: frozen configs of older versions do not. `data` must name its kind."""


def section_of(schema: object) -> str | None:
    """Return the section (config group) whose kinds a field annotated with `schema` takes; None: it has no kinds."""
    if not isinstance(schema, type):
        return None
    return next(
        (name for name, kinds in KINDS.items() if any(issubclass(each, schema) for each in kinds.values())), None
    )


def kinds_of(schema: Any) -> dict[StrEnum, type[Any]]:
    """Return the kinds that a field annotated with `schema` takes; empty if its class has no kinds."""
    section = section_of(schema)
    if section is None:
        return {}
    return {kind: each for kind, each in KINDS[section].items() if issubclass(each, schema)}


def kind_named(values: Mapping[str, Any], schema: type) -> StrEnum | None:
    """Return the kind of a section from its values, or None if they name none that a field of `schema` takes."""
    kinds = kinds_of(schema)
    name = values.get("kind", WITHOUT_KIND.get(section_of(schema) or ""))
    return next((kind for kind in kinds if str(kind) == str(name)), None)


def have_same_keys(first: Any, second: Any) -> bool:
    """Whether two kinds differ in nothing but their rules, so that `kind` may be set without choosing an option."""
    return {each.name for each in fields(first)} == {each.name for each in fields(second)}


def at_key(section: str, key: str, problems: Iterable[str]) -> list[str]:
    """Return the problems that a section's dataclass reports, with its keys (model.path) written as KEY.path."""
    keys = "|".join(sorted({each.name for schema in KINDS[section].values() for each in fields(schema)}))
    return [re.sub(rf"\b{section}\.(?=({keys})\b(?!\.\w))", f"{key}.", problem) for problem in problems]


def of_source(name: str, problems: Iterable[str]) -> list[str]:
    """Return the problems of a mixture's source with their keys where they are set: data.sources.NAME.path."""
    return at_key("data", f"data.sources.{name}", problems)
