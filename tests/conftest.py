"""Excludes what the tests import from garbage collections, which took a tenth of the tests' processor time."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.freeze()  # torch, transformers and the tests: half a million objects
