"""Resolution of the interpolations (${...}) of a composed config, one by one.

All failures are reported, and environment variables that could hold a secret are not copied into the config.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from components.config.compose.explain import explain_resolution
from components.config.compose.sources import conf_resolvers
from components.config.secrets import variable_problem

_ENV = "oc.env"
_UNSET: Any = object()


def resolve(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Return `cfg` as nested dicts with its interpolations resolved, and the problems by key.

    A key whose interpolation fails, or would copy a value that could be a secret, is removed.
    """
    container: Any = OmegaConf.to_container(cfg, resolve=False)
    problems: dict[str, str] = {}
    read: dict[str, dict[str, str]] = {}
    with conf_resolvers(), _recorded_environment() as variables_read:
        for key, parent, name, plain in list(_interpolations(cfg, container, "")):
            variables_read.clear()
            try:
                value = parent[name]
                nested = isinstance(value, DictConfig | ListConfig)
                plain[name] = OmegaConf.to_container(value, resolve=True) if nested else value
            except OmegaConfBaseException as error:
                problems[key] = explain_resolution(error)
            read[key] = dict(variables_read)
    allowed = _allowed(container)
    for key, variables in read.items():
        for variable, value in variables.items():
            if problem := variable_problem(key, variable, value, allowed):
                problems[key] = problem
    for key, _, name, plain in list(_interpolations(cfg, container, "")):
        if key in problems and isinstance(plain, dict):
            del plain[name]
        elif key in problems:
            plain[name] = ""
    return container, problems


def _interpolations(node: Any, plain: Any, prefix: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield each interpolation below a node: its key, the node and the plain container that hold it, and its name
    there."""
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    is_list = isinstance(node, ListConfig)
    for name in range(len(node)) if is_list else list(node):
        key = f"{prefix}[{name}]" if is_list else f"{prefix}.{name}".lstrip(".")
        child = node._get_node(name)
        if child._is_interpolation():
            yield key, node, name, plain
        elif isinstance(child, DictConfig | ListConfig):
            yield from _interpolations(child, plain[name], key)


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
