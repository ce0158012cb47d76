from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.config.commands import Commands, served


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """A server that runs command lines of recipes."""
    with served() as server:
        yield server
