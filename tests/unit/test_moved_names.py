"""Names of earlier versions: importing one raises an error with the new name, which exists."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from components.moved import MODULES, NAMES


@pytest.mark.parametrize("old", MODULES)
def test_error_of_an_old_module_contains_the_new_name(old: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=MODULES[old].replace(".", r"\.")):
        importlib.import_module(old)
    importlib.import_module(MODULES[old])


@pytest.mark.parametrize("old", NAMES)
def test_error_of_an_old_name_contains_the_new_name(old: str) -> None:
    package, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match=NAMES[old].replace(".", r"\.")):
        getattr(importlib.import_module(package), name)


def test_other_missing_modules_raise_the_usual_error() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import components.nope"], capture_output=True, text=True, check=False
    )
    assert "No module named 'components.nope'" in result.stderr
