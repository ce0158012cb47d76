"""Packages whose names are imported when they are first used: scripts read what needs no torch without importing it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lend(package: str, homes: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """What a package needs to lend names of its modules: its `__all__` and its `__getattr__`.

    Args:
        package: the package's `__name__`.
        homes: module of the package -> the names it lends, separated by spaces.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def import_when_used(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(home_of), import_when_used
