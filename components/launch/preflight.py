"""Everything that can be told about a run before anything of it exists, in milliseconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from components.config.errors import ConfigError
from components.config.model_files import check_weights, locate
from components.config.schema.model import WeightInit
from components.config.schema.recipes import RecipeConfig
from components.config.secrets import secret_problems
from components.config.shape import ModelShape, read_shape
from components.config.validate import validate
from components.launch.parts import check_files


def problems_before_start(cfg: RecipeConfig, world_size: int) -> list[str]:
    """Return every problem of `cfg` on `world_size` processes, one sentence each, files included.

    Secrets are told alone: the sentences of other problems repeat values.
    """
    if secrets := secret_problems(cfg, sys.argv[1:]):
        return secrets
    shape, problems = ModelShape(), []
    try:
        shape = read_shape(cfg.model)
        problems = _model_problems(cfg)
    except ConfigError as error:
        problems = error.problems
    problems = validate(cfg, world_size, shape) + problems
    problems += _told(lambda: check_files(cfg.data))
    if cfg.run.resume not in ("auto", "never") and not Path(cfg.run.resume).is_dir():
        problems.append(
            f"run.resume={cfg.run.resume}: no such checkpoint; give auto, never or a folder checkpoints/step_N of a run"
        )
    return list(dict.fromkeys(problems))


def _model_problems(cfg: RecipeConfig) -> list[str]:
    if cfg.model.tokenizer not in (None, "bytes"):
        locate(cfg.model.tokenizer, "model.tokenizer")
    if cfg.model.path is not None and cfg.model.init == WeightInit.pretrained:
        return check_weights(cfg.model.path)
    return []


def _told(check: Callable[[], list[str]]) -> list[str]:
    """The problems that a check returns or raises."""
    try:
        return check()
    except ConfigError as error:
        return error.problems
