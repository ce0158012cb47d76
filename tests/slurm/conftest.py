from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.config.commands import Commands, served
from tests.slurm.cluster import Cluster
from tests.slurm.login import Login
from tests.slurm.requirements import missing_requirement


@pytest.fixture(scope="session")
def slurm() -> None:
    """Skip a test, with the reason, where no cluster can run; under MESHBOOK_REQUIRE_SLURM=1 fail instead."""
    reason = missing_requirement()
    if reason and os.environ.get("MESHBOOK_REQUIRE_SLURM") == "1":
        pytest.fail(f"MESHBOOK_REQUIRE_SLURM=1, but {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(slurm: None) -> Iterator[Cluster]:
    """One cluster shared by all Slurm tests."""
    started = Cluster.started()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    """A server that runs each command in a fraction of a second."""
    with served() as server:
        yield server


@pytest.fixture
def fresh_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster for tests that cancel jobs, crash nodes or leave jobs; all nodes are idle before and after."""
    cluster.reset()
    yield cluster
    cluster.reset()


@pytest.fixture
def login(fresh_cluster: Cluster, tmp_path: Path) -> Login:
    """A user's empty folder on the login node of an idle cluster."""
    return Login(fresh_cluster, tmp_path)
