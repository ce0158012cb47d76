"""From nested dicts to dataclasses, strictly: unknown keys, missing values and wrong types, all told at once."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.config.compose.explain import explain_value, unknown_key
from components.config.errors import ConfigError
from components.config.schema.data import DATA_KINDS, DataConfig

Schema = TypeVar("Schema")


def typed(container: Any, schema: type[Schema]) -> Schema:
    """Return `container` (nested dicts, no interpolations left) as an instance of `schema`.

    Raises ConfigError with every problem: unknown keys with the nearest known one, values that are missing or of
    the wrong type, and what each section says of itself.
    """
    problems: list[str] = []
    result = _build(container, schema, "", problems)
    if problems:
        raise ConfigError(problems)
    return result


def known_keys(schema: type, prefix: str = "") -> list[str]:
    """Return every dotted key of `schema`, sections included, with those of all kinds of data."""
    keys = []
    for name, kind in get_type_hints(schema).items():
        keys.append(prefix + name)
        for variant in DATA_KINDS.values() if kind is DataConfig else [kind]:
            if is_dataclass(variant):
                keys += known_keys(variant, f"{prefix}{name}.")  # type: ignore[arg-type]
    return list(dict.fromkeys(keys))


def _build(values: Any, schema: type, prefix: str, problems: list[str]) -> Any:
    """Build one dataclass from `values`, adding to `problems`; None where it cannot be built."""
    if not isinstance(values, dict):
        problems.append(f"{prefix.rstrip('.')}={values}: must be a section with keys, not a value")
        return None
    known = len(problems)
    hints = get_type_hints(schema)
    problems += [unknown_key(prefix + str(key), known_keys(schema, prefix)) for key in values if key not in hints]
    arguments: dict[str, Any] = {}
    for name, kind in hints.items():
        if name not in values:
            continue
        nested = _data_schema(values[name]) if kind is DataConfig else kind
        if is_dataclass(nested):
            arguments[name] = _build(values[name], nested, f"{prefix}{name}.", problems)  # type: ignore[arg-type]
        else:
            arguments[name] = _convert(schema, name, values[name], prefix, problems)
    problems += [
        f"{prefix}{field.name}: not set, and it has no default; set {prefix}{field.name}=..."
        for field in fields(schema)
        if values.get(field.name) == "???"
    ]
    if len(problems) > known:
        return None
    try:
        return schema(**arguments)
    except ConfigError as error:
        problems += error.problems
    except TypeError as error:
        problems.append(f"{prefix.rstrip('.') or 'config'}: {error}")
    return None


def _data_schema(values: Any) -> type[DataConfig]:
    kind = values.get("kind") if isinstance(values, dict) else None
    return next((schema for name, schema in DATA_KINDS.items() if str(name) == str(kind)), DataConfig)


def _convert(schema: type, name: str, value: Any, prefix: str, problems: list[str]) -> Any:
    """Convert one value to the field's type by omegaconf's rules (the same that Hydra applies)."""
    if value == "???":
        return None
    node = OmegaConf.structured(schema)
    try:
        node[name] = value
        converted = node[name]
    except OmegaConfBaseException as error:
        problems.append(f"{prefix}{name}={value}: {explain_value(error)}")
        return None
    return OmegaConf.to_object(converted) if OmegaConf.is_config(converted) else converted
