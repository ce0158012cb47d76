"""A line of the result of `scripts/gpu.py`, and its verdict."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

HEAD = "| check | what | measured | predicted | bound | verdict |"
"""Head of the table in verdict.md."""
CONTROL_FACTOR = 100
"""A planted fault must exceed the bound that it is a control of by this factor."""


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


def at_most(what: str, value: float, bound: float, *, speed: bool = False) -> Line:
    """Return a line that passes if the value is at most the bound; SLOW instead of FAIL if `speed`."""
    return _compared(what, value, f"at most {bound:,.3g}", value <= bound, speed)


def at_least(what: str, value: float, bound: float, *, speed: bool = True) -> Line:
    """Return a line that passes if the value is at least the bound; FAIL instead of SLOW unless `speed`."""
    return _compared(what, value, f"at least {bound:,.3g}", value >= bound, speed)


def control(what: str, value: float, bound: float) -> Line:
    """Return a line that passes if a planted fault exceeds a bound of `at_most` by CONTROL_FACTOR."""
    text = f"at least {CONTROL_FACTOR} x the bound {bound:,.3g}"
    return _compared(f"control: {what}", value, text, value >= CONTROL_FACTOR * bound, speed=False)


def _compared(what: str, value: float, bound: str, holds: bool, speed: bool) -> Line:
    worse = Verdict.SLOW if speed else Verdict.FAIL
    return Line(what, f"{value:,.3g}", bound, Verdict.PASS if holds else worse)  # NaN does not hold


def skipped(what: str, why: str) -> Line:
    """Return a line for a check that cannot run here."""
    return Line(what, why, verdict=Verdict.SKIP)


def failed(what: str, why: str) -> Line:
    """Return a line for a check that raised, ended or took too long."""
    return Line(what, why, verdict=Verdict.FAIL)


def attempt(what: str, lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines; if computing them raises, yield a failed line, so that the next part of the check still runs.

    The traceback goes to stderr, which is a part of log.txt. After an error of CUDA no further part can run.
    """
    try:
        yield from lines
    except Exception as error:  # any error of the code that is checked is a result
        traceback.print_exc()
        text = " ".join(str(error).split())
        yield failed(what, f"{type(error).__name__}: {text[:300]}")
        if "CUDA error" in text or "illegal memory access" in text:
            sys.exit(1)


def append_line(file: Path, check: str, line: Line) -> None:
    """Append a line to results.jsonl, and write it to the disk at once."""
    with file.open("a") as results:
        results.write(json.dumps({"check": check, **asdict(line)}) + "\n")
        results.flush()
        os.fsync(results.fileno())


def read_lines(file: Path) -> list[tuple[str, Line]]:
    """Return (name of the check, line) of each complete line of results.jsonl."""
    text = file.read_text() if file.exists() else ""
    rows = [json.loads(row) for row in text[: text.rfind("\n") + 1].splitlines()]
    return [(row.pop("check"), Line(**{**row, "verdict": Verdict(row["verdict"])})) for row in rows]


def as_markdown(lines: Sequence[tuple[str, Line]], heading: str) -> str:
    """Return the result as a Markdown table. lines: (name of the check, line)."""
    rows = [
        f"| {name} | {line.what} | {line.measured} | {line.predicted} | {line.bound} | {line.verdict} |"
        for name, line in lines
    ]
    return "\n".join([heading, "", HEAD, "|---|---|---|---|---|---|", *(row.replace("\n", " ") for row in rows)]) + "\n"


def summary(lines: Sequence[tuple[str, Line]], seconds: float) -> str:
    """Return the number of lines of each verdict and the time."""
    counts = ", ".join(f"{sum(line.verdict is each for _, line in lines)} {each}" for each in Verdict)
    return f"{counts} in {seconds:.0f} s"
