"""`@recipe("finetune")`: the decorator of a recipe's main, and the dispatch by process role."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from components.config.schema.recipes import RecipeConfig
from components.project import COMPONENTS
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.protocol.processes import LAUNCHER_PID, Role, detect_role
from components.terminal import exit_on_broken_pipe, guard_output, keep_running, open_output

if TYPE_CHECKING:
    from components.launch.backend import Recipe


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
    from components.protocol.failures import print_problems

    open_output()
    guard_output(sys.stdout, sys.stderr)
    try:
        return _run(_describe(name, main))
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID


def _run(described: Recipe) -> int:
    """Run the recipe in the role of this process. Imports are local so that each role imports only what it needs."""
    role = detect_role(os.environ)
    if role is Role.worker:
        from components.launch.rank import end_rank, run_worker

        end_rank(run_worker(described))
    if role is Role.attached:
        from components.launch.open_run import run_attached
        from components.launch.rank import end_rank

        end_rank(run_attached(described))
    from components.config.compose.command_line import (
        REWRITTEN,
        compose_from_command_line,
        is_answered,
        is_sweep_requested,
    )

    if is_answered() and not any(each.startswith(REWRITTEN) for each in sys.argv[1:]):
        with exit_on_broken_pipe():
            compose_from_command_line(
                described.name, described.schema, described.file.parent, description=described.description
            )
        return 0
    from components.launch.clusters import backend_of
    from components.launch.open_run import open_run
    from components.launch.rank import die_with, run_here

    if caller := os.environ.pop(LAUNCHER_PID, None):
        die_with(int(caller), signal.SIGTERM)  # a killed notebook saves and stops its run
    if is_sweep_requested():
        keep_running()
        from components.launch.sweep.command import run_sweep

        return run_sweep(described)
    with exit_on_broken_pipe():
        run = open_run(described)
    if run is None:
        return 0
    keep_running()
    return backend_of(run.cfg.cluster).submit(run, lambda: run_here(described, run.cfg, run.directory))


def _describe(name: str, main: Callable[[Any], object]) -> Recipe:
    """Return the recipe with its schema and file. Raises ConfigError if main's config argument is not annotated."""
    from components.launch.backend import Recipe

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
