from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.launching import Bench, kill_leftovers


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell lets what it starts in the background ignore SIGINT, and so would every command that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A folder for a recipe of the test's own; nothing started from it outlives the test."""
    made = Bench(tmp_path / "bench")
    made.folder.mkdir()
    yield made
    kill_leftovers(made)
