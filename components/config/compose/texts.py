"""Strings that Hydra, omegaconf or YAML would misread: numbers, ${, ??? and characters that YAML cannot store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

UNSET = "???"
"""omegaconf's marker of a required value."""

_MARK = re.compile(r"(\\*)\$\{")
_LOST = re.compile("[\x85\ud800-\udfff]")
"""NEL, which YAML reads as a line break, and surrogates, which stand for bytes that are not UTF-8."""

_NUMBER = r"[+-]?(?:\d[\w.+-]*|\.\d[\w+-]*|inf|nan)"
_VALUE = re.compile(rf"{_NUMBER}|true|false", re.IGNORECASE)
"""Text that Hydra may read as a number or a boolean, whose text may differ from what was typed: 1_0, 1.10, 1e5."""
_QUOTED = r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
_ENTRY: dict[type, re.Pattern[str]] = {
    list: re.compile(rf"{_QUOTED}|(?P<before>[\[,]\s*)(?P<value>{_VALUE.pattern})(?=\s*[,\]])", re.IGNORECASE),
    dict: re.compile(
        rf"{_QUOTED}|(?P<before>[{{,][^,:{{}}]+:\s*)(?P<value>{_VALUE.pattern})(?=\s*[,}}])", re.IGNORECASE
    ),
}


def quoted_value(value: str, kind: type) -> str:
    """Return the value of an override with quotes around texts that Hydra would read as numbers or booleans.

    Args:
        value: As it was typed.
        kind: str, or list or dict for lists and dicts of texts.
    """
    if kind is str:
        return f'"{value.strip()}"' if _VALUE.fullmatch(value.strip()) else value
    return _ENTRY[kind].sub(
        lambda found: f'{found["before"]}"{found["value"]}"' if found["value"] is not None else found[0], value
    )


def quoted_numbers(values: str) -> str:
    """Return the values of a swept key for texts, separated by commas, with quotes around numbers."""
    if re.search(r"[\"'()\[\]{}$]", values):
        return values
    return ",".join(f'"{each.strip()}"' if re.fullmatch(_NUMBER, each.strip()) else each for each in values.split(","))


def literal(value: Any) -> Any:
    r"""Return `value` with `${` escaped as `\${` in its strings, so that omegaconf reads them literally."""
    if isinstance(value, str):
        return _MARK.sub(r"\1\1\\${", value)
    if isinstance(value, list):
        return [literal(entry) for entry in value]
    if isinstance(value, dict):
        return {key: literal(entry) for key, entry in value.items()}
    return value


def unstorable(value: Any) -> str | None:
    """Return why a config file cannot store `value`, or None."""
    for text in _texts(value):
        if text == UNSET:
            return f"{text} marks a missing value and cannot be used as a value"
        if found := _LOST.search(text):
            return f"holds {found[0]!r}, which a config file cannot store; remove it"
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(entry)
