"""Texts that omegaconf or YAML would take for something else than text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

UNSET = "???"
"""How omegaconf spells a value that must be given."""

_MARK = re.compile(r"(\\*)\$\{")
_LOST = re.compile("[\x85\ud800-\udfff]")
"""NEL, which YAML takes for the end of a line, and bytes that are no UTF-8."""


def literal(value: Any) -> Any:
    r"""Return `value` with `${` written `\${` in its texts: what omegaconf then reads is the text that was there."""
    if isinstance(value, str):
        return _MARK.sub(r"\1\1\\${", value)
    if isinstance(value, list):
        return [literal(entry) for entry in value]
    if isinstance(value, dict):
        return {key: literal(entry) for key, entry in value.items()}
    return value


def unstorable(value: Any) -> str | None:
    """Return what keeps `value` from coming back from a file as it is, None where nothing does."""
    for text in _texts(value):
        if text == UNSET:
            return f"{text} stands for a value that is missing; it cannot be one"
        if found := _LOST.search(text):
            return f"holds {found[0]!r}, which no config file can hold; leave it out"
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(entry)
