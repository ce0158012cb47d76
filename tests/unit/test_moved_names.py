"""Names of earlier versions: importing one names the new one, which exists."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from components.moved import MODULES, NAMES


@pytest.mark.parametrize("old", MODULES)
def test_an_old_module_names_the_new_one(old: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=MODULES[old].replace(".", r"\.")):
        importlib.import_module(old)
    importlib.import_module(MODULES[old])


@pytest.mark.parametrize("old", NAMES)
def test_an_old_name_names_the_new_one(old: str) -> None:
    package, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match=NAMES[old].replace(".", r"\.")):
        getattr(importlib.import_module(package), name)


def test_other_modules_that_do_not_exist_are_reported_as_ever() -> None:
    done = subprocess.run([sys.executable, "-c", "import components.nope"], capture_output=True, text=True, check=False)
    assert "No module named 'components.nope'" in done.stderr
