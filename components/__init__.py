"""The parts that recipes are made of.

Packages are handed out lazily, so that the line `from components import data, distributed, training` opens a
recipe as its table of contents and costs nothing until a part is used: a login node that only submits a
job never imports torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components import (  # noqa: F401  (type checkers see plain submodules)
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


def __getattr__(name: str) -> ModuleType:
    """Return the package `components.<name>`, executed at the first access of one of its attributes."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if os.environ.get("MESHBOOK_EAGER_IMPORT") == "1":
        return importlib.import_module(f"{__name__}.{name}")
    qualified = f"{__name__}.{name}"
    if qualified not in sys.modules:
        spec = importlib.util.find_spec(qualified)
        if spec is None or spec.loader is None:
            raise ImportError(f"{qualified} is part of Meshbook but was not found; reinstall the project")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module
        spec.loader.exec_module(module)
    # Stored here, so that `from components import data` does not import the package a second time, eagerly.
    globals()[name] = sys.modules[qualified]
    return sys.modules[qualified]
