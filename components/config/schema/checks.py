"""Range checks shared by the sections. Each returns a list with one message, or an empty list.

Non-finite values (inf, nan, 1e400) fail every check.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
"""Pattern of the import path of a function or class of the user's: package.module:name."""


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
