"""Strict conversion of nested dicts to dataclasses, and the texts that Hydra or YAML would misread."""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml

from components.config.compose.explain import (
    IS_A_SECTION,
    NOT_A_MIXTURE,
    SOURCES,
    did_you_mean,
    key_of_another_kind,
    nearest,
    no_kind,
    no_source,
    unknown_key,
)
from components.config.kinds import at_key, kind_named, kinds_of, section_of, type_hints
from components.config.schema.data import DataConfig, DataKind
from components.protocol.errors import ConfigError, raise_all
from components.protocol.safe_parsing import Loader
from components.protocol.secrets import shown_value

Schema = TypeVar("Schema")
_LARGEST = 2**63 - 1
"""Largest integer that torch and safetensors accept."""
UNSET = "???"
"""Marker of a required value, as in omegaconf."""
_MARK = re.compile(r"(\\*)\$\{")
_LOST = re.compile("[\x85\ud800-\udfff]")
"""NEL, which YAML reads as a line break, and surrogates, which stand for bytes that are not UTF-8."""
Types = tuple[Any, ...]
"""Type hints that a value may have: those of a key in all kinds of its section."""
_TAG = "tag:yaml.org,2002:"
_NULL, _TEXT = f"{_TAG}null", f"{_TAG}str"
_MISREAD = {f"{_TAG}{name}" for name in ("int", "float", "bool", "value", "merge")}
_USUAL_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "y"), True) | dict.fromkeys(("false", "no", "off", "n"), False)
_Subject = Callable[[str, Any], str]
"""Return how a message names a key and its value."""


def _key_and_value(key: str, value: Any) -> str:
    return f"{key}={shown_value(key, value)}"


def typed(
    container: Any, schema: type[Schema], rejected: Collection[str] = (), subject: _Subject = _key_and_value
) -> Schema:
    """Return `container` (nested dicts, no interpolations left) as an instance of `schema`.

    Args:
        container: Values by section and key. A section has the class of the kind that its key `kind` selects.
        schema: A dataclass of dataclasses, or the dataclass of one section.
        rejected: Keys that were rejected before and whose values are not in `container`.
        subject: How a message names a value of the wrong type or an unknown key.

    Raises ConfigError with all problems: unknown keys with the nearest existing one, keys of another kind, missing
    values, values of the wrong type, and the problems of each section.
    """
    builder = _Builder(known_keys(schema), rejected, subject)
    result = builder.build(container, schema, "")
    raise_all(builder.problems)
    return result


def with_defaults(values: Any, hint: Any, default: Any = UNSET) -> Any:
    """Return nested dicts of values, completed by the defaults of dataclasses and of the kinds that they select.

    Args:
        values: Values of a field or a config; unknown keys are kept. UNSET: nobody set it.
        hint: Annotation of the values.
        default: Default of the field, which may be an instance of a dataclass.
    """
    if values == UNSET:
        is_section = is_dataclass(default) and not isinstance(default, type)
        return literal(asdict(default) if is_section else copy.copy(default))
    entry = get_args(hint)[1] if get_origin(hint) is dict else None
    schema = section_class(hint)
    if isinstance(values, dict) and section_class(entry):
        return {name: with_defaults(each, entry) for name, each in values.items()}
    if schema is None or not isinstance(values, dict):
        return values
    kinds = kinds_of(schema)
    if "kind" not in values and type(default) in kinds.values():
        values = {**values, "kind": default.kind}
    if (kind := kind_named(values, schema)) is not None:
        schema = kinds[kind]
    known, complete = type_hints(schema), dict[str, Any]()
    for each in fields(schema):
        own = getattr(default, each.name) if type(default) is schema else _default_of(each)
        complete[each.name] = with_defaults(values.get(each.name, UNSET), known[each.name], own)
    return complete | {name: value for name, value in values.items() if name not in known}


def section_class(hint: Any) -> Any:
    """Return the dataclass of a section, which may be null; None for a key that is no section."""
    return next((kind for kind in alternatives((hint,)) if isinstance(kind, type) and is_dataclass(kind)), None)


def _default_of(each: Any) -> Any:
    """Return the default of a field; the marker of a required value without one."""
    default = UNSET if each.default is MISSING else each.default
    return default if each.default_factory is MISSING else each.default_factory()


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
            if section := section_class(hint):
                yield from _keys(section, f"{prefix}{name}.")


@dataclass
class _Builder:
    """Builder of dataclasses that collects problems instead of raising."""

    keys: list[str]
    rejected: Collection[str] = ()
    subject: _Subject = _key_and_value
    problems: list[str] = field(default_factory=list)

    def build(self, values: Any, annotation: Any, prefix: str) -> Any:
        """Build a dataclass of the kind that `annotation` and `values` select; None if there are problems."""
        if not isinstance(values, dict):
            rule = "must not be null" if values is None else IS_A_SECTION
            self.problems.append(f"{self.subject(prefix.rstrip('.'), values)}: {rule}")
            return None
        before = len(self.problems)
        kinds = kinds_of(annotation)
        kind = kind_named(values, annotation)
        if kinds and kind is None and values.get("kind", UNSET) != UNSET:
            subject = self.subject(f"{prefix}kind", values["kind"])
            self.problems.append(no_kind(subject, values["kind"], kinds))
            return None
        schema = annotation if kind is None else kinds[kind]
        hints = type_hints(schema)
        for key in values:
            if key not in hints:
                self._report_unknown(key, values[key], schema, annotation, prefix)
        rejected = [name for name in hints if f"{prefix}{name}" in self.rejected]
        rejected += self._require(schema, values, prefix)
        arguments = {}
        for name, hint in hints.items():
            if name in values and name not in rejected:
                found = len(self.problems)
                arguments[name] = self._value(values[name], hint, f"{prefix}{name}")
                if len(self.problems) > found or (arguments[name] is None and isinstance(values[name], dict)):
                    rejected.append(name)  # also a section whose only problems follow from rejected keys
        built = self._construct(schema, arguments, rejected, prefix)
        return built if len(self.problems) == before else None

    def _report_unknown(self, key: str, value: Any, schema: Any, annotation: Any, prefix: str) -> None:
        """Report a key that `schema` does not have: it belongs to another kind, or does not exist."""
        if f"{prefix}{key}" == SOURCES:
            self.problems.append(f"{SOURCES}: {NOT_A_MIXTURE}")
            return
        kinds = kinds_of(annotation)
        kind_of_schema = next((kind for kind, each in kinds.items() if each is schema), None)
        fitting = [kind for kind, each in kinds.items() if key in type_hints(each)]
        if kind_of_schema is not None and fitting and not isinstance(value, dict):
            rule = key_of_another_kind(section_of(annotation) or "", kind_of_schema, fitting)
            self.problems.append(f"{self.subject(prefix + key, value)}: {rule}")
            return
        value = None if isinstance(value, dict) else value
        subject = f"{prefix}{key}" if value is None else self.subject(prefix + key, value)
        self.problems.append(unknown_key(prefix + key, value, self.keys, subject))

    def _construct(self, schema: Any, arguments: dict[str, Any], rejected: list[str], prefix: str) -> Any:
        """Construct a section to collect its problems, with defaults in place of rejected values.

        Problems that mention a rejected key are dropped, since they may be consequences.
        """
        accepted = {name: value for name, value in arguments.items() if name not in rejected}
        required = [each.name for each in fields(schema) if _default_of(each) == UNSET]
        unset = {name: "unset:unset" for name in required if name not in accepted}
        try:
            return schema(**accepted, **unset)
        except ConfigError as error:
            about = "|".join(map(re.escape, rejected)) or "$."
            problems = [problem for problem in error.problems if not re.search(rf"\.({about})(?!\w|\.\w)", problem)]
            section = section_of(schema)
            self.problems += at_key(section, prefix.rstrip("."), problems) if section and prefix else problems
        return None

    def _value(self, value: Any, hint: Any, key: str) -> Any:
        """Build a nested section, or convert a value to the type of its field."""
        if value == UNSET:
            return None
        section = section_class(hint)
        if section is not None and (hint is section or value is not None):
            return self.build(value, section, f"{key}.")
        if get_origin(hint) is list and isinstance(value, list) and (section := section_class(get_args(hint)[0])):
            return [self._entry(entry, section, f"{key}[{number}].") for number, entry in enumerate(value)]
        dicts = [choice for choice in alternatives((hint,)) if get_origin(choice) is dict]
        if dicts and isinstance(value, dict):
            return self._entries(value, get_args(dicts[0]), key)
        try:
            if problem := unstorable(value):
                raise ValueError(problem)
            converted = _converted(value, hint)
            if any(abs(number) > _LARGEST for number in _integers(converted)):
                raise ValueError(f"must fit in 64 bits, at most {_LARGEST}")
            return converted
        except ValueError as error:
            self.problems.append(f"{self.subject(key, value)}: {error}")
        return None

    def _entries(self, values: dict[Any, Any], hints: Types, key: str) -> dict[Any, Any]:
        """Build the entries of a dict, whose names and values have these two type hints."""
        try:
            values = {_entry_name(name, hints[0]): entry for name, entry in values.items()}
        except ValueError as error:
            self.problems.append(f"{self.subject(key, values)}: {error}")
        if hints[1] is DataConfig:
            return {name: self._source(name, source, values) for name, source in values.items()}
        unset = [f"{key}.{name}" for name, entry in values.items() if entry == UNSET]
        self.problems += [f"{self.subject(name, UNSET)}: {unstorable(UNSET)}" for name in unset]
        return {name: self._value(entry, hints[1], f"{key}.{name}") for name, entry in values.items()}

    def _source(self, name: str, values: Any, sources: dict[str, Any]) -> Any:
        """Build a source of a mixture; its problems are reported with the keys below data.sources.NAME."""
        key = f"data.sources.{name}"
        if not isinstance(values, dict):
            return self.build(values, DataConfig, f"{key}.")
        kind = values.get("kind", UNSET)
        if kind == UNSET:
            others = [other for other in sources if other != name]
            self.problems.append(no_source(self.subject(key, values), name, others))
            return None
        if kind == DataKind.mixture:
            self.problems.append(f"{key}.kind=mixture: a mixture cannot be a source; add its sources to this mixture")
            return None
        named = kind_named(values, DataConfig)
        schema = DataConfig if named is None else kinds_of(DataConfig)[named]
        return self._entry(values, schema, f"{key}.")

    def _entry(self, values: Any, schema: type, prefix: str) -> Any:
        """Build an entry of a list or dict, whose keys are not among those of the config."""
        builder = _Builder(known_keys(schema, prefix), self.rejected, self.subject, self.problems)
        return builder.build(values, schema, prefix)

    def _require(self, schema: type, values: dict[str, Any], prefix: str) -> list[str]:
        """Report required values that are not set, and return their names."""
        missing = []
        for entry in fields(schema):
            if values.get(entry.name) == UNSET or (entry.name not in values and _default_of(entry) == UNSET):
                key = f"{prefix}{entry.name}"
                if key not in self.rejected:
                    self.problems.append(f"{key}: not set, and it has no default; set {key}=...")
                missing.append(entry.name)
        return missing


def _entry_name(name: Any, hint: Any) -> Any:
    """Return the key of a dict as the type of its hint. Raises ValueError with the rule that it violates."""
    if name is None:
        raise ValueError("has the key null; put quotes around it")
    if hint is str and not isinstance(name, str):
        raise ValueError(f"the key {name} is a number or boolean here; set it in a file of yours, where keys are texts")
    return _converted(name, hint)


def _converted(value: Any, hint: Any) -> Any:
    """Return a value as the type of its field. Raises ValueError with the rule that it violates."""
    hints = tuple(alternatives((hint,)))
    if value is None and not {types.NoneType, Any} & set(hints):
        raise ValueError(
            "must not be null; put quotes around a text that is null or ~" if str in hints else "must not be null"
        )
    if value is None or type(value) in hints:
        return value
    rules = []
    for each in hints:
        if each is types.NoneType:
            continue
        try:
            return _as_container(value, each) if get_origin(each) else _as_type(value, each)
        except ValueError as error:
            rules.append(str(error))
    raise ValueError(" or ".join(rules))


def _as_container(value: Any, hint: Any) -> Any:
    """Return a value as a list or dict. Raises ValueError with the rule that it violates."""
    of, *others = get_args(hint)
    if get_origin(hint) is not dict:
        if not isinstance(value, list | tuple):
            raise ValueError("must be a list, such as [a,b]")
        if others and others != [...]:
            if len(value) != len(others) + 1:
                raise ValueError(f"must be a list of {len(others) + 1} values")
            return tuple(_converted(entry, each) for entry, each in zip(value, (of, *others), strict=True))
        return [_converted(entry, of) for entry in value]
    if not isinstance(value, dict):
        raise ValueError(IS_A_SECTION)
    return {_entry_name(name, of): _converted(entry, others[0]) for name, entry in value.items()}


def _as_type(value: Any, hint: Any) -> Any:
    """Return a value as a type other than a container or null. Raises ValueError with the rule that it violates."""
    is_plain = isinstance(value, str | int | float) and not isinstance(value, Enum)
    if hint is bool:  # as a text, since environment variables and command lines have nothing else
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        raise ValueError("must be true or false")
    if hint in (int, float):
        if isinstance(value, str) or (hint is float and isinstance(value, int) and not isinstance(value, bool)):
            with suppress(ValueError):
                return hint(value)
        raise ValueError("must be a whole number" if hint is int else "must be a number")
    if is_class(hint, Enum):
        name = str(value).removeprefix(f"{hint.__name__}.")
        if name in hint.__members__ and isinstance(value, str):
            return hint[name]
        with suppress(ValueError):
            if type(value) is int:
                return hint(value)
        names = list(hint.__members__)
        like = did_you_mean(nearest(str(value), names)) if is_plain else ""
        raise ValueError(f"must be one of {', '.join(names)}{like}")
    if is_class(hint, str | PurePath):
        if is_plain or isinstance(value, PurePath):
            return hint(value)
        raise ValueError("must be a single value")
    if hint is not Any and not isinstance(value, hint):
        raise ValueError(f"must be of type {hint.__name__}")
    return copy.deepcopy(value)


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _integers(entry)


class _Composer(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Composer of the nodes of a document, in C if PyYAML was built with it: five times as fast."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def yaml_with_texts(text: str, schema: type, package: str = "") -> Any:
    """Return the values of a YAML document, with the source text of numbers and booleans where `schema` has texts.

    Args:
        text: YAML within the limits of `check_expansion`.
        schema: Dataclass of a recipe's config.
        package: Dotted key below which the values are.

    Raises yaml.YAMLError; its subclass MarkedYAMLError has the line.
    """
    try:
        node = _Composer(text).get_single_node()
        if node is None:
            return None
        _keep_texts(node, types_at(schema, package))
        return Loader("").construct_document(node)
    except (ValueError, OverflowError) as error:  # an integer of 5,000 digits
        raise yaml.YAMLError(str(error)) from error


def types_at(schema: type, key: str) -> Types:
    """Return the type hints of a dotted key, such as data.sources.NAME.path; () if there is no such key."""
    kinds: Types = (schema,)
    for name in key.split(".") if key else ():
        kinds = below(kinds, name)
    return kinds


def below(kinds: Types, name: str) -> Types:
    """Return the type hints of an entry of a section, dict or list."""
    parts: list[Any] = []
    for hint in alternatives(kinds):
        if isinstance(hint, type) and is_dataclass(hint):
            hints = (type_hints(variant) for variant in kinds_of(hint).values() or (hint,))
            parts += [each[name] for each in hints if name in each]
        elif get_origin(hint) is dict:
            parts.append(get_args(hint)[1])
        elif get_origin(hint) in (list, tuple):
            parts += [each for each in get_args(hint) if each is not ...]
    return tuple(dict.fromkeys(parts))


def alternatives(kinds: Iterable[Any]) -> Iterator[Any]:
    for hint in kinds:
        yield from get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_text(text: str, kinds: Types) -> bool:
    """Return whether a number or boolean is meant as text, for a value of these types.

    A value that may also be a number is text only in an unusual notation, such as 010 or 12:00:00.
    """
    accepted = set(alternatives(kinds))
    is_number = text[:1] in {*"+-.0123456789"}
    if not is_number and (bool in accepted or any(is_class(each, Enum) for each in accepted)):
        return bool not in accepted
    if not any(is_class(each, str | PurePath) and not is_class(each, Enum) for each in accepted):
        return False
    return not (accepted & {int, float} and _USUAL_NUMBER.fullmatch(text))


def is_class(hint: Any, base: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, base)


def _keep_texts(node: yaml.Node, kinds: Types) -> None:
    """Mark the scalars below a node as texts that `kinds` has as texts."""
    if isinstance(node, yaml.MappingNode):
        has_names = any(is_dataclass(choice) or get_args(choice)[:1] == (str,) for choice in alternatives(kinds))
        for index, (key, value) in enumerate(node.value):
            if key.tag == f"{_TAG}merge":
                for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    _keep_texts(each, kinds)
                continue
            name = _as_text(key) if has_names and key.tag in {*_MISREAD, _NULL} else key
            node.value[index] = (name, _kept(value, below(kinds, str(name.value))))
    elif isinstance(node, yaml.SequenceNode):
        node.value[:] = [_kept(each, below(kinds, "")) for each in node.value]


def _kept(node: yaml.Node, kinds: Types) -> yaml.Node:
    """Return the node of a value, as a text if it is meant as one."""
    if isinstance(node, yaml.ScalarNode) and node.tag in _MISREAD and is_text(node.value, kinds):
        return _as_text(node)
    _keep_texts(node, kinds)
    return node


def _as_text(node: yaml.ScalarNode) -> yaml.ScalarNode:
    """Return a copy that is text; the node itself may be aliased by a key whose value is a number."""
    return yaml.ScalarNode(_TEXT, node.value, node.start_mark, node.end_mark)


def literal(value: Any) -> Any:
    r"""Return `value` with `${` escaped as `\${` in its strings, so that omegaconf reads them literally."""
    if isinstance(value, str):
        return _MARK.sub(r"\1\1\\${", value)
    if isinstance(value, list):
        return [literal(entry) for entry in value]
    if isinstance(value, dict):
        return {key: literal(entry) for key, entry in value.items()}
    return value


def unstorable(value: Any) -> str | None:
    """Return why a config file cannot store `value`, or None."""
    for scalar in scalars(value):
        if scalar is not None and not isinstance(scalar, str | int | float | bytes | Enum | PurePath):
            return (
                f"holds a value of type {type(scalar).__name__}, which a config file cannot store; write it as a text"
            )
        if scalar == UNSET:
            return f"{scalar!r} marks a missing value and cannot be used as a value"
        if isinstance(scalar, str) and (found := _LOST.search(scalar)):
            return f"holds {found[0]!r}, which a config file cannot store; remove it"
    return None


def scalars(value: Any) -> Iterator[Any]:
    """Yield the keys and values below nested dicts and lists; the value itself if it is neither."""
    if isinstance(value, dict | list | tuple):
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from scalars(entry)
    else:
        yield value
