"""ConfigError, which ends a run with exit status 2 and without a traceback; checks of values; and the exit statuses.

A run that finishes, or that stops as requested by a signal and has saved, exits 0. A check returns a list with one
message, or an empty list. Non-finite values (inf, nan, 1e400) fail every check.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EXIT_INVALID = 2
"""The configuration was rejected: the run never started."""
EXIT_HUNG = 75
"""The watchdog ended a run without progress. EX_TEMPFAIL of sysexits.h: it may be tried again."""
EXIT_CORRUPTED = 76
"""The replicas of a run hold different bits: a rank computes wrong numbers."""
EXIT_RESTART = 86
"""A pod stopped and can continue in a new one: its Kubernetes job replaces it and does not count a failure."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended the run (128 + SIGINT, as in shells)."""
IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
"""Pattern of the import path of a function or class of the user's: package.module:name."""


class ConfigError(ValueError):
    """One or more config errors.

    Each problem is one sentence that states the value, the rule and the key to change. The launcher prints all problems
    at once and exits with `EXIT_INVALID` (components.protocol.errors).
    """

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows for this error, as a terminal does: no frames."""
        return self.problems


def field_values(section: DataclassInstance) -> dict[str, Any]:
    """Return the values of a dataclass by field name, without converting nested dataclasses."""
    return {field.name: getattr(section, field.name) for field in fields(section)}


def at_least(key: str, value: float | None, minimum: float) -> list[str]:
    """Require `value` >= `minimum`; None passes."""
    if value is None or (value >= minimum and _is_finite(value)):
        return []
    return [f"{key}={value}: must be at least {minimum:g}{_and_finite(value)}"]


def above(key: str, value: float, bound: float) -> list[str]:
    """Require `value` > `bound`."""
    if value > bound and _is_finite(value):
        return []
    return [f"{key}={value}: must be greater than {bound:g}{_and_finite(value)}"]


def within(key: str, value: float, low: float, high: float) -> list[str]:
    """Require `low` <= `value` <= `high`."""
    return [] if low <= value <= high else [f"{key}={value}: must lie between {low:g} and {high:g}"]


def pattern_problems(key: str, patterns: Sequence[str]) -> list[str]:
    """Require regular expressions that compile, each once; an empty one would match everything."""
    problems = []
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(f"{key}={pattern}: must be a regular expression ({error}); correct it")
    if "" in patterns or len(set(patterns)) < len(patterns):
        problems.append(f"{key}={list(patterns)}: must hold different expressions, none of them empty; correct it")
    return problems


def distinct_names(section: str, names: Mapping[str, str | None]) -> list[str]:
    """Require names of columns, keys or roles to be non-empty and different from each other; None: not used."""
    problems = [f"{section}.{key}='': is empty; name it as in the data" for key, name in names.items() if name == ""]
    first_key: dict[str, str] = {}
    for key, name in names.items():
        if name and first_key.setdefault(name, key) != key:
            other = f"{section}.{first_key[name]}"
            problems.append(f"{section}.{key}={name}: is also {other}; the two must differ")
    return problems


def own_kind(section: str, cfg: Any) -> list[str]:
    """Require `kind` to match the class of the section. A base class, which has no default kind, accepts any."""
    expected = next(field.default for field in fields(cfg) if field.name == "kind")
    return [] if expected is MISSING or cfg.kind is expected else [wrong_kind_problem(section, cfg.kind, expected)]


def wrong_kind_problem(section: str, name: object, expected: object) -> str:
    """Return the message for the kind of a section that is not that of its option."""
    return (
        f"{section}.kind={name}: the chosen option has kind {expected}; choose another option of conf/{section}/ "
        f"({section}=NAME) instead of setting the kind"
    )


def raise_all(problems: list[str]) -> None:
    """Raise one ConfigError with all problems, if there are any."""
    if problems:
        raise ConfigError(problems)


def _is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def _and_finite(value: float) -> str:
    return "" if _is_finite(value) else ", and a finite number"
