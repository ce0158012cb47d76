"""From nested dicts to dataclasses, strictly: unknown keys, missing values and wrong types, all told at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.config.compose.explain import explain_value, no_source, unknown_key
from components.config.compose.texts import UNSET, literal, unstorable
from components.config.errors import ConfigError
from components.config.schema.data import DATA_KINDS, DataConfig, DataKind, of_source

Schema = TypeVar("Schema")

LARGEST = 2**63 - 1
"""The largest whole number that torch and safetensors take."""


def typed(
    container: Any, schema: type[Schema], data_schema: type | None = None, refused: Collection[str] = ()
) -> Schema:
    """Return `container` (nested dicts, no interpolations left) as an instance of `schema`.

    Args:
        container: Values by section and key.
        schema: A dataclass of dataclasses.
        data_schema: The class of the section `data`, one of DATA_KINDS; anything else: the one data.kind names.
        refused: Keys that were refused before, whose values are not in `container`.

    Raises ConfigError with every problem: unknown keys with the nearest known one, values that are missing or of
    the wrong type, and what each section says of itself.
    """
    builder = _Builder(known_keys(schema), data_schema if data_schema in DATA_KINDS.values() else None, refused)
    result = builder.build(container, schema, "")
    if builder.problems:
        raise ConfigError(builder.problems)
    return result


def known_keys(schema: type, prefix: str = "") -> list[str]:
    """Return every dotted key of `schema`, sections included, with those of all kinds of data."""
    keys = []
    for name, kind in get_type_hints(schema).items():
        keys.append(prefix + name)
        for variant in DATA_KINDS.values() if kind is DataConfig else [kind]:
            if is_dataclass(variant):
                keys += known_keys(variant, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))


def free_keys(schema: type, prefix: str = "") -> list[str]:
    """Return the dotted keys of `schema` under which any name may be set, such as model.config."""
    keys = []
    for name, kind in get_type_hints(schema).items():
        if get_origin(kind) is dict:
            keys.append(prefix + name)
        for variant in DATA_KINDS.values() if kind is DataConfig else [kind]:
            if is_dataclass(variant):
                keys += free_keys(variant, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))


@dataclass
class _Builder:
    """Builds dataclasses and collects what is wrong with them on the way."""

    known: list[str]
    data_schema: type | None
    refused: Collection[str] = ()
    problems: list[str] = field(default_factory=list)

    def build(self, values: Any, schema: Any, prefix: str) -> Any:
        """Build one dataclass from `values`; None where it cannot be built."""
        if not isinstance(values, dict):
            self.problems.append(f"{prefix.rstrip('.')}={values}: is a section with keys, not a value")
            return None
        hints, before = get_type_hints(schema), len(self.problems)
        for key in values:
            if key not in hints:
                self.problems += [unknown_key(*leaf, self.known) for leaf in _leaves(f"{prefix}{key}", values[key])]
        node = OmegaConf.structured(schema)
        refused = [name for name in hints if f"{prefix}{name}" in self.refused]
        refused += self._require(schema, values, prefix)
        arguments = {}
        for name, kind in hints.items():
            if name in values and name not in refused:
                found = len(self.problems)
                arguments[name] = self._value(values[name], kind, node, f"{prefix}{name}")
                if len(self.problems) > found:
                    refused.append(name)
        made = self._construct(schema, arguments, refused)
        return made if len(self.problems) == before else None

    def _construct(self, schema: Any, arguments: dict[str, Any], refused: list[str]) -> Any:
        """Construct a section for what it says of itself, with defaults for what was refused.

        What concerns a refused value is left out: it could be a mere consequence.
        """
        accepted = {name: value for name, value in arguments.items() if name not in refused}
        required = [each.name for each in fields(schema) if each.default is MISSING and each.default_factory is MISSING]
        unset = {name: "unset:unset" for name in required if name not in accepted}
        try:
            return schema(**accepted, **unset)
        except ConfigError as error:
            about = "|".join(map(re.escape, refused)) or "$."
            self.problems += [each for each in error.problems if not re.search(rf"\.({about})(?!\w|\.\w)", each)]
        return None

    def _value(self, value: Any, kind: Any, node: DictConfig, key: str) -> Any:
        """Build a section, or convert a value by omegaconf's rules for the field (the same that Hydra applies)."""
        if value == UNSET:
            return None
        if is_dataclass(kind):
            return self.build(value, (self.data_schema or _schema_of(value)) if kind is DataConfig else kind, f"{key}.")
        if kind == dict[str, DataConfig] and isinstance(value, dict):
            return {name: self._source(name, source, value) for name, source in value.items()}
        if problem := unstorable(value):
            self.problems.append(f"{key}={value!r}: {problem}")
            return None
        if kind is bool and not isinstance(value, bool):
            self.problems.append(f"{key}={value}: must be true or false")
            return None
        if any(abs(number) > LARGEST for number in _integers(value)):
            self.problems.append(f"{key}={value}: must fit in 64 bits, at most {LARGEST}")
            return None
        name = key.rpartition(".")[2]
        try:
            node[name] = literal(value)  # references were followed before: what looks like one is text
            converted = node[name]
        except OmegaConfBaseException as error:
            self.problems.append(f"{key}={value}: {explain_value(error)}")
            return None
        return OmegaConf.to_object(converted) if OmegaConf.is_config(converted) else converted

    def _source(self, name: str, values: Any, sources: dict[str, Any]) -> Any:
        """Build one source of a mixture; what is wrong with it is told by the keys that it has there."""
        key = f"data.sources.{name}"
        kind = values.get("kind", UNSET) if isinstance(values, dict) else None
        if kind == UNSET:
            self.problems.append(no_source(key, name, [other for other in sources if other != name]))
            return None
        if kind == DataKind.mixture:
            self.problems.append(f"{key}.kind=mixture: a mixture is no source of another; add its sources to this one")
            return None
        builder = _Builder(known_keys(_schema_of(values), f"{key}."), None)
        source = builder.build(values, _schema_of(values), f"{key}.")
        self.problems += of_source(name, builder.problems)
        return source

    def _require(self, schema: type, values: dict[str, Any], prefix: str) -> list[str]:
        """Report the values that must be given and are not, and return their names."""
        missing = []
        for entry in fields(schema):
            has_default = entry.default is not MISSING or entry.default_factory is not MISSING
            if values.get(entry.name) == UNSET or (entry.name not in values and not has_default):
                key = f"{prefix}{entry.name}"
                if key not in self.refused:
                    self.problems.append(f"{key}: not set, and it has no default; set {key}=...")
                missing.append(entry.name)
        return missing


def _schema_of(data: Any) -> type[DataConfig]:
    """The class that the kind of a data section, or of a source, names."""
    kind = data.get("kind") if isinstance(data, dict) else None
    return next((schema for name, schema in DATA_KINDS.items() if str(name) == str(kind)), DataConfig)


def _leaves(key: str, value: Any) -> list[tuple[str, Any]]:
    """The values below `key` with their dotted keys; of an unknown section each is told, as it was typed."""
    if not isinstance(value, dict) or not value:
        return [(key, value)]
    return [leaf for name, nested in value.items() for leaf in _leaves(f"{key}.{name}", nested)]


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _integers(entry)
