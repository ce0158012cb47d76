"""A figure of an estimate, with its formula and source."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of an estimate."""

    name: str
    value: float
    """Bytes or seconds."""
    formula: str
    """The formula with its numbers: `4 B x 1,024 x 512`."""
    source: str = ""
    """Origin of the constants in the formula; empty if they follow from the definition."""


def total(terms: Iterable[Term]) -> float:
    """Return the sum of the values."""
    return sum(each.value for each in terms)


def three_digits(value: float) -> str:
    """Return a number in three digits, more for those above 1,000."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:,.{max(0, digits)}f}"


def bytes_text(value: float) -> str:
    """Return bytes in the largest unit of which there is one."""
    units = [(size, unit) for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if value >= size]
    return f"{three_digits(value / units[0][0])} {units[0][1]}" if units else f"{value:,.0f} B"


def seconds_text(value: float) -> str:
    """Return a time in seconds or milliseconds."""
    return f"{three_digits(value)} s" if value >= 1 else f"{three_digits(value * 1e3)} ms"
