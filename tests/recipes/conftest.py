from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preloaded import PreloadedPopen
from tests.recipes.launching import Bench, kill_leftovers


@pytest.fixture(scope="session", autouse=True)
def restore_sigint() -> None:
    """A shell starts background jobs with SIGINT ignored, and every command that a test starts would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def fork_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork recipes and scripts from this process, which has torch imported, unless the module is marked otherwise."""
    with pytest.MonkeyPatch.context() as patched:
        if request.node.get_closest_marker("new_interpreter") is None:
            patched.setattr(subprocess, "Popen", PreloadedPopen)
        yield


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A working directory with its own recipe file; processes started from it are killed after the test."""
    made = Bench(tmp_path / "bench")
    made.folder.mkdir()
    yield made
    kill_leftovers(made)
