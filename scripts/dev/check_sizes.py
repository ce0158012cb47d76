"""Check the limits of recipes, files, functions, folders, reflection and structure, with a line per violation.

python scripts/dev/check_sizes.py    # exits with status 1 if there is one
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from scripts.dev.measure_code import REFLECTION, own_names, reflection, shared_share
from scripts.dev.measure_structure import Structure

ROOT = Path(__file__).resolve().parents[2]
RECIPE_LINES, FILE_LINES, FUNCTION_LINES, NESTING, ARGUMENTS = 120, 500, 80, 5, 7
FOLDER_FILES = 20
"""Maximum number of Python files in a folder."""
OWN_NAMES = 30
"""Maximum number of Meshbook's names that a recipe uses."""
REFLECTION_SHARE = 1.5
"""Maximum uses of reflection in `components`, per thousand lines."""
STRUCTURE = {
    "files": 231,
    "folders": 26,
    "public_names_per_kcode": 39.0,
    "names_defined_twice": 18,
    "of_them_below_120_lines": 1,
    "circles": 0,
    "reach_of_train_step": 55,
    "reach_of_classify": 135,
    "reach_of_distill": 140,
    "reach_of_dpo": 139,
    "reach_of_evaluate": 137,
    "reach_of_finetune": 137,
    "reach_of_grpo": 142,
    "reach_of_pretrain": 137,
}
"""Maximum of each figure of `measure_structure`, of `components`. These limits may only fall."""
SHARED = 0.4
"""Maximum fraction of lines that two recipes have in common."""
ALIKE = {("finetune.py", "pretrain.py")}
"""Pairs of nearly identical recipes, exempt from SHARED; a test checks their differences instead."""
SEED_SIGNATURES = {"fsdp2_strategy_parallelize", "nvfsdp_strategy_parallelize"}
"""Functions with the signatures of NeMo AutoModel's `nemo_automodel.components.distributed.parallelizer`, exempt from
the limits of length and arguments."""
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)


def problems_of(file: Path) -> list[str]:
    """Return the violations in `file`, one line each."""
    text = file.read_text()
    name = file.relative_to(ROOT)
    limit = RECIPE_LINES if name.parts[0] == "recipes" else FILE_LINES
    lines = text.count("\n")
    found = [f"{name}: {lines} lines, at most {limit}"] if lines > limit else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += _problems_of_function(node, f"{name}:{node.lineno} {node.name}", name.parts[0] == "recipes")
    return found


def _problems_of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, where: str, in_recipe: bool) -> list[str]:
    found = []
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    # A recipe's main keeps its training loop in one piece; the limit of the file applies to it.
    if length > FUNCTION_LINES and not in_recipe and node.name not in SEED_SIGNATURES:
        found.append(f"{where}: {length} lines, at most {FUNCTION_LINES}")
    positional = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
    arguments = len(node.args.posonlyargs) + len(positional) + len(node.args.kwonlyargs)
    if arguments > ARGUMENTS and node.name not in SEED_SIGNATURES:
        found.append(f"{where}: {arguments} arguments, at most {ARGUMENTS}")
    deepest = _nesting(node)
    if deepest > NESTING:
        found.append(f"{where}: nested {deepest} deep, at most {NESTING}")
    return found


def problems_of_recipes(folder: Path) -> Iterator[str]:
    """Yield the recipes with too many names of Meshbook, and the pairs with too many lines in common."""
    recipes = {file.name: file.read_text() for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"}
    for name, text in recipes.items():
        if len(own := own_names(ast.parse(text))) > OWN_NAMES:
            yield f"recipes/{name}: {len(own)} names of Meshbook, at most {OWN_NAMES}"
    stripped = {name: [line.strip() for line in text.splitlines() if line.strip()] for name, text in recipes.items()}
    for one, other in combinations(stripped, 2):
        share = shared_share(stripped[one], stripped[other])
        if share > SHARED and (one, other) not in ALIKE:
            yield f"recipes/{one} and {other} share {share:.0%} of their lines, at most {SHARED:.0%}"


def problems_of_folders(files: list[Path]) -> Iterator[str]:
    """Yield the folders with too many Python files."""
    for folder, count in sorted(Counter(str(file.parent.relative_to(ROOT)) for file in files).items()):
        if count > FOLDER_FILES:
            yield f"{folder}: {count} Python files, at most {FOLDER_FILES}"


def problems_of_reflection(files: list[Path]) -> Iterator[str]:
    """Yield a line if the files use reflection too often, such as getattr where a protocol or a match would do."""
    texts = [file.read_text() for file in files]
    uses, lines = sum(reflection(ast.parse(text)) for text in texts), sum(len(text.splitlines()) for text in texts)
    if 1000 * uses > REFLECTION_SHARE * lines:
        yield (
            f"components: {uses} uses of {', '.join(sorted(REFLECTION))} in {lines} lines, at most {REFLECTION_SHARE} "
            "per thousand lines"
        )


def problems_of_structure(root: Path) -> Iterator[str]:
    """Yield the figures of `components` in a checkout that exceed their limits, and recipes that have none."""
    figures = Structure.read(root).figures()
    for name, value in figures.items():
        limit = STRUCTURE.get(name)
        if limit is None and name.startswith("reach_of_"):
            yield f"components: {name} is {value:g} and has no limit; add one to STRUCTURE in check_sizes.py"
        elif limit is not None and value > limit:
            yield f"components: {name} is {value:g}, at most {limit:g}; measure_structure.py --list shows what counts"


def _nesting(node: ast.AST, depth: int = 0) -> int:
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        inner = depth + isinstance(child, BLOCKS)
        deepest = max(deepest, _nesting(child, inner))
    return deepest


def main() -> int:
    """Check every Python file outside tests; return the exit status."""
    files = [
        file for folder in ("recipes", "components", "scripts", "meshbook") for file in (ROOT / folder).rglob("*.py")
    ]
    problems = [line for file in sorted(files) for line in problems_of(file)]
    problems += [*problems_of_folders(files), *problems_of_recipes(ROOT / "recipes")]
    problems += problems_of_reflection([file for file in files if file.is_relative_to(ROOT / "components")])
    problems += problems_of_structure(ROOT)
    print("\n".join(problems) or f"{len(files)} files within the limits")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
