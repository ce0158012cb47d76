"""What a person typed, composed by Hydra, typed and checked; or everything that is wrong with it."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import main
from hydra._internal.utils import get_args_parser  # the one reader of Hydra's options; hydra-core is held below 1.4
from omegaconf.errors import OmegaConfBaseException

from components.config.compose.diagnose import COMPOSITION_ERRORS, diagnose
from components.config.compose.explain import override_parts
from components.config.compose.frozen import Config, from_container
from components.config.compose.sources import Request, config_folders, register_schemas
from components.config.compose.typed import free_keys
from components.config.errors import ConfigError
from components.config.schema.checks import raise_all


def compose_from_command_line(
    name: str, schema: type[Config], recipe_dir: Path, check: Callable[[Config], list[str]]
) -> Config | None:
    """Compose conf/<name>.yaml with the command line (`sys.argv`), and return it typed and checked.

    Args:
        name: Of the recipe: conf/<name>.yaml.
        schema: The recipe's dataclass.
        recipe_dir: Folder of the recipe; its conf/ and ./conf are searched after this project's.
        check: Returns the problems that only show across sections.

    Returns None where Hydra answered the command line itself (`--cfg job`, `--help`, ...). Raises ConfigError with
    every problem found, and SystemExit for an option that Hydra does not know (after saying so).
    """
    arguments = read_arguments()
    if arguments.multirun and not _answered_without_config(arguments):
        raise ConfigError(
            "-m (--multirun): a sweep starts the processes of its points itself; start it with plain python, or leave "
            "-m out"
        )
    request = read_request(arguments, name, schema, recipe_dir)
    try:
        if _answered_by_hydra(arguments):
            _let_hydra_answer(request, arguments.overrides)
            return None
        cfg = from_container(request.compose(request.overrides), schema)
    except COMPOSITION_ERRORS as error:
        raise ConfigError(diagnose(request, error, check)) from error
    if problems := check(cfg):
        raise ConfigError(problems)
    return cfg


def asks_for_sweep() -> bool:
    """Whether the command line (`sys.argv`) asks for a sweep (-m), and not merely for `--help` and its like."""
    arguments = read_arguments()
    return arguments.multirun and not _answered_without_config(arguments)


def read_arguments() -> Namespace:
    """Return the command line as Hydra reads it. Raises SystemExit for an option that Hydra does not know."""
    return get_args_parser().parse_intermixed_args()


def read_request(arguments: Namespace, name: str, schema: type[Config], recipe_dir: Path) -> Request:
    """Return what is to be composed. Raises ConfigError for options and folders that cannot be used."""
    _refuse_options(arguments)
    register_schemas(name, schema)
    main_config = arguments.config_name or name
    folders = config_folders(
        main_config,
        recipe_dir,
        before=_given_folder("--config-path", arguments.config_path),
        after=_given_folder("--config-dir", arguments.config_dir),
    )
    return Request(main_config, schema, folders, addable(arguments.overrides, schema))


def _refuse_options(arguments: Namespace) -> None:
    """Raise ConfigError for what Hydra can do and a recipe does not let it do, and for a folder that it cannot bear."""
    problems = []
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the folder of this command was removed; cd to one that is there") from error
    if "${" in folder:
        problems.append(f"{folder!r}: Hydra reads ${{ in the name of a folder as a reference; start from another one")
    if arguments.experimental_rerun:
        problems.append("--experimental-rerun: a run continues when its run.dir is given again; leave it out")
    for override in arguments.overrides:
        key = override_parts(override)[0]
        if not key:
            problems.append(f"{override}: has no key; write KEY=VALUE")
        if key.startswith(("hydra.", "hydra/")):
            problems.append(
                f"{override}: Hydra only composes here, so its settings have no effect; leave it out "
                "(--config-dir adds a folder of configs)"
            )
    raise_all(problems)


def _given_folder(option: str, path: str | None) -> list[Path]:
    """Return the folder that an option names, if any. Raises ConfigError where it is none."""
    if path is not None and not Path(path).is_dir():
        raise ConfigError(f"{option}={path}: no such folder")
    return [Path(path).resolve()] if path is not None else []


def addable(overrides: Iterable[str], schema: type[Config]) -> tuple[str, ...]:
    """Let model.config.x=1 add x: in a free-form section Hydra wants a plus that nobody expects."""
    free = tuple(start for key in free_keys(schema) for start in (f"{key}.", f"{key}={{"))
    return tuple(f"++{override}" if override.startswith(free) else override for override in overrides)


def _answered_by_hydra(arguments: Namespace) -> bool:
    return _answered_without_config(arguments) or bool(arguments.cfg) or arguments.resolve


def _answered_without_config(arguments: Namespace) -> bool:
    return any((arguments.help, arguments.hydra_help, arguments.info, arguments.shell_completion))


def _let_hydra_answer(request: Request, typed_overrides: list[str]) -> None:
    """Run Hydra's own main for what only it can answer: it prints, and runs nothing of ours."""
    options = [argument for argument in sys.argv[1:] if argument not in (*typed_overrides, "-m", "--multirun")]
    answer = main(version_base="1.3", config_path=str(request.folders[0]), config_name=request.name)
    with _hydra_that_raises([*request.overrides, *request.search_path, *options]):
        try:
            answer(lambda cfg: None)()
        except SystemExit as end:  # --help
            if end.code:
                raise
        except ValueError as error:
            if isinstance(error, OmegaConfBaseException | ConfigError):
                raise
            raise ConfigError(str(error)) from error  # two options that exclude one another


@contextmanager
def _hydra_that_raises(arguments: list[str]) -> Iterator[None]:
    """Show Hydra this command line, and let it raise instead of printing and exiting."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
