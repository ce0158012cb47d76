"""`@recipe("finetune")`: the decorator of a recipe's main."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from components.config.schema.recipes import RecipeConfig
from components.package import COMPONENTS, HELP
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.protocol.processes import Role, detect_role
from components.terminal import guard_output, open_output


@dataclass(frozen=True, slots=True)
class Recipe:
    """A main decorated with `@recipe`."""

    name: str
    main: Callable[[Any], object]
    schema: type[RecipeConfig]
    file: Path

    @property
    def description(self) -> str:
        """The text that --help begins with: the docstring of the recipe's file."""
        names = self.main.__globals__
        return names.get(HELP) or names["__doc__"] or ""


def recipe(name: str) -> Callable[[Callable[[Any], object]], Callable[[], NoReturn]]:
    """Make `main(cfg)` a recipe: a program that composes conf/<name>.yaml, starts ranks, and runs main on each.

    The annotation of main's argument is the config class: `def main(cfg: FinetuneConfig)`. Calling the decorated main
    parses the command line and exits: status 0, 2 for a rejected config, 130 after a second Ctrl-C, 75 for a hung run,
    76 for a run in which a rank computes wrong numbers, else 1.
    """

    def decorate(main: Callable[[Any], object]) -> Callable[[], NoReturn]:
        @functools.wraps(main)
        def start() -> NoReturn:
            sys.exit(_start(name, main))

        return start

    return decorate


def _start(name: str, main: Callable[[Any], object]) -> int:
    """Start the recipe as a rank or as its launcher; return the exit status.

    Both are programs of their own around main. They are named here and not imported, so that what a recipe imports is
    what it trains with.
    """
    from components.protocol.failures import print_problems

    open_output()
    guard_output(sys.stdout, sys.stderr)
    try:
        described = _describe(name, main)
        if detect_role(os.environ) is Role.worker:
            rank = importlib.import_module("components.launch.rank")
            rank.end_rank(rank.run_worker(described))
        return importlib.import_module("components.launch.start").start(described)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID


def _describe(name: str, main: Callable[[Any], object]) -> Recipe:
    """Return the recipe with its schema and file. Raises ConfigError if main's config argument is not annotated."""
    parameters = list(inspect.signature(main).parameters)
    schema = get_type_hints(main).get(parameters[0]) if len(parameters) == 1 else None
    if not (isinstance(schema, type) and issubclass(schema, RecipeConfig)):
        raise ConfigError(
            f"recipe {name}: main must take one argument annotated with its config class, for example "
            "main(cfg: FinetuneConfig)"
        )
    file = Path(main.__globals__["__file__"]).resolve()
    neighbor = file.parent / "components"
    if neighbor.is_dir() and neighbor.resolve() != COMPONENTS:
        raise ConfigError(
            f"{neighbor}: this folder next to the recipe shadows Meshbook's components ({COMPONENTS}); rename it, or "
            "move the recipe"
        )
    return Recipe(name, main, schema, file)
