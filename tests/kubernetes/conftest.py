from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.config.commands import Commands, served
from tests.kubernetes.api import ApiServer
from tests.kubernetes.desk import Desk


def skip_or_fail(reason: str | None) -> None:
    """Skip a test for this reason, if there is one; under MESHBOOK_REQUIRE_KUBERNETES=1 fail instead."""
    if reason and os.environ.get("MESHBOOK_REQUIRE_KUBERNETES") == "1":
        pytest.fail(f"MESHBOOK_REQUIRE_KUBERNETES=1, but {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    """An API server with the namespace `train` and its claim `runs`."""
    if importlib.util.find_spec("kubernetes_validate") is None:
        skip_or_fail("kubernetes-validate is not installed (make install-dev installs it)")
    if shutil.which("kubectl") is None:
        skip_or_fail("there is no kubectl on PATH (Debian: kubernetes-client)")
    folder = tmp_path / "api"
    folder.mkdir()
    with ApiServer(folder) as server:
        server.add("/api/v1/namespaces/train")
        claim = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
        server.add("/api/v1/namespaces/train/persistentvolumeclaims/runs", **claim)
        yield server


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """A server that runs command lines without the start-up time of an interpreter."""
    with served() as server:
        yield server


@pytest.fixture
def desk(api: ApiServer, tmp_path: Path, commands: Commands) -> Desk:
    """A user's folder on a machine that mounts the claim's volume."""
    volume = tmp_path / "volume"
    volume.mkdir()
    return Desk(api, volume, commands)
