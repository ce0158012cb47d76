"""Strict conversion of nested dicts to dataclasses, which collects unknown keys, missing values and wrong types."""

from __future__ import annotations

import copy
import functools
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.config.compose.explain import explain_value, key_of_another_kind, no_kind, no_source, unknown_key
from components.config.compose.texts import UNSET, literal, unstorable
from components.config.errors import ConfigError
from components.config.kinds import at_key, have_same_keys, kind_named, kinds_of, section_of, type_hints
from components.config.schema.data import DataConfig, DataKind
from components.config.secrets import shown_value

Schema = TypeVar("Schema")

_LARGEST = 2**63 - 1
"""Largest integer that torch and safetensors accept."""


def typed(
    container: Any, schema: type[Schema], composed: Mapping[str, type] | None = None, rejected: Collection[str] = ()
) -> Schema:
    """Return `container` (nested dicts, no interpolations left) as an instance of `schema`.

    Args:
        container: Values by section and key.
        schema: A dataclass of dataclasses, or the dataclass of one section.
        composed: Section -> class that its option was composed with. Any other section gets the class of the kind that
            its values select.
        rejected: Keys that were rejected before and whose values are not in `container`.

    Raises ConfigError with all problems: unknown keys with the nearest existing one, keys of another kind, missing
    values, values of the wrong type, and the problems of each section.
    """
    builder = _Builder(known_keys(schema), composed or {}, rejected)
    result = builder.build(container, schema, "")
    if builder.problems:
        raise ConfigError(builder.problems)
    return result


def known_keys(schema: type, prefix: str = "") -> list[str]:
    """Return all dotted keys of `schema`, including sections and the keys of all kinds that a section accepts."""
    return list(dict.fromkeys(key for key, _ in _keys(schema, prefix)))


def free_keys(schema: type, prefix: str = "") -> list[str]:
    """Return the dotted keys of `schema` below which any key may be set, such as model.config."""
    return list(dict.fromkeys(key for key, hint in _keys(schema, prefix) if get_origin(hint) is dict))


def whole_number_keys(schema: type) -> set[str]:
    """Return the dotted keys of `schema` whose values are whole numbers, in every kind of their section."""
    whole: dict[str, bool] = {}
    for key, hint in _keys(schema, ""):
        kinds = set(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else {hint}
        whole[key] = whole.get(key, True) and kinds - {types.NoneType} == {int}
    return {key for key, is_whole in whole.items() if is_whole}


def _keys(schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys below `schema` with their type hints; keys shared by several kinds are repeated."""
    for variant in kinds_of(schema).values() or (schema,):
        for name, hint in type_hints(variant).items():
            yield prefix + name, hint
            if is_dataclass(hint):
                yield from _keys(hint, f"{prefix}{name}.")  # type: ignore[arg-type]


@dataclass
class _Builder:
    """Builder of dataclasses that collects problems instead of raising."""

    keys: list[str]
    composed: Mapping[str, type]
    rejected: Collection[str] = ()
    problems: list[str] = field(default_factory=list)

    def build(self, values: Any, annotation: Any, prefix: str) -> Any:
        """Build a dataclass of the kind that `annotation` and `values` select; None if there are problems."""
        if not isinstance(values, dict):
            self.problems.append(
                f"{prefix.rstrip('.')}={shown_value(prefix, values)}: is a section with keys, not a value"
            )
            return None
        before = len(self.problems)
        if (schema := self._class_of(annotation, values, prefix)) is None:
            return None
        hints = type_hints(schema)
        for key in values:
            if key not in hints:
                self._report_unknown(key, values[key], schema, annotation, prefix)
        rejected = [name for name in hints if f"{prefix}{name}" in self.rejected]
        rejected += self._require(schema, values, prefix)
        arguments = {}
        for name, kind in hints.items():
            if name in values and name not in rejected:
                found = len(self.problems)
                arguments[name] = self._value(values[name], kind, schema, f"{prefix}{name}")
                if len(self.problems) > found:
                    rejected.append(name)
        built = self._construct(schema, arguments, rejected, prefix)
        return built if len(self.problems) == before else None

    def _class_of(self, annotation: Any, values: dict[str, Any], prefix: str) -> Any:
        """Return the class of a section: that of its option, or of the kind that its values select."""
        kinds = kinds_of(annotation)
        if not kinds:
            return annotation
        kind = kind_named(values, annotation)
        composed = self.composed.get(prefix.rstrip("."))
        if composed in kinds.values() and (kind is None or not have_same_keys(composed, kinds[kind])):
            return composed  # `own_kind` rejects a `kind` that does not match
        if kind is None and values.get("kind", UNSET) != UNSET:
            self.problems.append(no_kind(f"{prefix}kind", values["kind"], kinds))
            return None
        return annotation if kind is None else kinds[kind]

    def _report_unknown(self, key: str, value: Any, schema: Any, annotation: Any, prefix: str) -> None:
        """Report a key that `schema` does not have: it belongs to another kind, or does not exist."""
        kinds = kinds_of(annotation)
        kind_of_schema = next((kind for kind, each in kinds.items() if each is schema), None)
        fitting = [kind for kind, each in kinds.items() if key in type_hints(each)]
        if kind_of_schema is not None and fitting and not isinstance(value, dict):
            section = section_of(annotation) or ""
            self.problems.append(f"{prefix}{key}={value}: {key_of_another_kind(section, kind_of_schema, fitting)}")
        else:
            self.problems += [unknown_key(*leaf, self.keys) for leaf in _leaves(f"{prefix}{key}", value)]

    def _construct(self, schema: Any, arguments: dict[str, Any], rejected: list[str], prefix: str) -> Any:
        """Construct a section to collect its problems, with defaults in place of rejected values.

        Problems that mention a rejected key are dropped, since they may be consequences.
        """
        accepted = {name: value for name, value in arguments.items() if name not in rejected}
        required = [each.name for each in fields(schema) if each.default is MISSING and each.default_factory is MISSING]
        unset = {name: "unset:unset" for name in required if name not in accepted}
        try:
            return schema(**accepted, **unset)
        except ConfigError as error:
            about = "|".join(map(re.escape, rejected)) or "$."
            problems = [each for each in error.problems if not re.search(rf"\.({about})(?!\w|\.\w)", each)]
            section = section_of(schema)
            self.problems += at_key(section, prefix.rstrip("."), problems) if section and prefix else problems
        return None

    def _value(self, value: Any, kind: Any, schema: type, key: str) -> Any:
        """Build a nested section, or convert a value to the type of its field by the rules of omegaconf, as Hydra
        does."""
        if value == UNSET:
            return None
        if is_dataclass(kind):
            return self.build(value, kind, f"{key}.")
        if kind == dict[str, DataConfig] and isinstance(value, dict):
            return {name: self._source(name, source, value) for name, source in value.items()}
        if problem := unstorable(value):
            self.problems.append(f"{key}={shown_value(key, value)!r}: {problem}")
            return None
        if kind is bool and not isinstance(value, bool):
            self.problems.append(f"{key}={value}: must be true or false")
            return None
        if any(abs(number) > _LARGEST for number in _integers(value)):
            self.problems.append(f"{key}={value}: must fit in 64 bits, at most {_LARGEST}")
            return None
        if _has_type(value, kind):
            return copy.deepcopy(value)
        name = key.rpartition(".")[2]
        node = _node(schema)
        try:
            node[name] = literal(value)  # interpolations are already resolved: a remaining ${ is text
            converted = node[name]
        except OmegaConfBaseException as error:
            self.problems.append(f"{key}={shown_value(key, value)}: {explain_value(error)}")
            return None
        return OmegaConf.to_object(converted) if OmegaConf.is_config(converted) else converted

    def _source(self, name: str, values: Any, sources: dict[str, Any]) -> Any:
        """Build a source of a mixture; its problems are reported with the keys below data.sources.NAME."""
        key = f"data.sources.{name}"
        kind = values.get("kind", UNSET) if isinstance(values, dict) else None
        if kind == UNSET:
            self.problems.append(no_source(key, name, [other for other in sources if other != name]))
            return None
        if kind == DataKind.mixture:
            self.problems.append(f"{key}.kind=mixture: a mixture cannot be a source; add its sources to this mixture")
            return None
        named = kind_named(values, DataConfig)
        schema = DataConfig if named is None else kinds_of(DataConfig)[named]
        builder = _Builder(known_keys(schema, f"{key}."), {})
        source = builder.build(values, schema, f"{key}.")
        self.problems += builder.problems
        return source

    def _require(self, schema: type, values: dict[str, Any], prefix: str) -> list[str]:
        """Report required values that are not set, and return their names."""
        missing = []
        for entry in fields(schema):
            has_default = entry.default is not MISSING or entry.default_factory is not MISSING
            if values.get(entry.name) == UNSET or (entry.name not in values and not has_default):
                key = f"{prefix}{entry.name}"
                if key not in self.rejected:
                    self.problems.append(f"{key}: not set, and it has no default; set {key}=...")
                missing.append(entry.name)
        return missing


@functools.cache
def _node(schema: type) -> DictConfig:
    """Return a config of `schema` whose fields convert values. It takes milliseconds to make; few values need it."""
    node: DictConfig = OmegaConf.structured(schema)
    return node


def _has_type(value: Any, kind: Any) -> bool:
    """Return whether a number, text, choice or null, or a list or dict of those, has exactly the type of its field.

    It needs no conversion then.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if type(value) is list:
        return any(get_origin(each) is list and _have_type(value, get_args(each)[0]) for each in kinds)
    if type(value) is dict:
        pairs = [get_args(each) for each in kinds if get_origin(each) is dict]
        return any(_have_type(value, key) and _have_type(value.values(), of) for key, of in pairs)
    return type(value) in kinds and (value is None or isinstance(value, int | float | str | Enum))


def _have_type(values: Iterable[Any], kind: Any) -> bool:
    return all(each != UNSET and _has_type(each, kind) for each in values)


def _leaves(key: str, value: Any) -> list[tuple[str, Any]]:
    """Return the values below `key` by dotted key, so that each key of an unknown section is reported as it was
    typed."""
    if not isinstance(value, dict) or not value:
        return [(key, value)]
    return [leaf for name, nested in value.items() for leaf in _leaves(f"{key}.{name}", nested)]


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _integers(entry)
