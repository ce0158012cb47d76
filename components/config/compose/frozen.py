"""The config as YAML and back: what was validated is what runs. Needs omegaconf, not Hydra."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.config.compose.explain import explain_resolution
from components.config.compose.texts import literal
from components.config.compose.typed import typed
from components.config.errors import ConfigError
from components.config.safe_yaml import check_expansion, load_yaml
from components.config.schema.recipes import RecipeConfig

Config = TypeVar("Config", bound=RecipeConfig)
Section = TypeVar("Section")


def from_container(cfg: DictConfig, schema: type[Config]) -> Config:
    """Resolve interpolations and return the typed config. Raises ConfigError with every problem."""
    try:
        container = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain_resolution(error)) from error
    # The option of conf/data/ named its class; a file that was frozen is plain and only knows data.kind.
    data_schema = OmegaConf.get_type(cfg, "data") if "data" in cfg else None
    return typed(container, schema, data_schema)


def read_frozen(path: Path, schema: type[Config]) -> Config:
    """Return the config that `to_yaml` wrote to `path`, typed and checked again.

    Raises ConfigError where the file cannot be read or is no config of `schema`.
    """
    try:
        return from_yaml(path.read_text(), schema)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as the config of a run: {error}") from error


def read_section(path: Path, name: str, schema: type[Section]) -> Section:
    """Return one section of what `to_yaml` wrote to `path`, whichever recipe's config it is.

    Raises ConfigError where the file cannot be read, has no such section, or it is none of `schema`.
    """
    try:
        loaded = load_yaml(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as the config of a run: {error}") from error
    if not isinstance(loaded, dict) or name not in loaded:
        raise ConfigError(f"{path}: the config of this run has no section {name}")
    try:
        return typed(loaded[name], schema)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error


def from_yaml(text: str, schema: type[Config]) -> Config:
    """Return the config that `to_yaml` wrote. Raises ConfigError and yaml.YAMLError."""
    check_expansion(text)
    try:
        loaded = OmegaConf.create(text)
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError("not the config of a run: no keys")
    return from_container(loaded, schema)


def to_yaml(cfg: RecipeConfig) -> str:
    """Return the whole config as YAML, every value stated."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(asdict(cfg))))
