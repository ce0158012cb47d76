"""Strings that omegaconf or YAML would misread: ${, ??? and characters that YAML cannot store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

UNSET = "???"
"""omegaconf's marker of a required value."""

_MARK = re.compile(r"(\\*)\$\{")
_LOST = re.compile("[\x85\ud800-\udfff]")
"""NEL, which YAML reads as a line break, and surrogates, which stand for bytes that are not UTF-8."""


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
