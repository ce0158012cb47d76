"""A line of the result of `scripts/gpu.py`, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """PASS; SLOW: right, but slower than the bound; FAIL: wrong, or it did not end; SKIP: cannot run here."""

    PASS = "PASS"
    SLOW = "SLOW"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True)
class Line:
    """One measured figure."""

    what: str
    measured: str
    bound: str = "-"
    verdict: Verdict = Verdict.PASS
    predicted: str = "-"


def at_most(what: str, value: float, bound: float, *, speed: bool = False, digits: int = 3) -> Line:
    """Return a line that passes if the value is at most the bound; SLOW instead of FAIL if `speed`."""
    return _compared(what, value, bound, value <= bound, "at most", speed, digits)


def at_least(what: str, value: float, bound: float, *, speed: bool = True, digits: int = 3) -> Line:
    """Return a line that passes if the value is at least the bound; FAIL instead of SLOW unless `speed`."""
    return _compared(what, value, bound, value >= bound, "at least", speed, digits)


def _compared(what: str, value: float, bound: float, holds: bool, word: str, speed: bool, digits: int) -> Line:
    worse = Verdict.SLOW if speed else Verdict.FAIL
    verdict = Verdict.PASS if holds else worse  # NaN does not hold
    return Line(what, f"{value:,.{digits}g}", f"{word} {bound:,.{digits}g}", verdict)


def skipped(what: str, why: str) -> Line:
    """Return a line for a check that cannot run here."""
    return Line(what, why, verdict=Verdict.SKIP)


def failed(what: str, why: str) -> Line:
    """Return a line for a check that raised, ended or took too long."""
    return Line(what, why, verdict=Verdict.FAIL)


def as_markdown(lines: Sequence[tuple[str, Line]], heading: str) -> str:
    """Return the result as a Markdown table. lines: (name of the check, line)."""
    rows = [
        f"| {name} | {line.what} | {line.measured} | {line.predicted} | {line.bound} | {line.verdict} |"
        for name, line in lines
    ]
    head = ["| check | what | measured | predicted | bound | verdict |", "|---|---|---|---|---|---|"]
    return "\n".join([heading, "", *head, *rows]) + "\n"


def as_json(lines: Sequence[tuple[str, Line]], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the result with the facts about the machine."""
    return {**facts, "lines": [{"check": name, **asdict(line)} for name, line in lines]}
