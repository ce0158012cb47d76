"""The folders of Meshbook, in a checkout or in a wheel, and lazy packages.

`from components import models` imports no module of the package until one of its names is used.

A login node that only submits a job, and a script that only lists checkpoints, must not import torch. A lazy package's
`__init__` lists its public names once, as import statements that type checkers and import-linter read too:

    if TYPE_CHECKING:
        from components.models.build import build_on_meta
    else:
        __getattr__, __dir__ = package.lazy_names(__name__)

The library lazy_loader needs the names in a dict or a `.pyi` file, which would repeat these statements, and takes 2 ms
to import. Parsing the statements takes 0.3 ms per package, at the first use of one of its names.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

COMPONENTS = Path(__file__).resolve().parent
"""This package."""
INSTALLED = COMPONENTS.parent / "meshbook"
"""The package that a wheel installs next to `components`; in a checkout it has no conf/."""
PROJECT = INSTALLED if (INSTALLED / "conf").is_dir() else COMPONENTS.parent
"""Folder that contains conf/, recipes/, scripts/, slurm/ and k8s/."""
HELP = "__help__"
"""Global variable of a recipe's module that replaces its docstring in --help, if the command meshbook starts it."""


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__`, which imports a name from its module at the first use, and its `__dir__`.

    No name may equal the name of a module in the package, since importing that module sets the attribute to the module.

    Args:
        package: The package's `__name__`. Its public names are the imports below `if TYPE_CHECKING:`.
    """

    def import_on_first_use(name: str) -> Any:
        if name == "__all__":
            return sorted(_imports(package))
        if name.startswith("__") or name not in _imports(package):  # torch and inspect probe dunder names
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_like(package, name)}")
        with _no_collections():
            value = getattr(__import__(_imports(package)[name], fromlist=[name]), name)  # imports also a module
        setattr(sys.modules[package], name, value)
        return value

    return import_on_first_use, lambda: sorted(_imports(package))


def _like(package: str, name: str) -> str:
    """Return the end of the message about an unknown name."""
    if name.startswith("__"):
        return ""
    from difflib import get_close_matches  # here because it takes 1 ms

    close = get_close_matches(name, _imports(package), 1)
    return f"; did you mean {close[0]}?" if close else f"; dir({package}) lists its names"


@contextmanager
def _no_collections() -> Iterator[None]:
    """Import without garbage collections, which would visit the new modules again and again: 0.8 s of 4.6 s for torch.

    The import of torch also freezes all objects, that is excludes them from later collections. No other import does:
    a model that exists by then would never be collected.
    """
    if not gc.isenabled():
        yield
        return
    before = "torch" in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if not before and "torch" in sys.modules:
            gc.freeze()
        gc.enable()


@cache
def _imports(package: str) -> dict[str, str]:
    """Return public name -> module, from the imports below `if TYPE_CHECKING:` of a package's `__init__`."""
    import ast  # here because it takes 2 ms, and `from components import models` does not need it

    with open(str(sys.modules[package].__file__), encoding="utf-8") as file:
        tree = ast.parse(file.read())
    blocks = [each for each in tree.body if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"]
    imports = [each for block in blocks for each in block.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: str(each.module) for each in imports for alias in each.names}
