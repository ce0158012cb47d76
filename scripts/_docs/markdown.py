"""Markdown of the generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTE = "<!-- Written by python -m scripts._docs; do not edit. -->\n"


def code(text: str) -> str:
    """Return text in code font, for a table cell; empty text stays empty."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("|", "\\|") if text else ""


def cell(text: str) -> str:
    """Return prose for a table cell: on one line, with characters escaped that Markdown would read outside of code."""
    parts = re.split("(`[^`]+`)", " ".join(text.split()))
    parts[1::2] = [code(part[1:-1]) for part in parts[1::2]]
    parts[::2] = [_escaped(part) for part in parts[::2]]
    return "".join(parts)


def _escaped(text: str) -> str:
    for character in "\\`*_|[]":
        text = text.replace(character, f"\\{character}")
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("://", ":&#47;&#47;")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with an empty line after it."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
