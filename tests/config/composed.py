"""Compose overrides as the command line of a recipe does, and return the config or its problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.config.compose.composition import Check, compose, no_check
from components.config.compose.help_text import RECIPES
from components.config.compose.short_forms import long_forms
from components.config.compose.sources import CONF, Request
from components.protocol.errors import raise_all


def request(name: str, *overrides: str, schema: type | None = None, folders: tuple[Path, ...] = (CONF,)) -> Request:
    """Return the request of a recipe's config; another schema than the recipe's is that of a user."""
    schema = schema or RECIPES[name]
    return Request(name, schema, folders, tuple(long_forms(list(overrides), schema, folders)))


def config_of(name: str, *overrides: str, **others: Any) -> Any:
    """Return the typed config. Raises ConfigError with all problems."""
    composed = compose(request(name, *overrides, **others))
    raise_all(composed.problems)
    return composed.cfg


def problems_of(name: str, *overrides: str, check: Check = no_check, **others: Any) -> list[str]:
    """Return the problems of a command line; empty for a valid one."""
    return compose(request(name, *overrides, **others), check).problems
