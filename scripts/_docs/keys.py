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
    Entry,
    file_of,
    recipes_with,
    section_entries,
    sections,
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
    if len(variants) > 1:
        parts.append("## Keys of every kind\n")
    for kind, entries in section_entries(section, variants):
        if kind and entries:
            schema = variants[kind]
            users = [file_of(recipe) for recipe, each in RECIPES.items() if type_hints(each).get(section) is schema]
            only = f"Only in {' and '.join(users)}"
            parts += [
                f"## {only if kind == schema.__name__ else code(f'{section}.kind={kind}')}\n",
                f"{summary(schema)}\n",
            ]
        if entries or not kind:
            rows = [[code(entry.name), cell(entry.key.type), _default(entry), cell(entry.key.doc)] for entry in entries]
            parts.append(table(["key", "type", "default", "meaning"], rows))
    choices = _choices(list(variants.values()))
    if choices:
        parts += ["## Choices\n", table(["type", "meaning"], [[code(e.__name__), cell(summary(e))] for e in choices])]
    return "\n".join(parts)


def _default(entry: Entry) -> str:
    """Return the value of a key without an option on the command line, in each recipe if they differ."""
    if entry.key.type == "section":
        return ""
    return f"{code(entry.value)}; {cell(entry.others.rstrip('.'))}" if entry.others else code(entry.value)


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
