"""`@recipe("finetune")`: what happens when a recipe's main() is called without arguments."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from components.config.errors import ConfigError
from components.config.schema.recipes import RecipeConfig
from components.protocol.exit_codes import EXIT_INVALID
from components.protocol.role import Role, detect_role
from components.terminal import guard_output

if TYPE_CHECKING:
    from components.launch.backend import Recipe


def recipe(name: str) -> Callable[[Callable[[Any], object]], Callable[[], NoReturn]]:
    """Make `main(cfg)` a recipe: a program that composes conf/<name>.yaml, starts ranks, and runs main on each.

    The class of the config is main's annotation: `def main(cfg: FinetuneConfig)`. Calling the decorated main reads
    the command line and ends the process: status 0, 2 for a rejected configuration, 130 when interrupted, else 1.
    """

    def decorate(main: Callable[[Any], object]) -> Callable[[], NoReturn]:
        @functools.wraps(main)
        def start() -> NoReturn:
            sys.exit(_start(name, main))

        return start

    return decorate


def _start(name: str, main: Callable[[Any], object]) -> int:
    from components.protocol.failures import print_problems

    _open_closed_streams()
    guard_output()
    try:
        return _run(_describe(name, main))
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams (`>&-`), whose numbers the next file or socket would get."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """End as by SIGPIPE if the reader of the output has gone: `--help | head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes at its end
        raise SystemExit(128 + signal.SIGPIPE) from error


def _run(described: Recipe) -> int:
    """Act by the role of this process. Each role imports only what it needs."""
    role = detect_role(os.environ)
    if role is Role.worker:
        from components.launch.rank import end_rank, run_worker

        end_rank(run_worker(described))
    if role is Role.attached:
        from components.launch.attached import run_attached
        from components.launch.rank import end_rank

        end_rank(run_attached(described))
    from components.config.compose.command_line import asks_for_sweep
    from components.launch.clusters import backend_of
    from components.launch.open_run import open_run
    from components.launch.rank import run_here

    if asks_for_sweep():
        from components.launch.sweep.command import run_sweep

        return run_sweep(described)
    with _reader_may_leave():
        run = open_run(described)
    if run is None:
        return 0
    return backend_of(run.cfg.cluster.kind).submit(run, lambda: run_here(described, run.cfg, run.directory))


def _describe(name: str, main: Callable[[Any], object]) -> Recipe:
    """Return the recipe with its schema and file. Raises ConfigError if main has no annotation of its config."""
    from components.launch.backend import Recipe

    parameters = list(inspect.signature(main).parameters)
    schema = get_type_hints(main).get(parameters[0]) if len(parameters) == 1 else None
    if not (isinstance(schema, type) and issubclass(schema, RecipeConfig)):
        raise ConfigError(
            f"recipe {name}: main must take one argument whose annotation is its config class, for example "
            "main(cfg: FinetuneConfig)"
        )
    file = Path(main.__globals__["__file__"]).resolve()
    beside, ours = file.parent / "components", Path(__file__).resolve().parents[1]
    if beside.is_dir() and beside.resolve() != ours:
        raise ConfigError(
            f"{beside}: a folder of this name beside the recipe hides this project's components ({ours}); rename it, "
            "or move the recipe"
        )
    return Recipe(name, main, schema, file)
