"""Hydra's composition, merged strictly into the schema: the only place that turns YAML into dataclasses.

Hydra runs once, in the process that a person started. What it composes is checked against the dataclasses (Hydra
itself lets `+typo=1` pass), becomes plain objects, and is frozen to RUN_DIR/config.yaml, which every rank reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hydra import compose, initialize_config_dir, main
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.config.compose.explain import explain_override, explain_value
from components.config.errors import ConfigError
from components.config.schema.data import DATA_KINDS
from components.config.schema.recipes import RecipeConfig
from components.config.compose.typed import known_keys, typed

Config = TypeVar("Config", bound=RecipeConfig)

CONF = Path(__file__).resolve().parents[3] / "conf"
"""This project's conf/, absolute, so that a copied recipe finds it."""


def compose_from_command_line(name: str, schema: type[Config], recipe_dir: Path) -> Config | None:
    """Compose conf/<name>.yaml with the command line (`sys.argv`), and return it typed.

    ./conf and the recipe's own conf/ are searched too. Returns None where Hydra answered the command line itself
    (`--cfg job`, `--help`, ...). Raises ConfigError with every problem found.
    """
    register_schemas(name, schema)
    composed: list[DictConfig] = []

    def keep(cfg: DictConfig) -> None:
        composed.append(cfg)

    with _hydra_command_line(_extra_search_path(recipe_dir)) as overrides:
        try:
            main(version_base="1.3", config_path=str(CONF), config_name=name)(keep)()
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_composition_problems(name, schema, overrides) or [explain_value(error)]) from error
    return from_container(composed[0], schema) if composed else None


def from_container(cfg: DictConfig, schema: type[Config]) -> Config:
    """Resolve interpolations and return the typed config. Raises ConfigError with every problem."""
    try:
        container = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain_value(error)) from error
    return typed(container, schema)


def read_frozen(path: Path, schema: type[Config]) -> Config:
    """Return the config that `to_yaml` wrote to `path`, typed and checked again."""
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: not a config of a run")
    return from_container(loaded, schema)


def to_yaml(cfg: RecipeConfig) -> str:
    """Return the whole config as YAML, every value stated."""
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


def register_schemas(name: str, schema: type[RecipeConfig]) -> None:
    """Put the dataclasses where the defaults lists find them: schema/<name> and schema/data/<kind>."""
    store = ConfigStore.instance()
    store.store(group="schema", name=name, node=schema, package="_global_")
    for kind, data_schema in DATA_KINDS.items():
        store.store(group="schema/data", name=str(kind), node=data_schema)


def option_groups(folders: list[Path]) -> dict[str, list[str]]:
    """Return the options of every config group under `folders`, by group."""
    groups: dict[str, list[str]] = {}
    for folder in folders:
        for file in sorted(folder.glob("*/**/*.yaml")):
            groups.setdefault(str(file.parent.relative_to(folder)), []).append(file.stem)
    return groups


def _extra_search_path(recipe_dir: Path) -> list[Path]:
    candidates = [Path.cwd() / "conf", recipe_dir / "conf"]
    return [path for path in dict.fromkeys(candidates) if path.is_dir() and path.resolve() != CONF]


@contextmanager
def _hydra_command_line(search_path: list[Path]) -> Iterator[list[str]]:
    """Let Hydra raise instead of printing and exiting, and add our search path. Yields the person's overrides."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    overrides = [argument for argument in argv[1:] if not argument.startswith("-") and "=" in argument]
    added = []
    if search_path and not any(override.lstrip("+").startswith("hydra.searchpath=") for override in overrides):
        added = ["hydra.searchpath=[" + ",".join(f"'file://{path}'" for path in search_path) + "]"]
    sys.argv = argv + added
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield overrides + added
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _composition_problems(name: str, schema: type[RecipeConfig], overrides: list[str]) -> list[str]:
    """Hydra stops at its first error: try each override alone, so that a person hears of all of them at once."""
    problems = []
    keys = known_keys(schema)
    groups = option_groups([CONF])
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        search_path = [override for override in overrides if override.startswith("hydra.searchpath=")]
        for override in overrides:
            try:
                compose(name, overrides=[*search_path, override] if override not in search_path else search_path)
            except (HydraException, OmegaConfBaseException) as error:
                problems.append(explain_override(override, error, keys, groups))
    return problems
