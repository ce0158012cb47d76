"""What is wrong with a single override, without typing its value: a syntax error, an unknown key, option or kind."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, get_origin

from hydra.errors import HydraException

from components.config.compose.explain import (
    IS_A_SECTION,
    NOT_A_MIXTURE,
    SEVERAL_VALUES,
    SOURCES,
    choices_of,
    no_group,
    no_source,
    no_such_option,
    override_parts,
    unknown_key,
    unreadable,
    written,
)
from components.config.compose.short_forms import explain_short_form, settings_of_word
from components.config.compose.sources import Request, kind_of_option, option_groups, option_texts, parsed, value_at
from components.config.compose.typed import (
    UNSET,
    alternatives,
    free_keys,
    known_keys,
    scalars,
    types_at,
    unstorable,
    with_defaults,
)
from components.config.kinds import KINDS, WITHOUT_KIND, have_same_keys, type_hints
from components.config.rules import accepted_kinds
from components.config.schema.data import MixtureDataConfig
from components.config.schema.objective import ObjectiveConfig
from components.protocol.errors import wrong_kind_problem


@dataclass
class OverrideChecks:
    """Checks of the overrides of a request."""

    request: Request
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Section with kinds -> its class by the chosen options."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values by the chosen options."""

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Options of each group of the recipe."""
        return self.request.groups

    @cached_property
    def options(self) -> dict[str, list[str]]:
        """Options of each group, without those of a kind that the recipe rejects, for use in suggestions."""
        return accepted_options(self.request, self.groups)

    @cached_property
    def keys(self) -> list[str]:
        """All dotted keys of the schema."""
        return known_keys(self.request.schema)

    @cached_property
    def free(self) -> tuple[str, ...]:
        """Beginnings of the keys that need not be in the schema, such as model.config."""
        return tuple(f"{key}." for key in free_keys(self.request.schema))

    @cached_property
    def _sections(self) -> set[str]:
        return {key.rpartition(".")[0] for key in self.keys}

    def is_option(self, override: str) -> bool:
        """Return whether an override chooses an option of a group, and does not set values of a section."""
        key, _, value = override_parts(override)
        return key in self.groups and not value.startswith("{")

    def option_problem(self, option: str) -> str | None:
        """Return the problem of an option that can be found without reading its file, or None."""
        short = explain_short_form(option, self.request.overrides, self.request.folders)
        if problem := short or _syntax_problem(option):
            return problem
        group, assigned, name = override_parts(option)
        value = parsed(option).value() if assigned else None
        if option.startswith("~"):
            return None
        if not all(isinstance(each, str) for each in (value if isinstance(value, list) else [value])):
            return f"{option}: must be the name of an option (there are: {', '.join(self.options[group])})"
        is_a_name = re.fullmatch(r"\w+", name) and isinstance(value, str)
        if is_a_name and name not in self.groups[group] and option[0] != "+":
            return no_such_option(option, name, self.options)
        return None

    def kind_problem(self, option: str, section: str, kind: str) -> str | None:
        """Return the problem of an option whose kind another recipe takes, or None."""
        if kind in accepted_kinds(self.request.schema, section) or kind not in KINDS[section]:
            return None
        if section != "data":
            schema = next(each for name, each in KINDS[section].items() if name == kind)
            recipe = schema.recipe if issubclass(schema, ObjectiveConfig) else None
            rule = f"use {recipe}, or choose another option" if recipe else "choose another option"
            return f"{option}: has kind {kind}, which this recipe does not accept; {rule}"
        recipe = {"preferences": "dpo", "labels": "classify", "prompts": "grpo"}.get(kind, "finetune")
        accepted = [each for each in ("labels", "preferences") if each in self.options["data"]]
        others = f", or write data={' or data='.join(accepted)}" if accepted else ", or choose another option of data"
        return f"{option}: has kind {kind}, which this recipe does not train on; use recipes/{recipe}.py{others}"

    def missing_kind_problem(self, section: str, file: str, values: Mapping[str, Any]) -> str:
        """Return the message for a file of a section that states no kind, where the section has no default kind."""
        kinds = KINDS[section].items()
        fitting = [str(kind) for kind, each in kinds if values.keys() <= type_hints(each).keys()] or ["KIND"]
        others = f" (or {', '.join(fitting[1:])})" if fitting[1:] else ""
        return f"conf file {file}.yaml: has no kind; add the line `kind: {fitting[0]}`{others}"

    def file_independent(self, overrides: Iterable[str]) -> list[str]:
        """Return the problems of overrides that do not depend on the config files."""
        problems = (self._syntax_or_key_problem(override) for override in overrides if not self.is_option(override))
        return [problem for problem in problems if problem]

    def value_problem(self, override: str) -> str | None:
        """Return the problem of the override of a value, or None."""
        if problem := self._word_problem(override) or self._syntax_or_key_problem(override):
            return problem
        key, _, value = override_parts(override)
        section, _, name = key.partition(".")
        if override.startswith("~") and not key.startswith(self.free):
            return f"{override}: cannot be removed; set it to another value"
        if override.startswith("~") and not self._is_there(override):
            return f"{override}: is not set; remove it"
        if UNSET in list(scalars(parsed(override).value())):
            return f"{override}: {unstorable(UNSET)}"
        is_added = override.startswith("+") and not override.startswith("++") and not value.startswith("{")
        if is_added and key in self.keys and self._is_set(key):
            return f"{override}: is already set; write {key}={value} without the plus"
        mixes = issubclass(self.chosen.get("data", object), MixtureDataConfig)
        sources = value_at(self.values, SOURCES) or {}
        if mixes and section == "data" and "." not in name and not self._has_key(section, name):
            return f"{key}={value}: must be set per source of a mixture; set {SOURCES}.NAME.{name}"
        if mixes and key.startswith(f"{SOURCES}.") and key.split(".")[2] not in sources and name.count(".") > 1:
            return no_source(override.lstrip("+"), key.split(".")[2], sources)
        if key.startswith(f"{SOURCES}.") and not self._has_key(section, name):
            return f"{override.lstrip('+')}: {NOT_A_MIXTURE}"
        if key in self.keys and not self._has_key(section, name):
            return self._other_kind_problem(key, value)
        may_be_null = types.NoneType in alternatives(types_at(self.request.schema, key))
        if self.is_section(key) and not value.startswith(("{", "$")) and not (may_be_null and value == "null"):
            override, setting = override.removeprefix("++"), self._setting_in(key, value)
            return f"{override}: {IS_A_SECTION}{setting}"
        return None

    def _syntax_or_key_problem(self, override: str) -> str | None:
        key, assigned, value = override_parts(override)
        if problem := _syntax_problem(override):
            return problem
        if key not in self.keys and key in option_groups(self.request.folders):
            return no_group(override)
        if key not in self.keys and not key.startswith(self.free):
            return unknown_key(key, value if assigned else None, [*self.keys, *self.groups])
        return None

    def set_kind_problem(self, section: str, name: str) -> str | None:
        """Return the problem of a kind that is set without choosing an option, unless both kinds have the same keys."""
        schema = self.chosen[section]
        kind = next(each.default for each in fields(schema) if each.name == "kind")
        other = next((known for each, known in KINDS[section].items() if each == name), schema)
        return None if kind == name or have_same_keys(schema, other) else wrong_kind_problem(section, name, kind)

    def _is_there(self, override: str) -> bool:
        """Return whether an option or an earlier override sets the key of one that removes it."""
        key, overrides = override_parts(override)[0], self.request.overrides
        section, _, name = key.rpartition(".")
        holder = value_at(self.values, section)
        before = [
            override_parts(each)[0] for each in overrides[: overrides.index(override)] if not each.startswith("~")
        ]
        return (isinstance(holder, dict) and name in holder) or any(f"{key}.".startswith(f"{each}.") for each in before)

    def _is_set(self, key: str) -> bool:
        return value_at(with_defaults(dict(self.values), self.request.schema), key) is not None

    def _has_key(self, section: str, name: str) -> bool:
        """Return whether the chosen kind of a section has a key."""
        schema = self.chosen.get(section)
        return schema is None or not name or name.partition(".")[0] in type_hints(schema)

    def _other_kind_problem(self, key: str, value: str) -> str:
        """Return the message for a key that only other kinds than the chosen one have."""
        section, _, name = key.partition(".")
        lacks = f"{key}={value}: the chosen option of {section} has no such key"
        if fitting := self._options_with(section, name, value):
            others = f", or another {section}=NAME that has it ({', '.join(fitting[1:])})" if fitting[1:] else ""
            return f"{lacks}; add {section}={fitting[0]}{others}"
        kinds = [str(kind) for kind, each in KINDS[section].items() if name in type_hints(each)]
        return f"{lacks}, and this recipe accepts none of the kinds that have it ({', '.join(kinds)}); remove it"

    def _word_problem(self, override: str) -> str | None:
        """Return the message for a word without a key that has a likely one, or for the entries of a list."""
        key, assigned, value = override_parts(override)
        is_list = any(get_origin(hint) is list for hint in types_at(self.request.schema, key))
        if assigned and is_list and re.fullmatch(r"[\w.-]+(,[\w.-]+)+", value):
            return f"{override}: is a list; write '{key}=[{value}]'"
        if assigned or override.startswith("~"):
            return None
        options = [f"{group}={key}" for group, names in self.options.items() if key in names]
        settings = options if len(options) == 1 else settings_of_word(key, self.request.schema, self.request.folders)
        return f"{override}: has no key; write {' or '.join(settings)}" if settings else None

    def _setting_in(self, section: str, value: str) -> str:
        """Return the setting in a section that was probably meant by a value of it, or its keys, for a message."""
        keys = [key for key in self.keys if key.rpartition(".")[0] == section]
        if (
            value in ("true", "on", "online", "yes") or f"{section}.{value}" in keys
        ):  # logging.wandb=true, logging=wandb
            part = f"{section}.{value}" if f"{section}.{value}" in keys else section
            meant = [f"{part}=true", f"{part}.enabled=true", f"{part}.mode=online"]
        else:
            meant = [f"{key}={value}" for key in keys if value in self._choices_of(key)]
            meant += [f"{section}.{name}={value}" for name in ("path", "dir")]
        for setting in meant:
            key, _, text = setting.partition("=")
            choices = self._choices_of(key)
            if key in self.keys and (text in choices or not (choices or self.is_section(key))):
                return f"; write {setting}"
        return f"; its keys are {', '.join(keys)}" if keys else ""

    def is_section(self, key: str) -> bool:
        """Return whether keys are below a key."""
        return key in self._sections

    def section_problem(self, file: str, key: str, value: Any) -> str:
        """Return the message for a value that a config file has in place of a section."""
        text = written(value)
        setting = self._setting_in(key, text)
        if text in self.groups.get(key, ()):
            setting = f"; write `override /{key}: {text}` in its defaults"
        return f"conf file {file}.yaml: {key}={text}: {IS_A_SECTION}{setting}"

    def _choices_of(self, key: str) -> set[str]:
        return {choice for hint in types_at(self.request.schema, key) for choice in choices_of(hint)}

    def _options_with(self, section: str, name: str, value: str) -> list[str]:
        """Return the options of a section that have a key which the chosen option lacks, the likeliest first, with the
        keys that it requires.

        Options with required values come first, of those the one whose name is in the value (`mine.jsonl`: jsonl);
        then those of the section's default kind.
        """
        texts = option_texts(self.request.folders, section)
        kinds = {option: kind_of_option(section, option, texts) for option in self.options[section]}
        fitting = [option for option, kind in kinds.items() if kind and name in type_hints(KINDS[section][kind])]
        default = WITHOUT_KIND.get(section)
        likeliest, *others = sorted(
            fitting,
            key=lambda option: (
                *(UNSET not in texts[option], option not in value, kinds[option] != default, len(option)),
            ),
        ) or [""]
        given = {override_parts(override)[0] for override in self.request.overrides}
        required = [
            f"{section}.{each}" for each in re.findall(r"^(\w+): \?\?\?", texts.get(likeliest, ""), re.MULTILINE)
        ]
        needed = [f" {each}=..." for each in required if each not in given]
        return ["".join([likeliest, *needed]), *others] if likeliest else []


def accepted_options(request: Request, groups: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the options of each group, without those of a kind that the recipe rejects, for use in suggestions."""
    accepted = dict(groups)
    for section in KINDS.keys() & groups.keys():
        kinds = accepted_kinds(request.schema, section)
        texts = option_texts(request.folders, section)
        accepted[section] = [
            option for option in groups[section] if kind_of_option(section, option, texts) in (None, *kinds)
        ]
    return accepted


def _syntax_problem(override: str) -> str | None:
    """Return the problem of an override that cannot be parsed or is a sweep, or None."""
    try:
        is_sweep = parsed(override).is_sweep_override()
    except HydraException:
        return unreadable(override.lstrip("+"))
    return f"{override}: {SEVERAL_VALUES}" if is_sweep else None
