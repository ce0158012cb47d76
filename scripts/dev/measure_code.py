"""Measure the code of this or another checkout: sizes, repeated lines, imports, reflection.

python scripts/dev/measure_code.py                    # this checkout
python scripts/dev/measure_code.py ../meshbook-old    # another one, to compare

Statements are counted in the syntax tree: formatting, comments and docstrings make no difference.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from components.terminal import HelpText

ROOT = Path(__file__).resolve().parents[2]
CODE = ("components", "recipes", "scripts")
REFLECTION = {"getattr", "hasattr", "setattr", "attrgetter", "vars", "__dict__", "AttributeError"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> int:
    """Print the measurements of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    root = parser.parse_args().root.resolve()
    files = {
        path.relative_to(root): ast.parse(path.read_text())
        for folder in CODE
        for path in sorted((root / folder).rglob("*.py"))
    }
    components = {path: tree for path, tree in files.items() if path.parts[0] == "components"}
    for line in (*recipe_lines(root), *size_lines(root, files), *code_lines(root, components)):
        print(line)
    return 0


def recipe_lines(root: Path) -> Iterator[str]:
    """Yield the lines and own names of each recipe, and the fraction of lines that two recipes have in common."""
    recipes = [path for path in sorted((root / "recipes").glob("*.py")) if path.name != "__init__.py"]
    stripped = {}
    for path in recipes:
        lines = path.read_text().splitlines()
        stripped[path.name] = [line.strip() for line in lines if line.strip()]
        names = own_names(ast.parse(path.read_text()))
        listed = ", ".join(sorted(names))
        yield f"{path.relative_to(root)}: {len(lines)} lines, {len(names)} names of Meshbook ({listed})"
    for a, b in combinations(stripped, 2):
        yield f"recipes {a} and {b}: {shared_share(stripped[a], stripped[b]):.0%} of the lines are the same"


def shared_share(a: list[str], b: list[str]) -> float:
    """Return the fraction of the shorter file's lines that are in both files in the same order."""
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks()) / max(1, min(len(a), len(b)))


def own_names(recipe: ast.Module) -> set[str]:
    """Return the names of Meshbook that a recipe uses.

    These are attributes of packages imported from components, of `run` and of `step`, and names imported from deeper
    modules; the packages themselves and config keys do not count.
    """
    packages, ours = set[str](), set[str]()
    for node in ast.walk(recipe):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "components":
            names = {alias.asname or alias.name for alias in node.names}
            packages, ours = (packages | names, ours) if node.module == "components" else (packages, ours | names)
    roots = packages | ours | {"run", "step"}
    return ours | {node.attr for node in ast.walk(recipe) if isinstance(node, ast.Attribute) and _root(node) in roots}


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def size_lines(root: Path, files: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield the sizes of folders, files and functions, and the number of statements."""
    folders: dict[Path, int] = defaultdict(int)
    for path in files:
        folders[path.parent] += 1
    fullest = sorted(folders.items(), key=lambda each: -each[1])[:6]
    yield f"{len(files)} files; most in a folder: {', '.join(f'{path} {count}' for path, count in fullest)}"
    for folder in CODE:
        lengths = {path: len((root / path).read_text().splitlines()) for path in files if path.parts[0] == folder}
        longest = max(lengths, key=lambda path: lengths[path])
        functions = {
            f"{path}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
            for path in lengths
            for node in ast.walk(files[path])
            if isinstance(node, FUNCTIONS)
        }
        largest = max(functions, key=lambda name: functions[name])
        yield (
            f"{folder}: {len(lengths)} files of {sum(lengths.values()):,} lines, "
            f"median {statistics.median(lengths.values()):g}, longest {lengths[longest]} ({longest})"
        )
        yield (
            f"{folder}: functions of {statistics.median(functions.values()):g} lines in the median, "
            f"longest {functions[largest]} ({largest})"
        )
    for folder in CODE:
        count = sum(statements(tree) for path, tree in files.items() if path.parts[0] == folder)
        yield f"{folder}: {count:,} statements"


def statements(tree: ast.Module) -> int:
    """Return the number of statements, without docstrings and other bare constants."""
    return sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(tree)
    )


def code_lines(root: Path, components: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield the uses of reflection, the public names with several definitions, and the imports within components."""
    lines = sum(len((root / path).read_text().splitlines()) for path in components)
    uses = sum(map(reflection, components.values()))
    yield f"components: {uses} uses of {', '.join(sorted(REFLECTION))}: {1000 * uses / lines:.2f} per thousand lines"
    defined: dict[str, list[Path]] = defaultdict(list)
    for path, tree in components.items():
        for node in tree.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
                defined[node.name].append(path)
    twice = {name: paths for name, paths in defined.items() if len(paths) > 1}
    yield f"components: {len(twice)} public names with several definitions ({', '.join(sorted(twice))})"
    edges = import_edges(components)
    yield f"components: {sum(map(len, edges.values()))} imports between its files"
    inner = {
        name: {other for other in others if other.startswith("components.distributed")}
        for name, others in edges.items()
        if name.startswith("components.distributed") and name != "components.distributed"
    }
    for others in inner.values():
        others.discard("components.distributed")
    yield (
        f"components/distributed: {sum(map(len, inner.values()))} imports between its {len(inner)} files, "
        f"{layers(inner)} layers"
    )


def reflection(tree: ast.Module) -> int:
    """Return the number of uses of reflection."""
    return sum(map(_is_reflection, ast.walk(tree)))


def _is_reflection(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in REFLECTION
    return isinstance(node, ast.Attribute) and node.attr in REFLECTION


def import_edges(files: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Return the modules that each module imports, including imports in functions and under TYPE_CHECKING."""
    names = {_module(path): tree for path, tree in files.items()}
    edges: dict[str, set[str]] = {}
    for name, tree in names.items():
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.add(inner if inner in names else node.module)
        edges[name] = {each for each in found if each in names and each != name}
    return edges


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layers(edges: dict[str, set[str]]) -> int:
    """Return the number of modules on the longest chain of imports; each module of a cycle counts once."""

    def height(name: str, importers: frozenset[str]) -> int:
        imported = [other for other in edges.get(name, ()) if other not in importers]
        return 1 + max((height(other, importers | {name}) for other in imported), default=0)

    return max((height(name, frozenset()) for name in edges), default=0)


if __name__ == "__main__":
    sys.exit(main())
