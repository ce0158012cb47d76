"""Measure what a reader of this or another checkout must know: files, public names, and imports between modules.

python scripts/dev/measure_structure.py                    # this checkout
python scripts/dev/measure_structure.py ../meshbook-old    # another one, to compare
python scripts/dev/measure_structure.py --list             # also the modules and names that are counted

All figures but the reach are of `components`. Imports in functions and below TYPE_CHECKING count. The import of a name
that the __init__.py of a package re-exports counts as an import of the module that defines the name; packages
themselves are not counted as imported or importing.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from components.terminal import HelpText
from scripts.dev.measure_code import FUNCTIONS, ROOT

FOLDERS = ("components", "recipes", "scripts", "meshbook", "examples")
"""Folders whose imports are followed."""
CRUMB_LINES = 120
"""Lines below which a module with a single importer is a crumb: it belongs into its importer."""


def main() -> int:
    """Print the figures of a checkout, and its import circles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    parser.add_argument("--list", action="store_true", help="list the modules with a single importer and the names")
    options = parser.parse_args()
    structure = Structure.read(options.root.resolve())
    for name, value in structure.figures().items():
        print(f"{name:32} {value}")
    for circle in structure.circles:
        print("circle:", " <-> ".join(circle))
    if options.list:
        for name in structure.crumbs:
            print(f"one importer, {structure.lines(name)} lines: {name} <- {structure.importers[name][0]}")
        for name, count in structure.repeated.items():
            print(f"defined {count} times: {name}")
    return 0


@dataclass(frozen=True)
class Structure:
    """Modules of a checkout, their imports and the public names that they define."""

    paths: dict[str, Path]
    """Files by module name; that of a package is its __init__.py."""
    texts: dict[str, str]

    @classmethod
    def read(cls, root: Path) -> Structure:
        """Read the Python files of a checkout."""
        paths = {_module(path.relative_to(root)): path for folder in FOLDERS for path in (root / folder).rglob("*.py")}
        return cls(dict(sorted(paths.items())), {name: path.read_text() for name, path in paths.items()})

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Syntax trees by module name."""
        return {name: ast.parse(self.texts[name]) for name in self.paths}

    @cached_property
    def components(self) -> list[str]:
        """Modules and packages of `components`."""
        return [name for name in self.paths if name.split(".")[0] == "components"]

    def is_package(self, name: str) -> bool:
        """Return whether a module is a package."""
        return self.paths[name].name == "__init__.py"

    def lines(self, name: str) -> int:
        """Return the number of lines of a module."""
        return len(self.texts[name].splitlines())

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules that each module imports, without packages."""
        return {name: self._imports_of(name) for name in self.paths if not self.is_package(name)}

    @cached_property
    def importers(self) -> dict[str, list[str]]:
        """The modules that import each module of `components`."""
        own = [name for name in self.components if not self.is_package(name)]
        return {name: [other for other, imported in self.imports.items() if name in imported] for name in own}

    @cached_property
    def crumbs(self) -> list[str]:
        """Modules below CRUMB_LINES that a single module imports."""
        return [name for name, others in self.importers.items() if len(others) == 1 and self.lines(name) < CRUMB_LINES]

    @cached_property
    def public(self) -> Counter[str]:
        """Number of definitions of each public function, class and constant at the top level of a module."""
        names = Counter(name for module in self.components for name in _defined(self.trees[module]))
        return Counter({name: count for name, count in names.items() if not name.startswith("_")})

    @cached_property
    def repeated(self) -> dict[str, int]:
        """Public names that are defined more than once, most definitions first."""
        return {name: count for name, count in self.public.most_common() if count > 1}

    @cached_property
    def circles(self) -> list[list[str]]:
        """Groups of modules of `components` of which each imports every other one, through others or not."""
        reached = {name: self.reach(name) for name in self.importers}
        groups = {frozenset(other for other in others if name in reached[other]) for name, others in reached.items()}
        return sorted(sorted(group) for group in groups if len(group) > 1)

    def reach(self, start: str) -> set[str]:
        """Return the modules of `components` that a module imports, through others or not, with itself if it is one."""
        reached, new = {start}, [start]
        while new:
            found = self.imports.get(new.pop(), set()) - reached
            reached |= found
            new += found
        return {name for name in reached if name in self.importers}

    def figures(self) -> dict[str, float]:
        """Return the figures by name; those of `check_sizes.STRUCTURE` are limited."""
        code = sum(code_lines(self.texts[name], self.trees[name]) for name in self.components)
        recipes = [name for name in self.imports if name.startswith("recipes.")]
        return {
            "files": len(self.components),
            "folders": len({self.paths[name].parent for name in self.components}),
            "lines": sum(map(self.lines, self.components)),
            "code_lines": code,
            "public_names_per_kcode": round(1000 * self.public.total() / max(code, 1), 1),
            "names_defined_twice": len(self.repeated.keys() - {"logger"}),
            "modules_with_one_importer": sum(len(others) == 1 for others in self.importers.values()),
            "of_them_below_120_lines": len(self.crumbs),
            "circles": len(self.circles),
            "reach_of_train_step": len(self.reach("components.training.step")),
            **{f"reach_of_{name.removeprefix('recipes.')}": len(self.reach(name)) for name in recipes},
        }

    def _imports_of(self, module: str) -> set[str]:
        packages, found = dict[str, str](), set[str]()
        nodes = list(ast.walk(self.trees[module]))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in FOLDERS:
                for alias in node.names:
                    target, is_module = self._resolved(node.module, alias.name)
                    if is_module and self.is_package(target):
                        packages[alias.asname or alias.name] = target
                    else:
                        found.add(target)
        for node in nodes:  # attributes of imported packages, such as training.Run
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
                found.add(self._resolved(packages[node.value.id], node.attr)[0])
        return {name for name in found if name in self.paths and not self.is_package(name) and name != module}

    def _resolved(self, package: str, name: str) -> tuple[str, bool]:
        """Return the module that defines a name of a package or module, and whether the name is itself a module."""
        if f"{package}.{name}" in self.paths:
            return f"{package}.{name}", True
        if name in self._exports.get(package, {}):
            return self._resolved(*self._exports[package][name])
        return package, False

    @cached_property
    def _exports(self) -> dict[str, dict[str, tuple[str, str]]]:
        """Names that each package imports from modules, by the name under which it exports them."""
        return {
            package: {
                alias.asname or alias.name: (node.module, alias.name)
                for node in ast.walk(self.trees[package])
                if isinstance(node, ast.ImportFrom) and node.module and node.module != package
                for alias in node.names
            }
            for package in self.paths
            if self.is_package(package)
        }


def code_lines(text: str, tree: ast.Module) -> int:
    """Return the number of lines of a module without docstrings, comments and empty lines."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))]
    documented = {line for body in bodies for statement in body for line in _lines_of_text(statement)}
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return sum(number not in documented and bool(line) and not line.startswith("#") for number, line in lines)


def _lines_of_text(node: ast.stmt) -> range:
    """Return the numbers of the lines of a docstring, of a module or anything else; none for other statements."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return range(0)


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the functions, classes and constants (in capitals) that a module defines at its top level."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper())


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


if __name__ == "__main__":
    sys.exit(main())
