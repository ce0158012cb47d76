"""Everything that can be told about a run before anything of it exists, in milliseconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from components.config.errors import ConfigError
from components.config.model_files import check_weights, locate
from components.config.schema.model import WeightInit
from components.config.schema.recipes import EvaluateConfig, RecipeConfig
from components.config.secrets import secret_problems
from components.config.shape import ModelShape, read_shape
from components.config.validate import validate
from components.launch.parts import check_files

_MANIFEST = "manifest.json"
"""What makes a folder a checkpoint."""


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
    return list(dict.fromkeys(problems + _checkpoint_problems(cfg)))


def _model_problems(cfg: RecipeConfig) -> list[str]:
    if cfg.model.tokenizer not in (None, "bytes"):
        locate(cfg.model.tokenizer, "model.tokenizer")
    if cfg.model.path is not None and cfg.model.init == WeightInit.pretrained:
        return check_weights(cfg.model.path)
    return []


def _checkpoint_problems(cfg: RecipeConfig) -> list[str]:
    """A job waits in a queue first: that a checkpoint is not there is told before. What is in it, its ranks read."""
    problems = []
    resume = cfg.run.resume
    if resume not in ("auto", "never") and not Path(os.path.expanduser(resume), _MANIFEST).is_file():
        problems.append(f"run.resume={resume}: no such checkpoint; give auto, never or RUN/checkpoints/step_N")
    checkpoint = cfg.evaluation.checkpoint if isinstance(cfg, EvaluateConfig) else None
    if checkpoint is not None and not Path(os.path.expanduser(checkpoint), _MANIFEST).is_file():
        problems.append(f"evaluation.checkpoint={checkpoint}: no such checkpoint; give RUN/checkpoints/step_N")
    return problems


def _told(check: Callable[[], list[str]]) -> list[str]:
    """The problems that a check returns or raises."""
    try:
        return check()
    except ConfigError as error:
        return error.problems
