"""Packages that import a module when one of its names is first used."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["components.checkpoint", "components.distributed"])
def test_no_name_is_that_of_a_module(name: str) -> None:
    """Importing a module sets it as an attribute of its package, in the place of what the package lends."""
    package = importlib.import_module(name)
    modules = {file.stem for file in Path(str(package.__file__)).parent.glob("*.py")}
    assert modules.isdisjoint(package.__all__)
    assert set(package._HOMES) <= modules
