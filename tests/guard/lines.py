"""Invalid command lines of a recording: those of the config tests, and random ones."""

from __future__ import annotations

import shlex

from tests.config import wrong_lines as tables
from tests.config.random_lines import wrong_line

RANDOM = 60


def wrong_lines() -> list[list[str]]:
    """Return each command line as a list of arguments."""
    rows = [row[0] for table in vars(tables).values() if isinstance(table, list) for row in table]
    named = [shlex.split(row) for row in rows if isinstance(row, str)]
    return [*named, *(list(wrong_line(7_000_000 + seed).arguments) for seed in range(RANDOM))]
