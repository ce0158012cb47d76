"""Reader of wrong_lines.txt: command lines with one config error each, and parts of their messages."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class WrongLine(NamedTuple):
    """A command line, the beginning of its message, and further parts of it."""

    group: str
    line: str
    parts: list[str]


def wrong_lines() -> list[WrongLine]:
    """Return all rows of the file, in its order."""
    found, group = [], ""
    for text in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if text.startswith("["):
            group = text.strip("[]")
        elif text and not text.startswith("#"):
            line, *parts = text.split(" | ")
            found.append(WrongLine(group, line, parts))
    return found
