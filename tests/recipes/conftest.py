from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.launching import Bench, kill_leftovers


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A folder for a recipe of the test's own; nothing started from it outlives the test."""
    made = Bench(tmp_path / "bench")
    made.folder.mkdir()
    yield made
    kill_leftovers(made)
