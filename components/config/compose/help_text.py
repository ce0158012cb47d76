"""Text of `--help`: what a recipe does, the options of each group, and every key with its value and docstring."""

from __future__ import annotations

import textwrap
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from components.config.compose.sources import Request, conf_resolvers
from components.config.key_reference import (
    Key,
    default_and_others,
    keys_of,
    section_class,
    shared_keys,
    summary,
    variants_of,
    written,
)
from components.config.kinds import type_hints
from components.terminal import fit

_fill = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
OPTIONS = """\
-m, --multirun       run a sweep: a value may be a list, KEY=a,b
--cfg job            print the composed config and exit; with --resolve, without references
--config-dir FOLDER  search this folder for options, too
--quiet              print only where the run is, its summary, and errors: logging.quiet=true
--help               print this text; after other arguments, with the values that they set
"""


def recipe_help(description: str, request: Request, width: int) -> str:
    """Return the help of a recipe in lines of at most `width` columns. Raises an error of the composition.

    Args:
        description: Docstring of the recipe.
        request: The command line; the text shows the values that it sets.
    """
    values = request.compose(request.overrides)
    groups = request.groups
    parts = [
        f"{fit(description.strip(), width)}\n",
        "Options:\n\n" + fit(textwrap.indent(OPTIONS, "  "), width),
        "Options of groups, GROUP=OPTION:\n",
        *(_fill(f"{group}: {', '.join(groups[group])}", width, subsequent_indent="    ") for group in sorted(groups)),
        "\nKeys, KEY=VALUE, with the values of this command:",
    ]
    with conf_resolvers():
        for name, hint in type_hints(request.schema).items():
            schema = section_class(hint)
            if schema is None or values[name] is None:  # a user's own key outside of sections, or no section
                parts.append(f"\n{name}={written(values[name])}")
            else:
                parts.append(section_help(name, {"": _class_of(schema, values[name])}, width, values))
    return "\n".join(parts)


def section_help(section: str, variants: dict[str, type], width: int, values: DictConfig | None = None) -> str:
    """Return the help of a section: the keys of every kind, then those of each kind.

    Args:
        section: Name of the section.
        variants: Its classes by kind; one class without a kind has the name "".
        width: Columns of a line.
        values: The composed config, to show values instead of defaults.
    """
    shared = shared_keys(variants, section)
    first = next(iter(variants.values()))
    title = f"{section}: {summary(first)}".rstrip() if len(variants) == 1 else f"{section}, all kinds:"
    lines = ["", _fill(title, width, subsequent_indent="    "), *_key_lines(shared, "", width, values)]
    for name, schema in variants.items() if len(variants) > 1 else ():
        own = {key: described for key, described in keys_of(schema, section).items() if key not in shared}
        title = _fill(f"{section}.kind={name}: {summary(schema)}", width, subsequent_indent="    ")
        lines += ["", title, *_key_lines(own, name, width, values)]
    return "\n".join(lines)


def _key_lines(keys: dict[str, Key], kind: str, width: int, values: DictConfig | None) -> list[str]:
    lines = []
    for key, described in keys.items():
        if described.type == "section":
            continue
        value, others = _value(values, key), ""
        if values is None:
            value, others = default_and_others(key, [kind], described)
        lines.append(key_help(key, described, width, value, others))
    return lines


def key_help(name: str, key: Key, width: int, value: str, others: str = "") -> str:
    """Return the lines of a key: its value, its meaning, its type, and its values in other recipes."""
    value = "" if value == "required" else value
    ending = "" if key.doc.endswith((".", "?")) or not key.doc else "."
    text = f"{' '.join(key.doc.split())}{ending} {key.type[:1].upper()}{key.type[1:]}. {others}".strip()
    indent = " " * 6
    stated = _fill(f"  {name}={value}", width, subsequent_indent=indent)
    return f"{stated}\n" + _fill(text, width, initial_indent=indent, subsequent_indent=indent)


def _value(values: DictConfig | None, key: str) -> str:
    if values is None or OmegaConf.is_missing(*_parent_of(values, key)):
        return ""
    return written(OmegaConf.select(values, key))


def _parent_of(values: DictConfig, key: str) -> tuple[Any, str]:
    parent, _, name = key.rpartition(".")
    return OmegaConf.select(values, parent), name


def _class_of(schema: type, values: DictConfig) -> type:
    """Return the class of a section's values: that of their kind, if the section has kinds."""
    variants = variants_of([schema])
    return variants.get(str(values.get("kind")), next(iter(variants.values()))) if len(variants) > 1 else schema
