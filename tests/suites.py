"""What runs at each commit, and what only `make parity` and `make torture` run."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TypeVar

import pytest

PARITY = os.environ.get("MESHBOOK_ALL_PARITY") == "1"
"""Whether the tests of equal curves, plans and counts run all their cases: make parity."""
TORTURE = os.environ.get("MESHBOOK_TORTURE") == "1"
"""Whether the tests of kills, faults and wrong input run all their cases: make torture."""

in_parity = pytest.mark.skipif(not PARITY, reason="make parity")
in_torture = pytest.mark.skipif(not TORTURE, reason="make torture")

Case = TypeVar("Case")


def select(cases: Collection[Case], at_each_commit: Collection[Case], everything: bool) -> list[Case]:
    """Return all `cases` if `everything` is set, else those `at_each_commit`, which must be among them."""
    unknown = [case for case in at_each_commit if case not in cases]
    if unknown:
        raise ValueError(f"no such cases: {unknown}")
    return [case for case in cases if everything or case in at_each_commit]
