"""The one-line rules that sections share. Each returns its problem as a sentence, or nothing."""

from __future__ import annotations

from components.config.errors import ConfigError


def at_least(key: str, value: float | None, minimum: float) -> list[str]:
    """`value` must be `minimum` or more; None (not given) is left to others."""
    if value is None or value >= minimum:
        return []
    return [f"{key}={value}: must be at least {minimum:g}"]


def above(key: str, value: float, bound: float) -> list[str]:
    """`value` must be greater than `bound`."""
    return [] if value > bound else [f"{key}={value}: must be greater than {bound:g}"]


def within(key: str, value: float, low: float, high: float) -> list[str]:
    """`value` must lie in [low, high]."""
    return [] if low <= value <= high else [f"{key}={value}: must lie between {low:g} and {high:g}"]


def raise_all(problems: list[str]) -> None:
    """Raise one ConfigError with every problem of a section, or return when there is none."""
    if problems:
        raise ConfigError(problems)
