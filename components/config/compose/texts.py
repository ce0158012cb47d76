"""Texts that Hydra, omegaconf or YAML would misread: 12:00:00, 010 and on, ${, ??? and characters YAML cannot store."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Union, get_args, get_origin

import yaml

from components.config.compose.explain import override_parts
from components.config.kinds import kinds_of, type_hints
from components.config.safe_yaml import Loader

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
