"""Packages that import a module when one of its names is first used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

LENDING = ["components.checkpoint", "components.distributed", "components.models"]


@pytest.mark.parametrize("name", LENDING)
def test_no_name_is_that_of_a_module(name: str) -> None:
    """Importing a module sets it as an attribute of its package, in the place of what the package lends."""
    package = importlib.import_module(name)
    modules = {file.stem for file in Path(str(package.__file__)).parent.glob("*.py")}
    assert modules.isdisjoint(package.__all__)


@pytest.mark.slow
def test_laziness_hides_no_import_error() -> None:
    """Every lent name, and every other part, in a process that has imported nothing yet."""
    names = [*LENDING, "components.data", "components.observability", "components.training"]
    code = f"""
import importlib
for package in map(importlib.import_module, {names}):
    for name in package.__all__:
        getattr(package, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_part_that_was_not_used_yet_tells_what_it_has() -> None:
    code = "from components import models; assert 'build_on_meta' in models.__all__"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'components.models' has no attribute 'bulid_on_meta'"):
        _ = importlib.import_module("components.models").bulid_on_meta
