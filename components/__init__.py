"""The parts that recipes are made of.

Packages are handed out lazily, so that the line `from components import data, distributed, training` opens a
recipe as its table of contents and costs nothing until a part is used: a login node that only submits a
job never imports torch.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components import (
        checkpoint,
        config,
        data,
        distributed,
        launch,
        models,
        observability,
        training,
    )

__all__ = ["checkpoint", "config", "data", "distributed", "launch", "models", "observability", "training"]


class _LazyPackage(ModuleType):
    """A package that is executed when something is asked of it that it does not have yet.

    importlib's LazyLoader runs at any access, `__file__` included. But torch, while it is being imported, has
    `inspect` look at the `__file__` of every module, and a part executed then would find torch half made. Of the names
    with underscores only `__all__`, which a part itself gives, is worth executing it.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        spec = self.__spec__
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.__name__} is part of Meshbook but was not found; reinstall the project")
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.exec_module(self)
        return getattr(self, name)


def __getattr__(name: str) -> ModuleType:
    """Return the package `components.<name>`, executed when something of it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    qualified = f"{__name__}.{name}"
    if qualified not in sys.modules:
        spec = importlib.util.find_spec(qualified)
        if spec is None or spec.origin is None:
            raise ImportError(f"{qualified} is part of Meshbook but was not found; reinstall the project")
        package = _LazyPackage(qualified)
        package.__spec__, package.__file__, package.__loader__ = spec, spec.origin, spec.loader
        package.__path__ = list(spec.submodule_search_locations or [])
        package.__package__ = qualified
        sys.modules[qualified] = package
    # Stored here, so that `from components import data` does not import the package a second time, eagerly.
    globals()[name] = sys.modules[qualified]
    return sys.modules[qualified]
