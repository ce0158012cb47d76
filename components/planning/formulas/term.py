"""A figure of an estimate, with its formula and source."""

from __future__ import annotations

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
