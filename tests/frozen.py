"""Frozen configs of runs that tests write by hand."""

from __future__ import annotations

import hashlib


def frozen(text: str) -> str:
    """Return the text of a config.yaml with these keys, in YAML: its first line is the checksum of the others."""
    return f"# sha256 of the lines below: {hashlib.sha256(text.encode()).hexdigest()}\n{text}"
