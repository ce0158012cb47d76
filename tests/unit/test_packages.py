"""Lazy packages: each imports a module when one of its names is first used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

COMPONENTS = Path(__file__).resolve().parents[2] / "components"
LAZY = sorted(
    f"components.{init.parent.name}" for init in COMPONENTS.glob("*/__init__.py") if "lazy.attach(" in init.read_text()
)


@pytest.mark.parametrize("name", LAZY)
def test_no_name_is_that_of_a_module(name: str) -> None:
    """Importing a module sets an attribute of its package, which would replace the public name."""
    package = importlib.import_module(name)
    folder = Path(str(package.__file__)).parent
    assert package.__all__
    assert {each.stem for each in folder.iterdir()}.isdisjoint(package.__all__)


def test_a_recipe_imports_no_torch_before_it_uses_a_part() -> None:
    code = f"from components import {', '.join(name.rpartition('.')[2] for name in LAZY)}; import sys; " + (
        "assert not {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules), sorted(sys.modules)"
    )
    assert len(LAZY) == 7
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_laziness_hides_no_import_error() -> None:
    """Every public name, in a process that has imported nothing yet."""
    code = f"""
import importlib
for package in map(importlib.import_module, {LAZY}):
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
