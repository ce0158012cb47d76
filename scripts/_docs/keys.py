"""Reference of the keys, from the dataclasses of components/config/schema.

A section is a field of the recipes' config classes. Its page lists the keys of all its classes: the kinds that
components/config/kinds.py registers, and the classes that the recipes annotate the field with.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import types
from enum import StrEnum
from typing import Any, Union, get_args, get_origin

from components.config.compose.typed import type_hints
from components.config.kinds import kinds_of
from components.config.schema import recipes as schemas
from scripts._docs.markdown import NOTE, cell, code, table

RECIPES = {
    "finetune": schemas.FinetuneConfig,
    "pretrain": schemas.PretrainConfig,
    "dpo": schemas.DpoConfig,
    "distill": schemas.DistillConfig,
    "classify": schemas.ClassifyConfig,
    "evaluate": schemas.EvaluateConfig,
    "teacher": schemas.StoreTeacherConfig,
}
"""Name of a config (conf/NAME.yaml) -> its class."""
PLAIN_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}


def file_of(recipe: str) -> str:
    """Return the path of the script that has the config conf/RECIPE.yaml."""
    return f"{'scripts' if recipe == 'teacher' else 'recipes'}/{recipe}.py"


@functools.cache
def field_docs(schema: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass, including those that it inherits."""
    found: dict[str, str] = {}
    for each in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        tree = _classes(each.__module__)[each.__qualname__]
        for statement, following in zip(tree.body, tree.body[1:], strict=False):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
                found[statement.target.id] = inspect.cleandoc(str(following.value.value))  # type: ignore[attr-defined]
    return found


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def sections() -> dict[str, list[type]]:
    """Return the sections, with the classes that the recipes annotate them with, the widest first."""
    found: dict[str, list[type]] = {}
    for schema in RECIPES.values():
        for name, hint in type_hints(schema).items():
            classes = found.setdefault(name, [])
            if hint not in classes:
                classes.append(hint)
    return {name: sorted(classes, key=lambda each: len(each.__mro__)) for name, classes in found.items()}


def recipes_with(section: str) -> list[str]:
    """Return the recipes whose config has a section."""
    return [name for name, schema in RECIPES.items() if section in type_hints(schema)]


def variants_of(classes: list[type]) -> dict[str, type]:
    """Return the classes of a section by heading: its kinds, or the classes that the recipes accept."""
    kinds = {str(kind): each for schema in classes for kind, each in kinds_of(schema).items()}
    if len(kinds) > 1:
        return kinds
    if len(classes) == 1:
        return {"": next(iter(kinds.values()), classes[0])}
    return {each.__name__: each for each in classes}


def section_page(section: str) -> str:
    """Return the page of a section."""
    classes = sections()[section]
    variants = variants_of(classes)
    users = ", ".join(code(file_of(recipe)) for recipe in recipes_with(section))
    module = classes[0].__module__.replace(".", "/")
    parts = [f"{NOTE}\n# {section}\n", f"{_intro(classes[0])} Part of {users}; defined in {code(module + '.py')}.\n"]
    first = next(iter(variants.values()))
    shared = [key for key in _rows(first, section) if all(_rows(each, section).get(key) == _rows(first, section)[key]
                                                          for each in variants.values())]  # fmt: skip
    if len(variants) > 1:
        parts.append("## Keys of every kind\n")
    parts.append(_key_table({key: _rows(first, section)[key] for key in shared}))
    for name, schema in variants.items():
        own = {key: row for key, row in _rows(schema, section).items() if key not in shared}
        if own:
            users = [file_of(recipe) for recipe, each in RECIPES.items() if type_hints(each).get(section) is schema]
            only = f"Only in {' and '.join(users)}"
            title = only if name == schema.__name__ else code(f"{section}.kind={name}")
            parts += [f"## {title}\n", f"{_intro(schema)}\n", _key_table(own)]
    choices = _choices(list(variants.values()))
    if choices:
        parts += ["## Choices\n", table(["type", "meaning"], [[code(e.__name__), cell(_intro(e))] for e in choices])]
    return "\n".join(parts)


def _intro(documented: type) -> str:
    text = " ".join((documented.__doc__ or "").split())
    return text if text.endswith((".", ":")) else f"{text}."


def _key_table(rows: dict[str, tuple[str, str, str]]) -> str:
    header = ["key", "type", "default", "meaning"]
    return table(
        header, [[code(key), cell(kind), code(default), cell(doc)] for key, (kind, default, doc) in rows.items()]
    )


@functools.cache
def _rows(schema: type, prefix: str) -> dict[str, tuple[str, str, str]]:
    """Return key -> (type, default, docstring) for the keys of a dataclass and of the dataclasses in it."""
    found: dict[str, tuple[str, str, str]] = {}
    docs, hints = field_docs(schema), type_hints(schema)
    for each in dataclasses.fields(schema):
        key, hint = f"{prefix}.{each.name}", hints[each.name]
        nested = dataclasses.is_dataclass(hint)
        found[key] = ("section" if nested else describe_type(hint), "" if nested else default_of(each), docs[each.name])
        if nested:
            found |= _rows(hint, key)
    return found


def describe_type(hint: Any) -> str:
    """Return a type in words, with the choices of an enumeration."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [describe_type(each) for each in arguments if each is not type(None)]
        return " or ".join([*kinds, *(["null"] if type(None) in arguments else [])])
    if origin is list:
        return f"list of {describe_type(arguments[0])}"
    if origin is dict:
        return f"{describe_type(arguments[1])} by name"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return f"{hint.__name__}: {', '.join(hint)}"
    if dataclasses.is_dataclass(hint):
        return "section"
    return PLAIN_TYPES[hint]


def default_of(each: dataclasses.Field[Any]) -> str:
    """Return a field's default as it is written on a command line; "required" without one."""
    if each.default_factory is not dataclasses.MISSING:
        value = each.default_factory()
    elif each.default is not dataclasses.MISSING:
        value = each.default
    else:
        return "required"
    return written(value)


def written(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{written(entry)}' for key, entry in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


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
