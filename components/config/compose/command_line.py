"""What a person typed, composed by Hydra, typed and checked; or everything that is wrong with it."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import main
from hydra._internal.utils import get_args_parser  # the one reader of Hydra's options; hydra-core is held below 1.4
from omegaconf.errors import OmegaConfBaseException

from components.config.compose.diagnose import COMPOSITION_ERRORS, Check, diagnose
from components.config.compose.explain import no_option, override_parts
from components.config.compose.frozen import Config, from_container
from components.config.compose.sources import Request, config_folders, register_schemas, replaceable_kinds
from components.config.compose.typed import free_keys, known_keys
from components.config.errors import ConfigError
from components.config.schema.checks import raise_all


def compose_from_command_line(name: str, schema: type[Config], recipe_dir: Path, check: Check) -> Config | None:
    """Compose conf/<name>.yaml with the command line (`sys.argv`), and return it typed and checked.

    Args:
        name: Of the recipe: conf/<name>.yaml.
        schema: The recipe's dataclass.
        recipe_dir: Folder of the recipe; its conf/ and ./conf are searched after this project's.
        check: Returns the problems that only show across sections, given what was refused before.

    Returns None where Hydra answered the command line itself (`--cfg job`, `--help`, ...). Raises ConfigError with
    every problem found, and SystemExit for an option that Hydra cannot read (after saying so).
    """
    arguments, problems = read_arguments(schema)
    if arguments.multirun and not _answered_without_config(arguments):
        problems.append(
            "-m (--multirun): a sweep starts the processes of its points itself; start it with plain python, or leave "
            "-m out"
        )
    try:
        request = read_request(arguments, name, schema, recipe_dir)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from error
    if _answered_by_hydra(arguments):
        raise_all(problems)
    try:
        if _answered_by_hydra(arguments):
            _let_hydra_answer(request, arguments.overrides)
            return None
        cfg = from_container(request.compose(request.overrides), schema)
    except COMPOSITION_ERRORS as error:
        raise ConfigError(problems + diagnose(request, error, check)) from error
    raise_all(problems + check(cfg, problems))
    return cfg


def asks_for_sweep() -> bool:
    """Whether the command line (`sys.argv`) asks for a sweep (-m), and not merely for `--help` and its like."""
    arguments = get_args_parser().parse_known_intermixed_args()[0]
    return arguments.multirun and not _answered_without_config(arguments)


def read_arguments(schema: type[Config]) -> tuple[Namespace, list[str]]:
    """Return the command line as Hydra reads it, without what a recipe does not take, and the problems with that.

    Raises SystemExit for an option that Hydra cannot read, and ConfigError in a folder that Hydra cannot bear.
    """
    arguments, unread = get_args_parser().parse_known_intermixed_args()
    unknown = [each for each in unread if each.startswith("-")]
    overrides = {*arguments.overrides, *unread} - {*unknown}  # argparse leaves what follows an unknown option unread
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the folder of this command was removed; cd to one that is there") from error
    if "${" in folder:
        raise ConfigError(f"{folder!r}: Hydra reads ${{ in the name of a folder as a reference; start from another one")
    problems = [no_option(option, known_keys(schema)) for option in unknown]
    if arguments.experimental_rerun:
        problems.append("--experimental-rerun: a run continues when its run.dir is given again; leave it out")
    arguments.config_path = _existing_folder("--config-path", arguments.config_path, problems)
    arguments.config_dir = _existing_folder("--config-dir", arguments.config_dir, problems)
    taken = []
    for override in [each for each in sys.argv[1:] if each in overrides]:
        key = override_parts(override)[0]
        if not key:
            problems.append(f"{override}: has no key; write KEY=VALUE")
        elif key.startswith(("hydra.", "hydra/")):
            problems.append(
                f"{override}: Hydra only composes here, so its settings have no effect; leave it out "
                "(--config-dir adds a folder of configs)"
            )
        else:
            taken.append(override)
    arguments.overrides = taken
    return arguments, problems


def _existing_folder(option: str, path: str | None, problems: list[str]) -> str | None:
    """Return the folder that an option names; None, and a problem, where it does not exist."""
    if path is None or Path(path).is_dir():
        return path
    problems.append(f"{option}={path}: no such folder")
    return None


def read_request(arguments: Namespace, name: str, schema: type[Config], recipe_dir: Path) -> Request:
    """Return what is to be composed. Raises ConfigError where the main config is in no folder."""
    register_schemas(name, schema)
    main_config = arguments.config_name or name
    before, after = ([Path(path).resolve()] if path else [] for path in (arguments.config_path, arguments.config_dir))
    folders = config_folders(main_config, recipe_dir, before=before, after=after)
    return Request(main_config, schema, folders, addable(arguments.overrides, schema))


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
    with replaceable_kinds(), _hydra_that_raises([*request.overrides, *request.search_path, *options]):
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
