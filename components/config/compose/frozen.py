"""Frozen config: the validated config as YAML and back, and the resolution of its interpolations. Needs no Hydra.

Every rank runs the frozen config unchanged. Interpolations (${...}) are resolved one by one: all failures are reported,
and environment variables that could hold a secret are not copied into the config.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from components.config.compose.explain import explain_resolution
from components.config.compose.typed import literal, typed, yaml_with_texts
from components.config.schema.objective import ObjectiveKind
from components.config.schema.recipes import Config, RecipeConfig
from components.protocol.errors import ConfigError, raise_all
from components.protocol.run_files import (
    CHECKPOINT_STATE,
    CHECKPOINTS,
    CONFIG,
    LOGS,
    attempt_logs,
    checkpoint_folders,
    numbers_in,
)
from components.protocol.safe_parsing import check_expansion, load_yaml, parse_json, read_regular
from components.protocol.secrets import variable_problem

Section = TypeVar("Section")
_CHECKSUM = "# sha256 of the lines below: "
"""Prefix of the first line of a frozen config, a YAML comment."""
_ENV = "oc.env"
_UNSET: Any = object()
_UNLESS_EPOCHS = "unless_epochs"
"""Resolver of training.max_steps: ${unless_epochs:40} is 40, or null if training.epochs is given."""
_WITH_KTO = "with_kto"
"""Resolver of data.label_column: ${with_kto:label} is label with objective=kto, else null."""


def read_frozen(path: Path, schema: type[Config]) -> Config:
    """Return the config that `frozen_text` wrote to `path`, typed and validated again.

    Raises ConfigError if the file cannot be read, is damaged or does not hold a config of `schema`.
    """
    try:
        return from_yaml(read_intact(path), schema)
    except yaml.YAMLError as error:
        raise _unreadable(path, error) from error


def read_section(path: Path, name: str, schema: type[Section]) -> Section:
    """Return one section of the frozen config of any recipe.

    Raises ConfigError if the file cannot be read, or lacks the section, or the section is not a valid `schema`.
    """
    section = read_optional_section(path, name, schema)
    if section is None:
        raise ConfigError(f"{path}: the config of this run has no section {name}")
    return section


def read_optional_section(path: Path, name: str, schema: type[Section]) -> Section | None:
    """Return one section like `read_section`; None if the recipe has none, such as an own one without adapters."""
    try:
        loaded = load_yaml(read_intact(path))
    except yaml.YAMLError as error:
        raise _unreadable(path, error) from error
    if not isinstance(loaded, dict) or name not in loaded:
        return None
    try:
        container, rejected = resolve({name: loaded[name]})
        raise_all(list(rejected.values()))
        return typed(container[name], schema)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error


def read_intact(path: Path) -> str:
    """Return the text of a frozen config. Raises ConfigError, which names an intact copy, if it is damaged."""
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    if damage := _damage_of(text):
        raise _unreadable(path, damage)
    return text


def _damage_of(text: str) -> str:
    """Return the damage of the text of a frozen config, found by its checksum; empty if it is intact."""
    first, _, below = text.partition("\n")
    is_intact = first == f"{_CHECKSUM}{_digest(below)}"
    return "" if is_intact else "damaged, or edited by hand (change keys on the command line instead)"


def intact_copy(run_dir: Path) -> tuple[Path, str] | None:
    """Return path and text of the newest intact copy of a run's config, from the logs of an attempt or a checkpoint."""
    logs = [attempt_logs(run_dir, number) for number in sorted(numbers_in(run_dir / LOGS, "attempt_"), reverse=True)]
    attempts = [log / CONFIG for log in logs if not log.is_symlink()]
    states = []
    with suppress(OSError):  # a folder that cannot be listed
        states = [folder / CHECKPOINT_STATE for folder in reversed(checkpoint_folders(run_dir / CHECKPOINTS))]
    for path in (*attempts, *states):
        try:
            content = read_regular(path).decode()
            text = content if path.name == CONFIG else parse_json(content)["config"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if isinstance(text, str) and not _damage_of(text):
            return path, text
    return None


def from_yaml(text: str, schema: type[Config]) -> Config:
    """Return the config that `to_yaml` wrote. Raises ConfigError with all problems, and yaml.YAMLError."""
    check_expansion(text)
    loaded = yaml_with_texts(text, schema)
    if not isinstance(loaded, dict):
        raise ConfigError("not the config of a run: it holds no keys")
    container, rejected = resolve(loaded)
    try:
        config = typed(container, schema, [key.partition("[")[0] for key in rejected])
    except ConfigError as error:
        raise ConfigError([*rejected.values(), *error.problems]) from error
    raise_all(list(rejected.values()))
    return config


def to_yaml(cfg: RecipeConfig) -> str:
    """Return the whole config as YAML, including values that equal their defaults."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(asdict(cfg))))


def frozen_text(cfg: RecipeConfig) -> str:
    """Return the text of a run's config.yaml: a checksum, which detects damage, and `to_yaml`."""
    text = to_yaml(cfg)
    return f"{_CHECKSUM}{_digest(text)}\n{text}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _unreadable(path: Path, why: object) -> ConfigError:
    copy = intact_copy(path.parent)
    hint = f"an intact copy is in {copy[0]}" if copy else "no copy in logs/attempt_N or checkpoints/step_N is intact"
    return ConfigError(f"{path}: cannot be read as the config of a run: {why}; {hint}")


def resolve(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return nested dicts with their interpolations resolved, and the problems by key.

    A key whose interpolation fails, or would copy a value that could be a secret, is removed.
    """
    container, problems, read = copy.deepcopy(values), dict[str, str](), dict[str, dict[str, str]]()
    holders = list(_interpolations(container, (), ""))
    for key, path, plain in holders:  # alone, since one that does not parse would fail the whole config below
        try:
            OmegaConf.create([plain[path[-1]]])
        except OmegaConfBaseException as error:  # ${ without }
            problems[key], plain[path[-1]] = f"{key}: {explain_resolution(error).partition(': ')[2]}", ""
    cfg = OmegaConf.create(_referable(container), flags={"allow_objects": True}) if holders else OmegaConf.create()
    with _conf_resolvers(), _recorded_environment() as variables_read:
        for key, (*parents, name), plain in [holder for holder in holders if holder[0] not in problems]:
            variables_read.clear()  # so that each key answers for the variables that it reads itself
            try:
                value = functools.reduce(getitem, parents, cfg)[name]
                plain[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException as error:
                problems[key] = explain_resolution(error)
            read[key] = dict(variables_read)
    allowed = _allowed(container)
    for key, variables in read.items():
        for variable, value in variables.items():
            if problem := variable_problem(key, variable, value, allowed):
                problems[key] = problem
    for key, path, plain in holders:
        if key in problems and isinstance(plain, dict):
            del plain[path[-1]]
        elif key in problems:
            plain[path[-1]] = ""  # an entry of a list stays, so that the others keep their index
    return container, problems


@contextmanager
def _conf_resolvers() -> Iterator[None]:
    """Register the resolvers of conf/ within the block: `unless_epochs` and `with_kto`."""

    def unless_epochs(steps: int, *, _parent_: DictConfig) -> int | None:
        return steps if _parent_.get("epochs") is None else None

    def with_kto(column: str, *, _root_: DictConfig) -> str | None:
        return column if OmegaConf.select(_root_, "objective.kind") == ObjectiveKind.kto else None

    OmegaConf.register_new_resolver(_UNLESS_EPOCHS, unless_epochs, replace=True)
    OmegaConf.register_new_resolver(_WITH_KTO, with_kto, replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver(_UNLESS_EPOCHS)
        OmegaConf.clear_resolver(_WITH_KTO)


def _referable(values: Any) -> Any:
    """Return nested values without null keys, which omegaconf rejects; typing reports them."""
    if isinstance(values, dict):
        return {key: _referable(value) for key, value in values.items() if key is not None}
    return [_referable(each) for each in values] if isinstance(values, list) else values


def _interpolations(plain: Any, path: tuple[Any, ...], key: str) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield each interpolation below a dict or list: its key, its path, and the dict or list that holds it."""
    is_list = isinstance(plain, list)
    for name, value in enumerate(plain) if is_list else plain.items():
        own = f"{key}[{name}]" if is_list else f"{key}.{name}".lstrip(".")
        if isinstance(value, str) and "${" in value:
            yield own, (*path, name), plain
        elif isinstance(value, dict | list):
            yield from _interpolations(value, (*path, name), own)


def _allowed(container: Any) -> list[str]:
    run = container.get("run")
    names = run.get("allow_env") if isinstance(run, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


@contextmanager
def _recorded_environment() -> Iterator[dict[str, str]]:
    """Record in the yielded dict the environment variables that interpolations read within the block."""
    seen: dict[str, str] = {}

    def recording(name: str, default: Any = _UNSET) -> Any:
        if name in os.environ:
            seen[name] = os.environ[name]
        return oc.env(name) if default is _UNSET else oc.env(name, default)

    OmegaConf.register_new_resolver(_ENV, recording, replace=True)
    try:
        yield seen
    finally:
        OmegaConf.register_new_resolver(_ENV, oc.env, replace=True)
