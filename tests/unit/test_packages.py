"""Lazy packages: each imports a module when one of its names is first used."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMPONENTS = Path(__file__).resolve().parents[2] / "components"
LAZY = sorted(
    f"components.{init.parent.name}" for init in COMPONENTS.glob("*/__init__.py") if "lazy_names(" in init.read_text()
)
ALL = [*LAZY, "meshbook"]
PACKAGES = sorted(str(init.parent.relative_to(COMPONENTS.parent)) for init in COMPONENTS.rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_docstring_of_a_package_lists_its_files_and_folders(package: str) -> None:
    """One line for each, which begins with its name."""
    folder = COMPONENTS.parent / package
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = re.findall(r"^ *(\w+(?:\.py|/)) ", docstring, re.MULTILINE)
    files = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
    folders = [f"{init.parent.name}/" for init in folder.glob("*/__init__.py")]
    assert sorted(listed) == sorted(files + folders)


@pytest.mark.parametrize("name", ALL)
def test_no_public_name_equals_a_module_name(name: str) -> None:
    """Importing a module sets an attribute of its package, which would replace the public name."""
    package = importlib.import_module(name)
    folder = Path(str(package.__file__)).parent
    assert package.__all__
    assert {each.stem for each in folder.iterdir()}.isdisjoint(package.__all__)


def test_importing_components_does_not_import_torch() -> None:
    code = f"from components import {', '.join(name.rpartition('.')[2] for name in LAZY)}; import sys; " + (
        "assert not {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules), sorted(sys.modules)"
    )
    assert len(LAZY) == 6
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_every_lazy_name_can_be_imported() -> None:
    """Every public name, in a process that has imported nothing yet."""
    code = f"""
import importlib
for package in map(importlib.import_module, {ALL}):
    for name in package.__all__:
        getattr(package, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_lazy_package_lists_its_names_before_import() -> None:
    code = (
        "from components import models; assert 'build_on_meta' in models.__all__; assert dir(models) == models.__all__"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_name_raises_attribute_error() -> None:
    message = "module 'components.models' has no attribute 'bulid_on_meta'; did you mean build_on_meta?"
    with pytest.raises(AttributeError, match=re.escape(message)):
        _ = importlib.import_module("components.models").bulid_on_meta


def test_imports_pause_garbage_collections() -> None:
    """Nothing is collected while torch is imported, what it made is frozen, and later garbage is collected again."""
    code = """
import gc, weakref
from components import training
collected = []
gc.callbacks.append(lambda phase, info: collected.append(phase))
training.Run
assert collected.count("start") < 5, collected.count("start")  # otherwise about 700
assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()
frozen = gc.get_freeze_count()

class Node:
    pass

node = Node()
node.cycle, alive = node, weakref.ref(node)
training.prepare  # imports transformers; a model that exists by then must not be frozen
assert gc.get_freeze_count() <= frozen
del node
gc.collect()
assert alive() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
