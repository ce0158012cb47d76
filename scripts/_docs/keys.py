"""Reference of the keys, from the dataclasses of components/config/schema.

A section is a field of the recipes' config classes. Its page lists the keys of all its classes: the kinds that
components/config/kinds.py registers, and the classes that the recipes annotate the field with.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import get_args

from components.config.compose.help_text import (
    RECIPES,
    Key,
    default_and_others,
    file_of,
    keys_of,
    recipes_with,
    sections,
    shared_keys,
    summary,
    variants_of,
)
from components.config.kinds import type_hints
from scripts._docs.markdown import NOTE, cell, code, table


def section_page(section: str) -> str:
    """Return the page of a section."""
    classes = sections()[section]
    variants = variants_of(classes)
    users = ", ".join(code(file_of(recipe)) for recipe in recipes_with(section))
    module = classes[0].__module__.replace(".", "/")
    parts = [f"{NOTE}\n# {section}\n", f"{summary(classes[0])} Part of {users}; defined in {code(module + '.py')}.\n"]
    shared = shared_keys(variants, section)
    if len(variants) > 1:
        parts.append("## Keys of every kind\n")
    parts.append(_key_table(shared, ""))
    for name, schema in variants.items():
        own = {name: key for name, key in keys_of(schema, section).items() if name not in shared}
        if own:
            users = [file_of(recipe) for recipe, each in RECIPES.items() if type_hints(each).get(section) is schema]
            only = f"Only in {' and '.join(users)}"
            title = only if name == schema.__name__ else code(f"{section}.kind={name}")
            parts += [f"## {title}\n", f"{summary(schema)}\n", _key_table(own, name)]
    choices = _choices(list(variants.values()))
    if choices:
        parts += ["## Choices\n", table(["type", "meaning"], [[code(e.__name__), cell(summary(e))] for e in choices])]
    return "\n".join(parts)


def _key_table(keys: dict[str, Key], kind: str) -> str:
    header = ["key", "type", "default", "meaning"]
    rows = [[code(name), cell(key.type), _default(name, kind, key), cell(key.doc)] for name, key in keys.items()]
    return table(header, rows)


def _default(name: str, kind: str, key: Key) -> str:
    """Return the value of a key without an option on the command line, in each recipe if they differ."""
    if key.type == "section":
        return ""
    first, others = default_and_others(name, [kind], key)
    return f"{code(first)}; {cell(others.rstrip('.'))}" if others else code(first)


def _choices(classes: list[type]) -> list[type]:
    """Return the enumerations of the fields of classes, and of the dataclasses in them."""
    found: list[type] = []
    for schema in classes:
        for hint in type_hints(schema).values():
            for each in (hint, *get_args(hint)):
                if dataclasses.is_dataclass(each):
                    found += _choices([each])  # type: ignore[list-item]
                elif isinstance(each, type) and issubclass(each, StrEnum):
                    found.append(each)
    return list(dict.fromkeys(found))
