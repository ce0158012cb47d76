"""All problems of a command line at once; Hydra stops at the first."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from enum import StrEnum
from functools import cached_property
from typing import Any, get_origin, get_type_hints

from hydra._internal.config_loader_impl import ConfigLoaderImpl  # Hydra has no public way to apply a single override
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.config.compose.explain import (
    IS_A_SECTION,
    SEVERAL_VALUES,
    SOURCES,
    explain_file,
    explain_override,
    explain_value,
    no_group,
    no_source,
    no_such_option,
    override_parts,
    unknown_key,
    unreadable,
)
from components.config.compose.frozen import from_container
from components.config.compose.help_text import choices_of, written
from components.config.compose.short_forms import explain_short_form, settings_of_word
from components.config.compose.sources import (
    Request,
    conf_resolvers,
    drop_sizes,
    option_groups,
    option_texts,
    strict_booleans,
)
from components.config.compose.typed import UNSET, free_keys, known_keys, types_at
from components.config.kinds import KINDS, WITHOUT_KIND
from components.config.rules import accepted_kinds
from components.config.schema.data import DataKind
from components.config.schema.recipes import RecipeConfig
from components.protocol.errors import ConfigError
from components.protocol.safe_yaml import load_yaml

_KIND = re.compile(r"/schema/\w+/(?P<header>\w+)@_here_|^kind: *(?P<key>\w+)", re.MULTILINE)
"""Where an option file states its kind: in its defaults list or by the key."""
_SUGGESTION = re.compile(r"; did you mean ([\w.]+)")

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, ConfigError)


Check = Callable[[Any, Collection[str]], list[str]]
"""Return the problems of a config that involve several sections, given the rejected keys and sections, for which the
config does not hold the requested values."""


def diagnose(request: Request, error: Exception, check: Check) -> list[str]:
    """Return all problems of a request whose composition failed, one sentence each.

    Each override is applied on top of the accepted ones before it. The config without the rejected overrides is then
    validated; of those problems, the ones that mention a rejected key are dropped, since they may be consequences.

    Args:
        request: Request whose composition failed.
        error: Error of the composition, reported if no override causes it.
        check: Returns the problems that involve several sections.
    """
    search = _Search(request)
    try:
        base = search.choose_options()
    except COMPOSITION_ERRORS:
        return [explain_file(error, search.keys, search.accepted_options), *search.override_problems()]
    cfg = search.complete(search.apply_values(base))
    if cfg is not None:
        search.add_independent(check(cfg, search.rejected()))
    reported = error.problems if isinstance(error, ConfigError) else []
    return search.problems or reported or [explain_value(error)]


class _Search:
    """Incremental composition: the problems found so far, and the accepted overrides."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.problems: list[str] = []
        self.options: list[str] = []
        self.values: list[str] = []
        self.bad_sections: set[str] = set()
        """Sections that do not hold the requested values, since their option or several of their keys were rejected."""
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        return self.request.groups

    @cached_property
    def accepted_options(self) -> dict[str, list[str]]:
        return accepted_options(self.request, self.groups)

    @cached_property
    def keys(self) -> list[str]:
        return known_keys(self.request.schema)

    def override_problems(self) -> list[str]:
        """Return the problems of the overrides that do not depend on the config files."""
        known, free = [*self.keys, *self.groups], tuple(f"{key}." for key in free_keys(self.request.schema))
        problems = []
        for override in self.request.overrides:
            key, assigned, value = override_parts(override)
            if problem := _syntax_problem(override):
                problems.append(problem)
            elif key not in known and not key.startswith(free):
                problems.append(unknown_key(key, value if assigned else None, known))
        return problems

    def choose_options(self) -> DictConfig:
        """Compose with the valid group options (model=tiny), which determine the existing keys."""
        chosen = [given for given in self.request.overrides if override_parts(given)[0] in self.groups]
        for option in chosen:
            if problem := self._missing(option):
                self._reject_option(option, problem)
            else:
                self.options.append(option)
        try:
            return self._compose(self.options)
        except COMPOSITION_ERRORS:
            self._compose([])  # raises if no option causes the error
        existing, self.options = self.options, []
        for option in existing:
            try:
                self._compose([*self.options, option])
                self.options.append(option)
            except COMPOSITION_ERRORS as error:
                self._reject_option(option, explain_override(option, error, self.keys, self.accepted_options))
        return self._compose(self.options)

    def _missing(self, option: str) -> str | None:
        """Return the problem of an option that can be found without a composition (0.1 s each), or None."""
        short = explain_short_form(option, self.request.overrides, self.request.folders)
        if problem := short or _syntax_problem(option):
            return problem
        group, _, name = override_parts(option)
        is_a_name = re.fullmatch(r"\w+", name) and isinstance(_parse(option).value(), str)
        if is_a_name and name not in self.groups[group] and option[0] not in "+~":
            return no_such_option(option, name, self.accepted_options)
        if group == "data" and name in set(self.groups[group]) - set(self.accepted_options[group]):
            return self._rejected_data(option, name)
        return None

    def _rejected_data(self, option: str, name: str) -> str:
        """Return the message for an option of data whose kind another recipe trains on."""
        kind = _kind_of_option("data", option_texts(self.request.folders, "data").get(name, ""))
        recipe = {DataKind.preferences: "dpo", DataKind.labels: "classify"}.get(kind, "finetune")  # type: ignore[call-overload]
        accepted = [each for each in ("labels", "preferences") if each in self.accepted_options["data"]]
        others = f", or write data={' or data='.join(accepted)}" if accepted else ", or choose another option of data"
        return f"{option}: has kind {kind}, which this recipe does not train on; use recipes/{recipe}.py{others}"

    def _reject_option(self, option: str, problem: str) -> None:
        self.problems.append(self._with_key(option, problem) if problem.endswith(IS_A_SECTION) else problem)
        self.bad_sections.add(override_parts(option)[0])

    def _with_key(self, option: str, problem: str) -> str:
        """Return the problem of an option's file with the key that holds a value instead of a section."""
        group, _, name = override_parts(option)
        values = load_yaml(option_texts(self.request.folders, group).get(name, ""))
        for key in filter(self._is_section, self.keys):
            value: Any = values
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if isinstance(value, str | bool | int | float):
                text = written(value)
                setting = self._setting_in(key, text)
                if text in self.groups.get(key, ()):
                    setting = f"; write `override /{key}: {text}` in its defaults"
                return f"conf file {group}/{name}.yaml: {key}={text}: {IS_A_SECTION}{setting}"
        return problem

    def _compose(self, options: list[str]) -> DictConfig:
        """Compose with these group options and without values; cached, since diagnosis repeats compositions."""
        key = tuple(options)
        if key not in self._composed:
            self._composed[key] = self.request.compose(options)
        return copy.deepcopy(self._composed[key])

    def apply_values(self, cfg: DictConfig) -> DictConfig:
        """Set the values that Hydra takes, one at a time."""
        for override in self.request.overrides:
            key = override_parts(override)[0]
            if key in self.groups:
                continue
            if key.partition(".")[0] in self.bad_sections and key in self.keys:
                continue  # unknown whether the intended option has this key
            if problem := self._override_problem(override, cfg):
                self.problems.append(problem)
            else:
                self.values.append(override)
        drop_sizes(cfg, _values(self._compose(self.options), "model"), self.values)
        return cfg

    def complete(self, cfg: DictConfig) -> RecipeConfig | None:
        """Add the problems of the single sections; return the config without the values that cause them, if it is
        valid."""
        try:
            return from_container(cfg, self.request.schema)
        except ConfigError as error:
            self.add_independent(error.problems)
            bad = error.problems
        keys = {_key(problem) for problem in bad}
        with suppress(*COMPOSITION_ERRORS):
            return self._typed_without(lambda given: override_parts(given)[0] in keys)
        self.bad_sections |= {_section(problem) for problem in bad}
        with suppress(*COMPOSITION_ERRORS):
            return self._typed_without(lambda given: _concerns(bad, _section(given)))
        return None  # the cause is in a file, or a consequence of problems reported above

    def _typed_without(self, is_bad: Callable[[str], bool]) -> RecipeConfig:
        cfg = self._compose([option for option in self.options if not is_bad(option)])
        before, kept = _values(cfg, "model"), [value for value in self.values if not is_bad(value)]
        for value in kept:
            _apply(value, cfg)
        drop_sizes(cfg, before, kept)
        return from_container(cfg, self.request.schema)

    def rejected(self) -> set[str]:
        """Return the keys with a problem, the keys suggested instead of them, and the sections of rejected options."""
        suggested = {found[1] for problem in self.problems if (found := _SUGGESTION.search(problem))}
        return {_key(problem) for problem in self.problems} | suggested | self.bad_sections

    def add_independent(self, problems: list[str]) -> None:
        """Add the problems that do not mention a key that already has a problem."""
        rejected = self.rejected()
        self.problems += [problem for problem in problems if not any(_names(problem, key) for key in rejected)]

    def _override_problem(self, override: str, cfg: DictConfig) -> str | None:
        if problem := self._word_problem(override) or _syntax_problem(override):
            return problem
        if (key := override_parts(override)[0]) not in self.keys and key in option_groups(self.request.folders):
            return no_group(override)
        try:
            with conf_resolvers():
                _apply(override, cfg)
        except COMPOSITION_ERRORS as error:
            key, _, value = override_parts(override)
            data = _values(cfg, "data")
            sources, name = data.get("sources"), key.removeprefix("data.")
            if sources is not None and key in self.keys and name != key and name not in data:
                return f"{key}={value}: must be set per source of a mixture; set {SOURCES}.NAME.{name}"
            if isinstance(sources, dict) and key.startswith(f"{SOURCES}.") and key.split(".")[2] not in sources:
                return no_source(override.lstrip("+"), key.split(".")[2], sources)
            fitting = self._options_with(key, value, cfg)
            problem = explain_override(override, error, self.keys, self.accepted_options, fitting)
            if problem.endswith(IS_A_SECTION):
                setting, override = self._setting_in(key, value), override.removeprefix("++")
                return f"{override}: {IS_A_SECTION}{setting}"
            return problem
        return None

    def _word_problem(self, override: str) -> str | None:
        """Return the message for a word without a key that has a likely one, or for the entries of a list."""
        key, assigned, value = override_parts(override)
        is_list = any(get_origin(hint) is list for hint in types_at(self.request.schema, key))
        if assigned and is_list and re.fullmatch(r"[\w.-]+(,[\w.-]+)+", value):
            return f"{override}: is a list; write '{key}=[{value}]'"
        if assigned or override.startswith("~"):
            return None
        options = [f"{group}={key}" for group, names in self.accepted_options.items() if key in names]
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
            if key in self.keys and (text in choices or not (choices or self._is_section(key))):
                return f"; write {setting}"
        return f"; its keys are {', '.join(keys)}" if keys else ""

    def _is_section(self, key: str) -> bool:
        return any(each.startswith(f"{key}.") for each in self.keys)

    def _choices_of(self, key: str) -> set[str]:
        return {choice for hint in types_at(self.request.schema, key) for choice in choices_of(hint)}

    def _options_with(self, key: str, value: str, cfg: DictConfig) -> list[str]:
        """Return the options of a section that have a key which the chosen option lacks, the likeliest first, with the
        keys that it requires.

        Options with required values come first, of those the one whose name is in the value (`mine.jsonl`: jsonl);
        then those of the section's default kind.
        """
        section, _, name = key.partition(".")
        if section not in KINDS or key not in self.keys or name in _values(cfg, section):
            return []
        texts = option_texts(self.request.folders, section)
        kinds = {option: _kind_of_option(section, texts.get(option, "")) for option in self.accepted_options[section]}
        fitting = [option for option, kind in kinds.items() if kind and name in get_type_hints(KINDS[section][kind])]
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


def accepted_options(request: Request, groups: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the options of each group, without those of a kind that the recipe rejects, for use in suggestions."""
    accepted = dict(groups)
    for section in KINDS.keys() & groups.keys():
        kinds = accepted_kinds(request.schema, section)
        texts = option_texts(request.folders, section)
        accepted[section] = [
            option for option in groups[section] if _kind_of_option(section, texts.get(option, "")) in (None, *kinds)
        ]
    return accepted


def _kind_of_option(section: str, text: str) -> StrEnum | None:
    """Return the kind of an option of a section with kinds; None if another option decides its kind."""
    if found := _KIND.search(text):
        stated = found["header"] or found["key"]
    elif "defaults:" not in text:
        stated = WITHOUT_KIND.get(section)
    else:
        return None
    return next((kind for kind in KINDS[section] if kind == stated), None)


def _apply(override: str, cfg: DictConfig) -> None:
    with strict_booleans():
        ConfigLoaderImpl._apply_overrides_to_config([_parse(override)], cfg)


def _parse(override: str) -> Override:
    return OverridesParser.create().parse_override(override)


def _syntax_problem(override: str) -> str | None:
    """Return the problem of an override that cannot be parsed or is a sweep, or None."""
    try:
        parsed = _parse(override)
    except HydraException:
        return unreadable(override.lstrip("+"))
    return f"{override}: {SEVERAL_VALUES}" if parsed.is_sweep_override() else None


def _values(cfg: DictConfig, section: str) -> dict[str, Any]:
    values = OmegaConf.to_container(cfg)[section]  # type: ignore[index, call-overload]
    return values if isinstance(values, dict) else {}


def _section(text: str) -> str:
    """Return the section that an override or problem starts with: the text before the first dot, sign or colon."""
    return re.split(r"[.=:@ ]", text.lstrip("+~"), maxsplit=1)[0]


def _key(text: str) -> str:
    """Return the key that a problem or override starts with: the text before the first sign or colon."""
    return re.split(r"[=:@ ]", text.lstrip("+~"), maxsplit=1)[0]


def _names(problem: str, key: str) -> bool:
    """Return whether a problem mentions a key, or, for a section, any key in it."""
    fact = problem.partition("; did you mean")[0]
    ends = r"(?!\w)" if "." in key else "[.=:]"
    return re.search(rf"(?<![\w.]){re.escape(key)}{ends}", fact) is not None


def _concerns(problems: Iterable[str], section: str) -> bool:
    facts = (problem.partition("; did you mean")[0] for problem in problems)
    return any(re.search(rf"(^|\W){re.escape(section)}[.=:]", fact) for fact in facts)
