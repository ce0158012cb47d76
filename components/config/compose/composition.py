"""Composition: the files that Hydra selects, the values of the command line, defaults, and the typed config.

Plain dicts are merged in this order, and the result is typed once. Every problem is collected: those of options and of
single values, those that typing finds, and those of several sections on the config without the rejected values.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from hydra.core.utils import setup_globals
from hydra.errors import HydraException

from components.config.compose.explain import SOURCES, explain_file, explain_option, explain_unknown_key, override_parts
from components.config.compose.frozen import resolve
from components.config.compose.overrides import OverrideChecks
from components.config.compose.short_forms import override_with_texts
from components.config.compose.sources import ConfigFile, Request, merged, nested, parsed, read_files, value_at
from components.config.compose.typed import (
    UNSET,
    typed,
    with_defaults,
)
from components.config.kinds import KINDS, WITHOUT_KIND, kind_named, kinds_of, type_hints
from components.config.schema.recipes import RecipeConfig
from components.config.shape import ModelShape
from components.protocol.errors import ConfigError
from components.protocol.secrets import shown_value

_SUGGESTION = re.compile(r"; did you mean ([\w.]+)")
Check = Callable[[Any, Collection[str]], list[str]]
"""Return the problems of a config that involve several sections, given the rejected keys and sections, for which the
config does not hold the requested values."""


def no_check(cfg: Any, rejected: Collection[str]) -> list[str]:
    """Return no problems."""
    return []


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed command line."""

    cfg: RecipeConfig | None
    """The typed config; None if it has problems."""
    values: dict[str, Any]
    """The config as plain values with defaults, before its interpolations are resolved."""
    resolved: dict[str, Any]
    """`values` with their interpolations resolved, without those that cannot be."""
    unresolved: list[str]
    """Problems of interpolations."""
    problems: list[str]
    malformed: bool
    """Whether an option, a key or the type of a value is wrong; not for a missing or an illegal value."""


def compose(request: Request, check: Check = no_check) -> Composed:
    """Compose a request, and collect its problems, one sentence each.

    Problems that mention a rejected key are left out, since they may be consequences.

    Args:
        request: The command line.
        check: Returns the problems that involve several sections; called only if the single sections are valid, or
            valid without the rejected values.
    """
    setup_globals()  # registers the resolver ${now:...}
    composition = _Composition(request)
    try:
        composition.choose_options()
    except (HydraException, ConfigError) as error:
        reported = (
            error.problems if isinstance(error, ConfigError) else [explain_file(error, composition.checks.options)]
        )
        reported += composition.checks.file_independent(request.overrides)
        return Composed(None, {}, {}, [], reported, malformed=True)
    composition.apply_values()
    composition.malformed = bool(composition.problems)
    cfg = composition.typed()
    valid = None if composition.problems else cfg
    checked = cfg or composition.typed_without_problems()
    if checked is not None:
        composition.add_independent(check(checked, composition.rejected()))
    resolved = (composition.resolved, list(composition.unresolved.values()))
    return Composed(valid, composition.values, *resolved, composition.problems, composition.malformed)


@dataclass
class _Composition:
    """A composition in progress: accepted options and values, and the problems found so far."""

    request: Request
    problems: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    """Accepted overrides that choose an option of a group."""
    given: list[str] = field(default_factory=list)
    """Accepted overrides of values."""
    bad_sections: set[str] = field(default_factory=set)
    """Sections that do not hold the requested values, since their option or several of their keys were rejected."""
    rejected_keys: set[str] = field(default_factory=set)
    files: list[ConfigFile] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    unresolved: dict[str, str] = field(default_factory=dict)
    malformed: bool = False

    @cached_property
    def checks(self) -> OverrideChecks:
        return OverrideChecks(self.request)

    def choose_options(self) -> None:
        """Read the files of the accepted options. Raises an error of a file that no option causes."""
        chosen = [override for override in self.request.overrides if self.checks.is_option(override)]
        for option in chosen:
            if problem := self.checks.option_problem(option):
                self._reject_option(option, problem)
            else:
                self.options.append(option)
        try:
            self.files = self._files(self.options)
        except (HydraException, ConfigError):
            self._files([])  # raises if no option causes the error
            self._find_wrong_options()
        for option in list(self.options):
            problem = self._kind_problem(option)
            if problem or ("data" in self.bad_sections and f"@{SOURCES}." in option):
                self.options.remove(option)
                self._reject_option(option, *([problem] if problem else []))
        if self.problems:
            self.files = self._files(self.options)

    def _find_wrong_options(self) -> None:
        existing, self.options = self.options, []
        for option in existing:
            try:
                self.files = self._files([*self.options, option])
                self.options.append(option)
            except ConfigError as error:
                self._reject_option(option, *error.problems)
            except HydraException as error:
                self._reject_option(option, explain_option(option, error, self.checks.keys, self.checks.options))

    def _files(self, options: Iterable[str]) -> list[ConfigFile]:
        return read_files(self.request, map(parsed, options))

    def _reject_option(self, option: str, *problems: str) -> None:
        self.problems += problems
        self.bad_sections.add(override_parts(option)[0])

    def _kind_problem(self, option: str) -> str | None:
        """Return the problem of an option of a kind that the recipe does not accept."""
        section = option.partition("=")[0].lstrip("+~").partition("@")[2] or override_parts(option)[0]
        kinds = [each.values["kind"] for each in self.files if each.package == section and "kind" in each.values]
        if section.startswith(f"{SOURCES}."):
            section = "data"
        if section not in KINDS:
            return None
        if not kinds and section not in WITHOUT_KIND:
            file = next((each for each in reversed(self.files) if each.package == section), None)
            return self.checks.missing_kind_problem(section, file.name, file.values) if file else None
        return self.checks.kind_problem(option, section, str(kinds[-1])) if kinds else None

    def apply_values(self) -> None:
        """Merge the files, the sections of the request, and the values of the command line."""
        self.values, checks = self._merged_files(), self.checks
        checks.chosen, checks.values = self._chosen(), self.values
        for override in self.request.overrides:
            key = override_parts(override)[0]
            if checks.is_option(override):
                continue
            if key.partition(".")[0] in self.bad_sections and (key in checks.keys or key.startswith(checks.free)):
                continue  # unknown whether the intended option has this key
            if problem := checks.value_problem(override):
                self.problems.append(problem)
                self.rejected_keys.add(key)
            else:
                self.given.append(override)
        self.values = self._with(self.values, self.given)
        self._check_kinds()

    def _merged_files(self) -> dict[str, Any]:
        """Return the values of the files, without keys that do not exist, which are reported, and the sections of the
        request."""
        values: dict[str, Any] = {}
        keys, free = self.checks.keys, self.checks.free
        for file in self.files:
            if file.package and file.package not in keys and not f"{file.package}.".startswith(free):
                self.problems.append(explain_unknown_key(file.name, file.package, file.values, keys))
                continue
            known = self._without_unknown(file, file.package, file.values)
            below = value_at(values, file.package) if file.package else None
            if isinstance(below, dict) and _switches_kind(file, below):
                below.clear()  # keys of another kind
            values = merged(values, nested(file.package, known) if known else {})
        return values | copy.deepcopy(dict(self.request.sections))

    def _without_unknown(self, file: ConfigFile, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
        checks, known = self.checks, {}
        for name, value in values.items():
            key = f"{prefix}.{name}".lstrip(".")
            is_dotted = "." in str(name) and not f"{prefix}.".startswith(checks.free)
            if is_dotted or (key not in checks.keys and not key.startswith(checks.free)):
                self.bad_sections |= {key.partition(".")[0]} if isinstance(value, dict) else set()
                self.problems.append(explain_unknown_key(file.name, key, value, checks.keys))
            elif checks.is_section(key) and isinstance(value, str | bool | int | float) and value != UNSET:
                self.problems.append(checks.section_problem(file.name, key, value))
            elif checks.is_section(key) and isinstance(value, dict):
                known[name] = self._without_unknown(file, key, value)
            else:
                known[name] = value
        return known

    def _chosen(self) -> dict[str, Any]:
        """Return the class of each section with kinds, by its options."""
        hints, chosen = type_hints(self.request.schema), {}
        for section in KINDS.keys() & hints.keys() - self.bad_sections:
            replaced = section in self.request.sections
            of_section = [file.values for file in self.files if file.package == section and not replaced]
            stated = [values for values in of_section if "kind" in values] or [{} for _ in of_section[:1]]
            values, kinds = stated[-1] if stated else self.values.get(section), kinds_of(hints[section])
            kind = kind_named(values, hints[section]) if isinstance(values, dict) else None
            if kind is not None or (isinstance(hints[section], type) and not kinds):
                chosen[section] = hints[section] if kind is None else kinds[kind]
        return chosen

    def _check_kinds(self) -> None:
        """Reject kinds that are set without choosing an option."""
        for section in self.checks.chosen:
            values = self.values.get(section)
            kind = values.get("kind") if isinstance(values, dict) else None
            if isinstance(kind, str) and (problem := self.checks.set_kind_problem(section, kind)):
                self.problems.append(problem)
                self.bad_sections.add(section)

    def _with(self, values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
        """Return composed values with those of overrides."""
        for override in overrides:
            key = override_parts(override)[0]
            if override.startswith("~"):
                section, _, name = key.rpartition(".")
                if isinstance(holder := value_at(values, section), dict):
                    holder.pop(name, None)
            else:
                values = merged(values, nested(key, self._value(override)))
        options = [file for file in self.files if re.fullmatch(r"model/\w+", file.name) and file.package == "model"]
        if options and isinstance(values.get("model"), dict) and "model" not in self.request.sections:
            given = {override_parts(each)[0] for each in overrides}
            values["model"] = _without_sizes(values["model"], options[-1].values, given)
        return values

    def _value(self, override: str) -> Any:
        return parsed(override_with_texts(override, self.request.schema)).value()

    def typed(self) -> RecipeConfig | None:
        """Add the problems of the single sections; return the config if they are valid."""
        self.values = with_defaults(self.values, self.request.schema)
        self.resolved, self.unresolved = resolve(self.values)
        keys = [key.partition("[")[0] for key in self.unresolved]
        self.add_independent(self.unresolved.values())
        try:
            cfg = typed(self.resolved, self.request.schema, [*keys, *self.rejected_keys], self._subject)
        except ConfigError as error:
            self.add_independent(error.problems)
            return None
        return None if self.unresolved else cfg

    def typed_without_problems(self) -> RecipeConfig | None:
        """Return the config without the values that cause problems, if it is valid then."""
        keys = {_key(problem) for problem in self.problems}
        with suppress(ConfigError, HydraException):
            return self._typed_without(lambda given: override_parts(given)[0] in keys)
        self.bad_sections |= {_section(problem) for problem in self.problems}
        with suppress(ConfigError, HydraException):
            return self._typed_without(lambda given: _concerns(self.problems, _section(given)))
        return None  # the cause is in a file, or a consequence of problems reported above

    def _typed_without(self, is_bad: Callable[[str], bool]) -> RecipeConfig:
        options = [option for option in self.options if not is_bad(option)]
        rest = _Composition(self.request)
        rest.files = self.files if options == self.options else self._files(options)
        values = rest._with(rest._merged_files(), [each for each in self.given if not is_bad(each)])
        container, unresolved = resolve(with_defaults(values, self.request.schema))
        return typed(container, self.request.schema, unresolved)

    def _subject(self, key: str, value: Any) -> str:
        """Return how a message names a key of a wrong type: as it was typed, or with the file that sets it."""
        self.malformed = True
        for override in reversed(self.given):
            given = override_parts(override)[0]
            if given == key:
                return override.removeprefix("++")
            if key.startswith(f"{given}."):
                return f"{key}={shown_value(key, value)}"
        for file in reversed(self.files):
            section, _, name = key.rpartition(".")
            holder = value_at(nested(file.package, file.values), section)
            if not isinstance(holder, dict) or name not in holder or file.name.startswith("schema/"):
                continue
            if isinstance(value, dict) or holder[name] == value:
                return f"conf file {file.name}.yaml: {key}"
        return f"{key}={shown_value(key, value)}"

    def rejected(self) -> set[str]:
        """Return the keys with a problem, the keys suggested instead of them, and the sections of rejected options."""
        suggested = {found[1] for problem in self.problems if (found := _SUGGESTION.search(problem))}
        return {_key(problem) for problem in self.problems} | suggested | self.bad_sections

    def add_independent(self, problems: Iterable[str]) -> None:
        """Add the problems that do not mention a key that already has a problem."""
        rejected = self.rejected()
        self.problems += [problem for problem in problems if not any(_names(problem, key) for key in rejected)]


def _switches_kind(file: ConfigFile, below: Mapping[str, Any]) -> bool:
    """Return whether an option of a section has another kind than the values that are there."""
    kind = below.get("kind", WITHOUT_KIND.get(file.package))
    return kind is not None and str(file.values.get("kind", kind)) != str(kind)


def _without_sizes(model: dict[str, Any], option: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the section model without the sizes of its option, if `model.path` is another model than the option's.

    Sizes of the wrong model would reject meshes that the model can have, or change the model. Sizes that are `given`
    are kept.
    """
    if model.get("path") == option.get("path"):
        return model
    stated = {
        each.name: None
        for each in fields(ModelShape)
        if each.name != "config"
        and option.get(each.name) is not None
        and model.get(each.name) == option[each.name]
        and f"model.{each.name}" not in given
    }
    own = option.get("config") or {}
    config = {
        key: value
        for key, value in (model.get("config") or {}).items()
        if f"model.config.{key}" in given or key not in own or own[key] != value
    }
    return {**model, **stated, **({"config": config} if own else {})}


def _section(text: str) -> str:
    """Return the section that an override or problem starts with: the text before the first dot, sign or colon."""
    return re.split(r"[.=:@ ]", text.lstrip("+~"), maxsplit=1)[0]


def _key(text: str) -> str:
    """Return the key that a problem or override starts with: the text before the first sign or colon."""
    match = re.match(r"conf file \S+\.yaml: ([\w.]+):", text)
    return match[1] if match else re.split(r"[=:@ ]", text.lstrip("+~"), maxsplit=1)[0]


def _names(problem: str, key: str) -> bool:
    """Return whether a problem mentions a key, or, for a section, any key in it."""
    fact = problem.partition("; did you mean")[0]
    ends = r"(?!\w)" if "." in key else "[.=:]"
    return re.search(rf"(?<![\w.]){re.escape(key)}{ends}", fact) is not None


def _concerns(problems: Iterable[str], section: str) -> bool:
    facts = (problem.partition("; did you mean")[0] for problem in problems)
    return any(re.search(rf"(^|\W){re.escape(section)}[.=:]", fact) for fact in facts)
