"""Everything that is wrong with a command line at once; Hydra stops at the first thing it stumbles over."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl  # how Hydra applies an override, one at a time
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.config.compose.explain import (
    SEVERAL_VALUES,
    SOURCES,
    explain_file,
    explain_override,
    explain_value,
    no_source,
    override_parts,
    unreadable,
)
from components.config.compose.frozen import from_container
from components.config.compose.sources import Request, option_groups
from components.config.compose.texts import UNSET
from components.config.compose.typed import known_keys
from components.config.errors import ConfigError
from components.config.schema.recipes import RecipeConfig

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, ConfigError)


def diagnose(request: Request, error: Exception, check: Callable[[Any], list[str]]) -> list[str]:
    """Return every problem of a request that could not be composed, one sentence each.

    Each override is tried on top of the good ones before it. What is left without the bad ones is checked further,
    and of that only what does not concern a section with a problem is told: there it could be a mere consequence.

    Args:
        error: What stopped the composition; it is all there is to tell where no override is to blame.
        check: Returns the problems that only show across sections.
    """
    search = _Search(request)
    try:
        base = search.choose_options()
    except COMPOSITION_ERRORS:
        return [explain_file(error, search.keys, search.groups)]
    cfg = search.complete(search.apply_values(base))
    if cfg is not None:
        search.add_independent(check(cfg))
    return search.problems or getattr(error, "problems", None) or [explain_value(error)]


class _Search:
    """The problems found so far, and the overrides without one."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.problems: list[str] = []
        self.options: list[str] = []
        self.values: list[str] = []
        self.bad_options: set[str] = set()

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        return option_groups(self.request.folders)

    @cached_property
    def keys(self) -> list[str]:
        return known_keys(self.request.schema)

    def choose_options(self) -> DictConfig:
        """Compose with the options of groups (model=tiny) that exist: they decide which keys there are."""
        chosen = [given for given in self.request.overrides if override_parts(given)[0] in self.groups]
        try:
            base = self.request.compose(chosen)
            self.options = chosen
        except COMPOSITION_ERRORS:
            self.request.compose([])  # where this is refused, no option is to blame
            for override in chosen:
                if problem := self._unusable(override):
                    self.problems.append(problem)
                    self.bad_options.add(override_parts(override)[0])
                else:
                    self.options.append(override)
            base = self.request.compose(self.options)
        return base

    def _unusable(self, option: str) -> str | None:
        if problem := _misspelt(option):
            return problem
        try:
            self.request.compose([*self.options, option])
        except COMPOSITION_ERRORS as error:
            return explain_override(option, error, self.keys, self.groups)
        return None

    def apply_values(self, base: DictConfig) -> DictConfig:
        """Set the values that Hydra takes, one at a time."""
        cfg = copy.deepcopy(base)
        for override in self.request.overrides:
            key = override_parts(override)[0]
            if key in self.groups:
                continue
            if key.partition(".")[0] in self.bad_options and key in self.keys:
                continue  # whether the option that was meant has this key cannot be told
            if problem := self._refused(override, cfg):
                self.problems.append(problem)
            else:
                self.values.append(override)
        return cfg

    def complete(self, cfg: DictConfig) -> RecipeConfig | None:
        """Add what the sections say of themselves; return the config without what they complain of, if it holds."""
        try:
            return from_container(cfg, self.request.schema)
        except ConfigError as error:
            self.add_independent(error.problems)
            bad = error.problems
        kept = [given for given in (*self.options, *self.values) if not _concerns(bad, _section(given))]
        try:
            return from_container(self.request.compose(kept), self.request.schema)
        except COMPOSITION_ERRORS:
            return None  # the trouble is in a file, or a mere consequence: it was told above

    def add_independent(self, problems: list[str]) -> None:
        """Add the problems that concern no section which has one already."""
        bad = {_section(problem) for problem in self.problems} | self.bad_options
        if "cluster" in bad:
            bad.add("parallelism")  # the number of processes decides the degrees
        self.problems += [problem for problem in problems if not any(_concerns([problem], section) for section in bad)]

    def _refused(self, override: str, cfg: DictConfig) -> str | None:
        if problem := _misspelt(override):
            return problem
        try:
            ConfigLoaderImpl._apply_overrides_to_config([OverridesParser.create().parse_override(override)], cfg)
        except COMPOSITION_ERRORS as error:
            key, _, value = override_parts(override)
            data = _values(cfg, "data")
            sources, name = data.get("sources"), key.removeprefix("data.")
            if sources is not None and key in self.keys and name != key and name not in data:
                return f"{key}={value}: each source of a mixture has its own; set {SOURCES}.NAME.{name}"
            if sources and key.startswith(f"{SOURCES}.") and key.split(".")[2] not in sources:
                return no_source(override.lstrip("+"), key.split(".")[2], sources)
            fitting = self._options_with(key, value, cfg)
            return explain_override(override, error, self.keys, self.groups, fitting)
        return None

    def _options_with(self, key: str, value: str, cfg: DictConfig) -> list[str]:
        """The options of a section that have a key which the chosen one lacks.

        Those first that wait for values, of them that which the value names (`mine.jsonl`: jsonl).
        """
        section, _, name = key.partition(".")
        if section not in self.groups or key not in self.keys or name in _values(cfg, section):
            return []
        others, found = [given for given in self.options if _section(given) != section], {}
        for option in self.groups[section]:
            with suppress(*COMPOSITION_ERRORS):
                found[option] = _values(self.request.compose([*others, f"{section}={option}"]), section)
        fitting = [option for option, values in found.items() if name in values]
        return sorted(
            fitting, key=lambda option: (UNSET not in found[option].values(), option not in value, len(option))
        )


def _misspelt(override: str) -> str | None:
    """What is wrong with an override whatever the config: it cannot be read, or is several."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return unreadable(override.lstrip("+"))
    return f"{override}: {SEVERAL_VALUES}" if parsed.is_sweep_override() else None


def _values(cfg: DictConfig, section: str) -> dict[str, Any]:
    values = OmegaConf.to_container(cfg)[section]  # type: ignore[index, call-overload]
    return values if isinstance(values, dict) else {}


def _section(text: str) -> str:
    """The section that an override or a problem is about: what comes before the first dot, sign or colon."""
    return re.split(r"[.=:@ ]", text.lstrip("+~"), maxsplit=1)[0]


def _concerns(problems: Iterable[str], section: str) -> bool:
    facts = (problem.partition("; did you mean")[0] for problem in problems)
    return any(re.search(rf"(^|\W){re.escape(section)}[.=:]", fact) for fact in facts)
