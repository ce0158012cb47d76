"""Strict conversion of nested dicts to dataclasses, and the texts that Hydra, omegaconf or YAML would misread."""

from __future__ import annotations

import copy
import functools
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.config.compose.explain import (
    explain_value,
    key_of_another_kind,
    no_kind,
    no_source,
    override_parts,
    unknown_key,
)
from components.config.kinds import at_key, have_same_keys, kind_named, kinds_of, section_of, type_hints
from components.config.schema.data import DataConfig, DataKind
from components.protocol.errors import ConfigError
from components.protocol.safe_yaml import Loader
from components.protocol.secrets import shown_value

Schema = TypeVar("Schema")
_LARGEST = 2**63 - 1
"""Largest integer that torch and safetensors accept."""
UNSET = "???"
"""omegaconf's marker of a required value."""
_MARK = re.compile(r"(\\*)\$\{")
_LOST = re.compile("[\x85\ud800-\udfff]")
"""NEL, which YAML reads as a line break, and surrogates, which stand for bytes that are not UTF-8."""
Types = tuple[Any, ...]
"""Type hints that a value may have: those of a key in all kinds of its section."""
_TAG = "tag:yaml.org,2002:"
_NULL, _TEXT = f"{_TAG}null", f"{_TAG}str"
_MISREAD = {f"{_TAG}{name}" for name in ("int", "float", "bool", "value", "merge")}
_USUAL_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_NUMBER_OR_BOOLEAN = re.compile(r"[+-]?(?:\d[\w.+-]*|\.\d[\w+-]*|inf|nan)|true|false", re.IGNORECASE)
"""Text that Hydra may read as a number or a boolean."""
_PARTS = re.compile(
    r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\$\{(?:[^{}]|\{[^{}]*\})*\}|\\.|[][{}(),:]|[^][{}(),:"'$\\]+|."""
)
"""Parts of the value of an override: quoted text, interpolation, escaped character, delimiter, other text."""
_CHOOSING = ("", "choice", "shuffle", "sort")
"""Functions of Hydra's grammar whose arguments are values of the key; "": parentheses without a function."""


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


class _Composer(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Composer of the nodes of a document, in C if PyYAML was built with it: five times as fast."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def yaml_with_texts(text: str, schema: type, package: str = "") -> Any:
    """Return the values of a YAML mapping, with the source text of numbers and booleans where `schema` has texts.

    Args:
        text: Valid YAML.
        schema: Dataclass of a recipe's config.
        package: Dotted key below which the values are.

    Returns None if YAML reads every text as it was written.
    """
    node = _Composer(text).get_single_node()
    if node is None or not _keep_texts(node, types_at(schema, package)):
        return None
    return Loader("").construct_document(node)


def override_with_texts(override: str, schema: type) -> str:
    """Return an override with quotes around the texts that Hydra would read as numbers or booleans."""
    key, assigned, value = override_parts(override)
    if not assigned or override.startswith("~") or not (kinds := types_at(schema, key)):
        return override
    return f"{override.partition('=')[0]}={_with_quotes(value, kinds)}"


def types_at(schema: type, key: str) -> Types:
    """Return the type hints of a dotted key, such as data.sources.NAME.path; () if there is no such key."""
    kinds: Types = (schema,)
    for name in key.split(".") if key else ():
        kinds = _below(kinds, name)
    return kinds


def _below(kinds: Types, name: str) -> Types:
    """Return the type hints of an entry of a section, dict or list."""
    found: list[Any] = []
    for hint in _alternatives(kinds):
        if isinstance(hint, type) and is_dataclass(hint):
            hints = (type_hints(variant) for variant in kinds_of(hint).values() or (hint,))
            found += [each[name] for each in hints if name in each]
        elif get_origin(hint) is dict:
            found.append(get_args(hint)[1])
        elif get_origin(hint) in (list, tuple):
            found += [each for each in get_args(hint) if each is not ...]
    return tuple(dict.fromkeys(found))


def _alternatives(kinds: Iterable[Any]) -> Iterator[Any]:
    for hint in kinds:
        yield from get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_text(text: str, kinds: Types) -> bool:
    """Return whether a number or boolean is meant as text, for a value of these types.

    A value that may also be a number is text only in an unusual notation, such as 010 or 12:00:00.
    """
    accepted = set(_alternatives(kinds))
    is_number = text[:1] in {*"+-.0123456789"}
    if not is_number and (bool in accepted or any(_is_class(each, Enum) for each in accepted)):
        return bool not in accepted
    if not any(_is_class(each, str | PurePath) and not _is_class(each, Enum) for each in accepted):
        return False
    return not (accepted & {int, float} and _USUAL_NUMBER.fullmatch(text))


def _is_class(hint: Any, base: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, base)


def _keep_texts(node: yaml.Node, kinds: Types) -> bool:
    """Mark scalars below a node as texts; return whether YAML would have read any of them as something else."""
    if isinstance(node, yaml.MappingNode):
        changed = False
        has_names = any(is_dataclass(each) or get_args(each)[:1] == (str,) for each in _alternatives(kinds))
        for index, (key, value) in enumerate(node.value):
            if key.tag == f"{_TAG}merge":
                mappings = value.value if isinstance(value, yaml.SequenceNode) else [value]
                changed |= sum(_keep_texts(each, kinds) for each in mappings) > 0
                continue
            name = _as_text(key) if has_names and key.tag in {*_MISREAD, _NULL} else key
            entry, entry_changed = _kept(value, _below(kinds, str(name.value)))
            node.value[index] = (name, entry)
            changed |= entry_changed or name is not key
        return changed
    if isinstance(node, yaml.SequenceNode):
        kept = [_kept(each, _below(kinds, "")) for each in node.value]
        node.value[:] = [entry for entry, _ in kept]
        return any(changed for _, changed in kept)
    return False


def _kept(node: yaml.Node, kinds: Types) -> tuple[yaml.Node, bool]:
    """Return the node of a value, and whether it or one below it differs from what YAML would have read."""
    if isinstance(node, yaml.ScalarNode) and node.tag in _MISREAD and _is_text(node.value, kinds):
        return _as_text(node), True
    return node, _keep_texts(node, kinds)


def _as_text(node: yaml.ScalarNode) -> yaml.ScalarNode:
    """Return a copy that is text; the node itself may be aliased by a key whose value is a number."""
    return yaml.ScalarNode(_TEXT, node.value, node.start_mark, node.end_mark)


@dataclass
class _Container:
    """Open bracket in the value of an override."""

    opening: str
    kinds: Types
    """Types of the container."""
    entry: Types | None
    """Types of the current entry; None before the colon of a dict's entry."""


def _with_quotes(value: str, kinds: Types) -> str:
    """Return the value of an override, or several separated by commas, with quotes around texts."""
    written, scalar = [], ""
    open_containers = [_Container("", kinds, kinds)]
    for part in _PARTS.findall(value):
        inside = open_containers[-1]
        if part not in tuple("[]{}(),:") or (part == ":" and inside.entry is not None):
            scalar += part
            continue
        if part == ":":
            inside.entry = _below(inside.kinds, scalar.strip())
        elif part in "[{(":
            current = inside.entry or ()
            entry = {"[": _below(current, ""), "{": None, "(": current if scalar.strip() in _CHOOSING else ()}
            open_containers.append(_Container(part, current, entry[part]))
        else:
            scalar = _quoted(scalar, inside.entry or ())
            if part == "," and inside.opening == "{":
                inside.entry = None
            elif part != "," and len(open_containers) > 1:
                open_containers.pop()
        written += [scalar, part]
        scalar = ""
    return "".join(written) + _quoted(scalar, open_containers[-1].entry or ())


def _quoted(scalar: str, kinds: Types) -> str:
    text = scalar.strip()
    texts = tuple(each for each in _alternatives(kinds) if not _is_class(each, Enum))
    if not _NUMBER_OR_BOOLEAN.fullmatch(text) or not _is_text(text, texts):
        return scalar
    return scalar.rstrip().replace(text, f'"{text}"')


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
    for text in _texts(value):
        if text == UNSET:
            return f"{text} marks a missing value and cannot be used as a value"
        if found := _LOST.search(text):
            return f"holds {found[0]!r}, which a config file cannot store; remove it"
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(entry)
