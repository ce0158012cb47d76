"""The command line of a recipe: its options, its overrides, and the config that they compose."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from components.config.compose.composition import Check, Composed, compose, no_check
from components.config.compose.explain import no_option, override_parts
from components.config.compose.frozen import Config
from components.config.compose.help_text import recipe_help
from components.config.compose.overrides import accepted_options
from components.config.compose.short_forms import long_forms
from components.config.compose.sources import Request, config_folders, value_at
from components.config.compose.sweep_keys import is_sweep_key, needs_multirun
from components.config.compose.typed import known_keys, literal
from components.protocol.errors import ConfigError, raise_all
from components.protocol.secrets import secret_problems
from components.terminal import print_text

_QUIET, _QUIET_OVERRIDE = "--quiet", "logging.quiet=true"
"""The option --quiet of recipes, and the override that has the same effect."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Overrides in place of those of a command line."""

    overrides: list[str]
    sections: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Values of whole sections, below those of the overrides."""


Rewrite = Callable[[list[str]], Rewritten]
"""Return the overrides to compose in place of the given ones, which may hold those of REWRITTEN."""
REWRITTEN = ("parallelism=auto", "parallelism=plan:", "run=")
"""Beginnings of the overrides that are replaced before the composition."""


def compose_from_command_line(
    name: str,
    schema: type[Config],
    recipe_dir: Path,
    check: Check = no_check,
    arguments: Sequence[str] | None = None,
    rewrite: Rewrite = Rewritten,
    description: str = "",
) -> Config | None:
    """Compose conf/<name>.yaml with a command line and return the typed, validated config.

    Args:
        name: Name of the recipe's config: conf/<name>.yaml.
        schema: Dataclass of the recipe's config.
        recipe_dir: Folder of the recipe; its conf/ and ./conf are searched before conf/ of this project.
        check: Returns the problems that involve several sections, given the keys that were rejected before.
        arguments: The command line without the program; None for that of this process.
        rewrite: Called with the overrides before they are composed.
        description: Docstring of the recipe, for `--help`.

    Returns None if the command line was answered (`--cfg job`, `--help`). Raises ConfigError with all problems, and
    SystemExit if the parser rejects an option (it prints the reason).
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, problems = read_arguments(schema, given)
    if options.multirun and not options.help:
        problems.append(
            "-m (--multirun): a sweep starts the processes of its points itself; start it with python, or remove -m"
        )
    problems += [needs_multirun(override) for override in options.sweep]
    try:
        rewritten = Rewritten(options.overrides) if options.help else rewrite(options.overrides)
        request = read_request(options, name, schema, recipe_dir, rewritten)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from error
    shows = options.help or options.cfg or options.resolve
    composed = compose(request, no_check if shows else _with_problems(check, problems))
    print_text(*request.replaced, sep="\n", end="\n" * bool(request.replaced), file=sys.stderr)
    raise_all(problems + (composed.problems if composed.malformed or not shows else []))
    if not shows:
        return composed.cfg  # type: ignore[return-value]
    width = shutil.get_terminal_size().columns
    if options.help:
        groups = accepted_options(request, request.groups)
        print_text(recipe_help(description, schema, groups, composed.resolved, width, options.topics))
    else:
        _print_config(composed, options, request.overrides)
    return None


def _with_problems(check: Check, problems: list[str]) -> Check:
    return lambda cfg, rejected: check(cfg, [*rejected, *problems])


def _print_config(composed: Composed, options: Namespace, overrides: Sequence[str]) -> None:
    """Print the config for --cfg. Raises ConfigError for a config with secrets, as for a run of it."""
    raise_all(secret_problems(composed.resolved, overrides))
    raise_all(composed.unresolved if options.resolve else [])
    shown: Any = literal(composed.resolved) if options.resolve else composed.values
    if options.package and (shown := value_at(shown, options.package)) is None:
        raise ConfigError(f"--package={options.package}: no such key")
    print_text(OmegaConf.to_yaml(OmegaConf.create(shown)) if isinstance(shown, dict | list) else f"{shown}\n", end="")


def is_sweep_requested() -> bool:
    """Return whether the command line (`sys.argv`) requests a sweep (-m), and not `--help`."""
    options = _parser().parse_known_intermixed_args()[0]
    return options.multirun and not options.help


def is_answered() -> bool:
    """Return whether the command line (`sys.argv`) is answered by a text: `--help`, or `--cfg` of one run."""
    options = _parser().parse_known_intermixed_args()[0]
    return options.help or (not options.multirun and bool(options.cfg or options.resolve))


def read_arguments(schema: type[Config], given: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return a command line without arguments that a recipe rejects, and the problems of those.

    The overrides of keys of a sweep are in `sweep` instead of `overrides`, and the sections of --help in `topics`.

    Raises SystemExit for an option without its value, and ConfigError if the current folder was removed.
    """
    options, unread = _parser().parse_known_intermixed_args(given)
    flags = {each for each in unread if each.startswith("-")}
    unknown = _with_values([each for each in unread if each in flags and each != _QUIET], given)
    values = {each.partition(" ")[2] for each in unknown}
    overrides = {*options.overrides, *unread} - flags - values  # argparse does not read those after an option
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the current folder was removed; cd to an existing folder") from error
    problems = [no_option(option.replace(" ", "=", 1), known_keys(schema)) for option in unknown]
    options.config_path = _existing_folder("--config-path", options.config_path, problems)
    options.config_dir = _existing_folder("--config-dir", options.config_dir, problems)
    accepted: list[str] = []
    options.sweep, options.topics = [], []
    for override in [each for each in given if each in overrides]:
        key = override_parts(override)[0]
        if options.help and "=" not in override:
            options.topics.append(override)
        elif not key:
            problems.append(f"{override}: key missing; write KEY=VALUE, without spaces")
        elif key.startswith(("hydra.", "hydra/")):
            problems.append(
                f"{override}: Hydra is only used for composition, so its settings have no effect; remove it "
                "(--config-dir adds a folder of configs)"
            )
        else:
            (options.sweep if is_sweep_key(override) else accepted).append(override)
    options.overrides = [*accepted, _QUIET_OVERRIDE] if _QUIET in flags else accepted
    return options, problems


def _parser() -> ArgumentParser:
    """Return the parser of the options that recipes share with Hydra's applications."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    for name, short in (("package", "p"), ("config-path", "cp"), ("config-name", "cn"), ("config-dir", "cd")):
        parser.add_argument(f"--{name}", f"-{short}")
    return parser


def _with_values(options: list[str], given: Sequence[str]) -> list[str]:
    """Return unknown options, each with the value that follows it on the command line, if any: --lr 1e-4."""
    following = dict(zip(given, given[1:], strict=False))
    values = {option: following.get(option, "-") for option in options if "=" not in option}
    return [option if values.get(option, "-").startswith("-") or "=" in values[option] else f"{option} {values[option]}"
            for option in options]  # fmt: skip


def _existing_folder(option: str, path: str | None, problems: list[str]) -> str | None:
    """Return the folder of an option; if it does not exist, return None and add a problem."""
    if path is None or Path(path).is_dir():
        return path
    problems.append(f"{option}={path}: no such folder")
    return None


def read_request(
    options: Namespace, name: str, schema: type[Config], recipe_dir: Path, rewritten: Rewritten
) -> Request:
    """Return the composition request. Raises ConfigError if no config folder holds the main config."""
    main_config = options.config_name or name
    given = [Path(path).resolve() for path in (options.config_path, options.config_dir) if path]
    folders = config_folders(main_config, recipe_dir, given)
    overrides = tuple(long_forms(rewritten.overrides, schema, folders))
    return Request(main_config, schema, folders, overrides, rewritten.sections)
