"""`meshbook help NAME`: a section, a key, an option, a recipe or a tool as text."""

from __future__ import annotations

import textwrap
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from yaml import YAMLError

from components.config.compose.explain import SET_BY_KEY, did_you_mean, nearest, nearest_key, written
from components.config.compose.help_text import (
    Default,
    Entry,
    Key,
    default_and_others,
    entry_text,
    keys_of,
    purpose_of,
    recipe_defaults,
    section_help,
    sections,
    shared_keys,
    variants_of,
)
from components.config.compose.sources import CONF, option_groups, option_texts
from components.protocol.errors import ConfigError
from components.protocol.safe_parsing import load_yaml
from meshbook.programs import COMMAND, recipes, tools

MOST_SETTINGS = 8
"""Values of options that the text of a key lists."""


def describe(names: list[str], width: int) -> str:
    """Return the text for one name, in lines of at most `width` columns. Raises ConfigError for an unknown name."""
    if len(names) != 1:
        raise ConfigError(f"help: takes one name, as in {COMMAND} help optimizer.lr")
    (name,) = names
    groups = option_groups(option_folders())
    group, has_option, option = name.partition("=")
    if has_option and option in groups.get(group, ()):
        return option_texts(option_folders(), group)[option].rstrip()
    if name in sections() or name in groups:
        return _section(name, groups.get(name, []), width)
    if keys := key_variants(name):
        return "\n".join(_key(name, keys, width))
    programs = recipes() | tools()
    if name in programs:
        return f"{programs[name].documentation}\n\nAll options: {COMMAND} {name} --help"
    known = [*sections(), *groups, *all_keys(), *programs]
    settings = [f"{group}={name}" for group, names in groups.items() if name in names]
    setting = settings[0] if len(settings) == 1 else None
    like = did_you_mean(setting or nearest(name, known) or nearest_key(name, all_keys()))
    raise ConfigError(
        f"{name}: is no section, key, recipe or tool{like}; write a section such as optimizer, a key such as "
        "optimizer.lr, or an option such as optimizer=muon"
    )


def option_folders() -> list[Path]:
    """Return the folders of options: the user's in the current folder, and conf/ of Meshbook."""
    return list(dict.fromkeys([Path.cwd() / "conf", CONF]))


def all_keys() -> list[str]:
    """Return the keys of all sections and kinds."""
    found = [
        key for section, classes in sections().items() for variant in variants_of(classes).values()
        for key in keys_of(variant, section)
    ]  # fmt: skip
    return list(dict.fromkeys(found))


def key_variants(name: str) -> dict[str, Key]:
    """Return what is known of a key by the kind of its section; several kinds only if they differ."""
    section = name.partition(".")[0]
    if section not in sections():
        return {}
    variants = variants_of(sections()[section])
    if name in shared_keys(variants, section):
        return {"": shared_keys(variants, section)[name]}
    return {kind: keys[name] for kind, each in variants.items() if name in (keys := keys_of(each, section))}


def _section(name: str, options: list[str], width: int) -> str:
    lines: list[str] = []
    if name in sections():
        lines.append(section_help(name, variants_of(sections()[name]), width).lstrip("\n"))
    if options:
        lines.append(f"\nOptions, {SET_BY_KEY.get(name, name)}=OPTION:")
    texts = option_texts(option_folders(), name)
    for option in options:
        purpose = purpose_of(texts.get(option, ""))
        lines.append(textwrap.fill(f"{option}: {purpose}", width, initial_indent="  ", subsequent_indent=" " * 6))
    return "\n".join(lines)


def _key(name: str, keys: dict[str, Key], width: int) -> list[str]:
    """Return the text of a key: its values in the recipes with what sets each, its meaning, and other options."""
    section, lines = name.partition(".")[0], []
    kinds: dict[Key, list[str]] = {}
    for kind, key in keys.items():
        kinds.setdefault(replace(key, default=""), []).append(kind)
    used: set[str] = set()
    for key, names in kinds.items():
        lines += [f"{section}.kind={', '.join(names)}:"] if any(names) and len(kinds) > 1 else []
        defaults = recipe_defaults(name, names)
        used |= {default.source for default in defaults}
        is_set = len({default.value for default in defaults}) > 1 or any(default.source for default in defaults)
        value = default_and_others(name, names, keys[names[0]])[0]
        stated = [_default_line(name, default) for default in defaults] if is_set else []
        lines.append(entry_text(Entry(name, value, "", key), width, stated))
    settings = [f"{source} ({value})" for source, value in _settings(name) if source not in used]
    if settings:
        more = f" and {len(settings) - MOST_SETTINGS} more" if len(settings) > MOST_SETTINGS else ""
        text = f"Other options: {', '.join(settings[:MOST_SETTINGS])}{more}."
        lines.append(textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return lines


def _default_line(name: str, default: Default) -> str:
    """Return the line for a value of a key in some recipes, with what sets it."""
    source, recipes = default.source, default.recipes
    source = source.replace("RECIPE", recipes[0]) if len(recipes) == 1 else source
    value = "" if default.value == "required" else default.value or "''"
    return f"{name}={value} in {', '.join(recipes)} ({source or (value and 'no option sets it') or default.value})"


def _settings(name: str) -> list[tuple[str, str]]:
    """Return the options of the key's section that set it, with the values as text."""
    section, _, path = name.partition(".")
    found = []
    for option, text in option_texts(option_folders(), section).items():
        with suppress(YAMLError):
            value: Any = load_yaml(text)
            for part in path.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value not in (None, "???") and not isinstance(value, dict):
                found.append((f"{section}={option}", written(value)))
    return found
