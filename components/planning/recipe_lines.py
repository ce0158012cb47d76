"""The lines of a recipe that build what its steps train: the model, the optimizer and the objective.

A recipe is a script, so only its lines state what a step is. A simulation executes those that the arguments of its
`train_step` depend on, and no others, which read data, start processes or write files.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from components.protocol.errors import ConfigError

_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_MODULE = "recipe_of_a_dry_run"


@dataclass(frozen=True, slots=True)
class RecipeLines:
    """What a simulation executes of a recipe."""

    main: FunctionType
    """The recipe's main, without its decorator."""
    statements: list[ast.stmt]
    """Statements before the first step that its arguments depend on, in order."""
    arguments: list[ast.expr]
    """Expressions of the model, the optimizer and the objective of a step."""
    objective_only: set[str]
    """Names that the objective depends on, and neither the model nor the optimizer."""
    run: set[str]
    """Name of the run."""
    tokenizers: set[str]
    """Names of tokenizers, which a simulation does not load."""

    def build(
        self, cfg: Any, run: Any, vocabulary: Callable[[], int], allocated: Callable[[], int]
    ) -> tuple[Any, Any, Any, int]:
        """Return the model, the optimizer and the objective, and the bytes that the objective allocates.

        Args:
            cfg, run: What the main's names for them stand for.
            vocabulary: Returns the length of a tokenizer, which is None in other places.
            allocated: Returns the bytes of all tensors.
        """
        names = {**self.main.__globals__, **dict.fromkeys(self.tokenizers), **dict.fromkeys(self.run, run)}
        names[self.main.__code__.co_varnames[0]] = cfg
        sized = _TokenizerLength(self.tokenizers, vocabulary)
        frozen = 0
        for statement in self.statements:
            before = allocated()
            exec(self._compiled(ast.Module([sized.visit(statement)], []), "exec"), names)
            if _stored(statement) & self.objective_only:
                frozen += allocated() - before
        model, optimizer, objective = (
            eval(self._compiled(ast.Expression(sized.visit(argument)), "eval"), names) for argument in self.arguments
        )
        return model, optimizer, objective, frozen

    def _compiled(self, tree: ast.Module | ast.Expression, mode: str) -> Any:
        return compile(ast.fix_missing_locations(tree), self.main.__code__.co_filename, mode)


class _TokenizerLength(ast.NodeTransformer):
    """Replaces `len(tokenizer)` by the size of the vocabulary."""

    def __init__(self, tokenizers: set[str], vocabulary: Callable[[], int]) -> None:
        self.tokenizers, self.vocabulary = tokenizers, vocabulary

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a call."""
        if _called(node) == "len" and _loaded(node.args[0]) & self.tokenizers:
            return ast.copy_location(ast.Constant(self.vocabulary()), node)
        return self.generic_visit(node)


def import_recipe(file: Path) -> FunctionType:
    """Import the script of a recipe, with the modules next to it; return its main without the decorator.

    Raises ConfigError if the script has no recipe, or several.
    """
    sys.path.insert(0, str(file.parent))
    tree = ast.parse(file.read_text("utf-8"), str(file))
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    names = [
        function.name for function in functions if any(_called(other) == "recipe" for other in function.decorator_list)
    ]
    if len(names) != 1:
        raise _refused(file, 1, f"the file has {len(names)} functions with @recipe, of which a simulation needs one")
    # A script without `if __name__ == "__main__":` starts its recipe wherever it is imported.
    tree.body = [each for each in tree.body if not (isinstance(each, ast.Expr) and _calls(each, names[0]))]
    module = ModuleType(_MODULE)
    module.__file__ = str(file)
    sys.modules[_MODULE] = module  # dataclasses of the script look it up
    values = vars(module)
    exec(compile(tree, str(file), "exec", dont_inherit=True), values)
    return inspect.unwrap(values[names[0]])


def read_lines(main: FunctionType) -> RecipeLines:
    """Read the lines of a recipe that build what its steps train.

    Raises ConfigError for a recipe without `train_step`, with several that train different things, or whose step
    depends on its data.
    """
    file, function = Path(main.__code__.co_filename), _definition(main)
    before, after = _around_first_step(file, function)
    assigned = {_called(each.value): _stored(each) for each in before if isinstance(each, ast.Assign)}
    tokenizers = assigned.get("load_tokenizer", set())
    run = assigned.get("Run", set()) | _run_names(function)
    given = {main.__code__.co_varnames[0], *run, *tokenizers}
    local = {*main.__code__.co_varnames, *main.__code__.co_cellvars} - given
    arguments = _step_arguments(file, function)
    needed = [_loaded(argument) for argument in arguments]
    if again := set().union(*needed) & set().union(*map(_stored, after)) & local:
        raise _refused(file, after[0].lineno, f"{min(again)} is assigned again after this line")
    data = _names_of_data(before, main.__globals__)
    statements: list[ast.stmt] = []
    for statement in reversed(before):
        stored, loaded = _stored(statement), _loaded(statement)
        users = [names for names in needed if stored & names - given]
        if users and stored & data:
            raise _refused(file, statement.lineno, f"what a step trains depends on data ({min(loaded & data)})")
        # A statement that stores nothing may change what it mentions, as in model.module.requires_grad_(False).
        if not users and isinstance(statement, ast.Expr | ast.If | ast.For) and not loaded & (data | run):
            users = [names for names in needed if loaded & names & local]
        is_preparation = isinstance(statement, ast.Expr) and statement in function.body and not loaded & (local | run)
        if users or is_preparation:
            statements.insert(0, statement)
        for names in users:
            names |= loaded
    model, optimizer, objective = needed
    return RecipeLines(main, statements, arguments, objective - model - optimizer, run, tokenizers)


def _definition(main: FunctionType) -> ast.FunctionDef:
    """Return the definition of a recipe's main in its file."""
    first = main.__code__.co_firstlineno
    tree = ast.parse(Path(main.__code__.co_filename).read_text("utf-8"))
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == main.__name__]
    return next(
        function
        for function in functions
        if first in (function.lineno, *(other.lineno for other in function.decorator_list))
    )


def _step_arguments(file: Path, function: ast.FunctionDef) -> list[ast.expr]:
    """Return the model, the optimizer and the objective of a main's steps."""
    definitions: dict[str, list[ast.expr]] = {}
    for call in ast.walk(function):
        if not (isinstance(call, ast.Call) and _called(call) == "train_step"):
            continue
        values = dict(zip(("model", "batches", "optimizer", "objective"), call.args, strict=False))
        values |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        wanted = [values[name] for name in ("model", "optimizer", "objective") if name in values]
        if len(wanted) < 3:
            raise _refused(file, call.lineno, "train_step needs a model, batches, an optimizer and an objective")
        definitions[str([ast.dump(each) for each in wanted])] = wanted
    if len(definitions) != 1:
        raise _refused(
            file, function.lineno, f"{len(definitions)} different calls of train_step; a simulation needs one"
        )
    return next(iter(definitions.values()))


def _around_first_step(file: Path, function: ast.FunctionDef) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return the statements of a main before run.begin or its loop, and the others, with blocks around them opened."""
    opened = list(_opened(function.body))
    for index, each in enumerate(opened):
        if not isinstance(each, _DEFINITIONS) and (_calls(each, "begin") or _calls(each, "train_step")):
            return opened[:index], opened[index:]
    raise _refused(file, function.lineno, f"{function.name} itself calls no train_step")


def _opened(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        opens = isinstance(statement, ast.With | ast.Try) and _calls(statement, "train_step")
        yield from _opened(statement.body) if opens else [statement]  # type: ignore[attr-defined]


def _run_names(function: ast.FunctionDef) -> set[str]:
    items = [item for each in ast.walk(function) if isinstance(each, ast.With) for item in each.items]
    runs = [item.optional_vars for item in items if _called(item.context_expr).endswith("Run")]
    return {run.id for run in runs if isinstance(run, ast.Name)}


def _names_of_data(statements: list[ast.stmt], names: Mapping[str, Any]) -> set[str]:
    """Return the names that statements assign from the package `components.data`, and from such names."""
    data = {name for name, value in names.items() if _module_of(value).startswith("components.data")}
    data |= {f"{name}.data" for name, value in names.items() if _module_of(value) in ("meshbook", "components")}
    for statement in statements:
        if _loaded(statement) & data:
            data |= _stored(statement)
    return data


def _module_of(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    return value.__module__ if isinstance(value, FunctionType | type) else ""


def _stored(tree: ast.AST) -> set[str]:
    """Return the names that a statement assigns, defines or imports, or whose attributes and items it assigns."""
    if isinstance(tree, ast.FunctionDef | ast.ClassDef):
        return {tree.name}
    if isinstance(tree, ast.Import | ast.ImportFrom):
        return {(name.asname or name.name).partition(".")[0] for name in tree.names}
    stored = set()
    for node in ast.walk(tree):
        target: Any = node
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            stored |= {target.id} if isinstance(target, ast.Name) else set()
    return stored


def _loaded(tree: ast.AST) -> set[str]:
    """Return the names that a tree reads, also with an attribute, as in `meshbook.data`."""
    loaded = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    attributes = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
    return loaded | {
        f"{attribute.value.id}.{attribute.attr}" for attribute in attributes if isinstance(attribute.value, ast.Name)
    }


def _calls(tree: ast.AST, name: str) -> bool:
    return any(_called(each) == name for each in ast.walk(tree))


def _called(tree: ast.AST) -> str:
    """Return the last name of the function that an expression calls; empty if it is no call."""
    function = tree.func if isinstance(tree, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _refused(file: Path, line: int, why: str) -> ConfigError:
    return ConfigError(f"cluster.dry_run=plan: {file}:{line}: {why}; set cluster.dry_run=true, which simulates no step")
