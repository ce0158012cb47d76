"""Composition and validation of the command line, with all problems reported at once."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import main
from hydra._internal.utils import (
    get_args_parser,
)  # Hydra has no public parser of its options; hydra-core is pinned below 1.4
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from components.config.compose.diagnose import COMPOSITION_ERRORS, Check, diagnose
from components.config.compose.explain import no_option, override_parts
from components.config.compose.frozen import Config, from_container, resolve
from components.config.compose.help_text import recipe_help
from components.config.compose.short_forms import long_forms
from components.config.compose.sources import (
    CONF,
    Request,
    conf_resolvers,
    config_folders,
    option_files,
    register_schemas,
    replaceable_kinds,
)
from components.config.compose.sweep_keys import is_sweep_key, needs_multirun
from components.config.compose.typed import free_keys, known_keys, override_with_texts
from components.config.schema.checks import raise_all
from components.protocol.errors import ConfigError
from components.protocol.secrets import secret_problems
from components.terminal import print_text

QUIET, QUIET_OVERRIDE = "--quiet", "logging.quiet=true"
"""The option --quiet of recipes, and the override that has the same effect."""


def compose_from_command_line(
    name: str,
    schema: type[Config],
    recipe_dir: Path,
    check: Check,
    more_folders: Iterable[Path] = (),
    description: str = "",
) -> Config | None:
    """Compose conf/<name>.yaml with the command line (`sys.argv`) and return the typed, validated config.

    Args:
        name: Name of the recipe's config: conf/<name>.yaml.
        schema: Dataclass of the recipe's config.
        recipe_dir: Folder of the recipe; its conf/ and ./conf are searched before conf/ of this project.
        check: Returns the problems that involve several sections, given the keys that were rejected before.
        more_folders: Config folders that are searched first.
        description: Docstring of the recipe, for `--help`.

    Returns None if the command line was answered (`--cfg job`, `--help`, ...). Raises ConfigError with all
    problems, and SystemExit if Hydra's argument parser rejects an option (it prints the reason).
    """
    arguments, problems = read_arguments(schema)
    if arguments.multirun and not _answered_without_config(arguments):
        problems.append(
            "-m (--multirun): a sweep starts the processes of its points itself; start it with python, or remove -m"
        )
    problems += [needs_multirun(override) for override in arguments.sweep]
    try:
        request = read_request(arguments, name, schema, recipe_dir, more_folders)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from error
    if _answered_by_hydra(arguments):
        raise_all(problems)
    try:
        if arguments.help:
            print_text(recipe_help(description, request, shutil.get_terminal_size().columns))
            return None
        if _answered_by_hydra(arguments):
            _let_hydra_answer(request, arguments)
            return None
        cfg = from_container(request.compose(request.overrides), schema)
    except COMPOSITION_ERRORS as error:
        raise ConfigError(problems + diagnose(request, error, check)) from error
    finally:
        print_text(*request.replaced, sep="\n", end="\n" * bool(request.replaced), file=sys.stderr)
    raise_all(problems + check(cfg, problems))
    return cfg


def is_sweep_requested() -> bool:
    """Return whether the command line (`sys.argv`) requests a sweep (-m), and not `--help` or the like."""
    arguments = _parser().parse_known_intermixed_args()[0]
    return arguments.multirun and not _answered_without_config(arguments)


def read_arguments(schema: type[Config]) -> tuple[Namespace, list[str]]:
    """Return the command line as parsed by Hydra, without arguments that a recipe rejects, and the problems of those.

    The overrides of keys of a sweep are in `sweep` instead of `overrides`.

    Raises SystemExit for an option that Hydra cannot parse, and ConfigError if the current folder was removed or its
    name breaks Hydra.
    """
    arguments, unread = _parser().parse_known_intermixed_args()
    options = {each for each in unread if each.startswith("-")}
    unknown = _with_values([each for each in unread if each in options and each != QUIET])
    values = {each.partition(" ")[2] for each in unknown}
    overrides = {*arguments.overrides, *unread} - options - values  # argparse does not read those after an option
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the current folder was removed; cd to an existing folder") from error
    if "${" in folder:
        raise ConfigError(
            f"{folder!r}: Hydra resolves ${{ in the name of the current folder; start from another folder"
        )
    problems = [no_option(option.replace(" ", "=", 1), known_keys(schema)) for option in unknown]
    if arguments.experimental_rerun:
        problems.append("--experimental-rerun: to resume a run, set its run.dir again; remove this option")
    arguments.config_path = _existing_folder("--config-path", arguments.config_path, problems)
    arguments.config_dir = _existing_folder("--config-dir", arguments.config_dir, problems)
    accepted: list[str] = []
    arguments.sweep = []
    for override in [each for each in sys.argv[1:] if each in overrides]:
        key = override_parts(override)[0]
        if not key:
            problems.append(f"{override}: key missing; write KEY=VALUE, without spaces")
        elif key.startswith(("hydra.", "hydra/")):
            problems.append(
                f"{override}: Hydra is only used for composition, so its settings have no effect; remove it "
                "(--config-dir adds a folder of configs)"
            )
        else:
            (arguments.sweep if is_sweep_key(override) else accepted).append(override)
    arguments.overrides = [*accepted, QUIET_OVERRIDE] if QUIET in options else accepted
    return arguments, problems


def _parser() -> ArgumentParser:
    """Return Hydra's parser without abbreviations: --config of other tools is none of its options."""
    parser: ArgumentParser = get_args_parser()
    parser.allow_abbrev = False
    return parser


def _with_values(options: list[str]) -> list[str]:
    """Return unknown options, each with the value that follows it on the command line, if any: --lr 1e-4."""
    following = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    values = {each: following.get(each, "-") for each in options if "=" not in each}
    return [each if values.get(each, "-").startswith("-") or "=" in values[each] else f"{each} {values[each]}"
            for each in options]  # fmt: skip


def _existing_folder(option: str, path: str | None, problems: list[str]) -> str | None:
    """Return the folder of an option; if it does not exist, return None and add a problem."""
    if path is None or Path(path).is_dir():
        return path
    problems.append(f"{option}={path}: no such folder")
    return None


def read_request(
    arguments: Namespace, name: str, schema: type[Config], recipe_dir: Path, more_folders: Iterable[Path] = ()
) -> Request:
    """Return the composition request. Raises ConfigError if no config folder holds the main config."""
    register_schemas(name, schema)
    main_config = arguments.config_name or name
    given = [Path(path).resolve() for path in (arguments.config_path, arguments.config_dir) if path]
    folders = config_folders(main_config, recipe_dir, [*more_folders, *given])
    return Request(main_config, schema, folders, addable(arguments.overrides, schema, folders))


def addable(overrides: Iterable[str], schema: type[Config], folders: Sequence[Path] = (CONF,)) -> tuple[str, ...]:
    """Return overrides as Hydra requires them; `folders` are the config folders.

    Short forms (data=mine.jsonl) are replaced by options with their path. Overrides of free-form sections
    (model.config.x=1), and dicts that may hold one, get the prefix ++, which adds a key. Values of texts
    that Hydra would read as numbers or booleans (run.dir=2024_06_15) are quoted.
    """
    free = free_keys(schema)
    sections = {key.rpartition(".")[0] for key in free}
    starts = (*(f"{key}." for key in free), *(f"{key}={{" for key in (*free, *sections)))
    expanded = long_forms(list(overrides), schema, folders)
    quoted = [override_with_texts(override, schema) for override in expanded]
    return tuple(f"++{override}" if override.startswith(starts) else override for override in quoted)


def _answered_by_hydra(arguments: Namespace) -> bool:
    return _answered_without_config(arguments) or bool(arguments.cfg) or arguments.resolve


def _answered_without_config(arguments: Namespace) -> bool:
    return any((arguments.help, arguments.hydra_help, arguments.info, arguments.shell_completion))


def _let_hydra_answer(request: Request, command: Namespace) -> None:
    """Let Hydra's main handle `--cfg`, `--info` and the like: it prints and does not run the recipe.

    Raises ConfigError for a config with secrets, as for a run of it.
    """
    if command.cfg or command.info or command.resolve:
        container, unresolved = resolve(request.compose(request.overrides))
        raise_all(secret_problems(container, request.overrides))
        raise_all(list(unresolved.values()) if command.resolve else [])
    typed = (*command.overrides, "-m", "--multirun", QUIET)
    options = [argument for argument in sys.argv[1:] if argument not in typed]
    answer = main(version_base="1.3", config_path=str(request.main_folder), config_name=request.name)
    arguments = [*request.overrides, *request.search_path, *options]
    with replaceable_kinds(), option_files(request), conf_resolvers(), _hydra_that_raises(arguments):
        try:
            answer(lambda cfg: None)()
        except SystemExit as end:  # --help
            if end.code:
                raise
        except ValueError as error:
            if isinstance(error, OmegaConfBaseException | ConfigError):
                raise
            raise ConfigError(str(error)) from error  # mutually exclusive options
        except YAMLError as error:
            raise HydraException(str(error)) from error


@contextmanager
def _hydra_that_raises(arguments: list[str]) -> Iterator[None]:
    """Set `sys.argv` to these arguments, and make Hydra raise instead of printing an error and exiting."""
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
