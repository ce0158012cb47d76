"""Every check of a run that needs milliseconds and writes nothing, whichever backend runs it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path

from components.config.errors import ConfigError
from components.config.model_files import check_weights, locate
from components.config.schema.model import WeightInit
from components.config.schema.parallelism import AXES
from components.config.schema.recipes import RecipeConfig, section
from components.config.schema.training import EvaluationConfig
from components.config.secrets import secret_problems
from components.config.shape import ModelShape, read_shape
from components.config.validate import validate
from components.data.preflight import check_files

MESH_KEYS = frozenset(
    ["cluster.kind", "cluster.nodes", "cluster.procs_per_node", "cluster.device", "cluster.oversubscribe"]
    + [f"parallelism.{name}" for name in (*AXES, "strategy")]
)
"""Keys that decide the number of processes and the degrees of the mesh."""
MODEL_KEYS = frozenset(["model.config", *(f"model.{each.name}" for each in fields(ModelShape)), "model.path"])
"""Keys that decide the shape of the model."""
_MANIFEST = "manifest.json"
"""What makes a folder a checkpoint."""


def problems_before_start(cfg: RecipeConfig, world_size: int, refused: Collection[str] = ()) -> list[str]:
    """Return every problem of `cfg` on `world_size` processes, one sentence each, files included.

    Secrets are reported alone: the sentences of other problems repeat values.

    Args:
        cfg: The config.
        world_size: Number of ranks.
        refused: Keys and sections rejected before, whose values in `cfg` are not what the user wanted.
    """
    if secrets := secret_problems(cfg, sys.argv[1:]):
        return secrets
    shape, problems = ModelShape(), []
    try:
        if not decides(refused, MODEL_KEYS):
            shape = read_shape(cfg.model)
        problems = _model_problems(cfg)
    except ConfigError as error:
        problems = error.problems
    problems = validate(cfg, None if decides(refused, MESH_KEYS) else world_size, shape) + problems
    problems += _problems_of(lambda: check_files(cfg.data)) + _plan_problems(cfg)
    return list(dict.fromkeys(problems + _checkpoint_problems(cfg)))


def decides(refused: Collection[str], keys: Collection[str]) -> bool:
    """Whether one of the refused keys or sections is among `keys`, or holds one of them."""
    return any(
        key == each or each.startswith(f"{key}.") or key.startswith(f"{each}.") for key in refused for each in keys
    )


def _plan_problems(cfg: RecipeConfig) -> list[str]:
    """Check that the module of a tp plan exists, on every mesh, before a sweep starts its first point."""
    plan = cfg.parallelism.tp_plan
    package = (plan or "").partition(":")[0].partition(".")[0]
    if plan is None or importlib.util.find_spec(package) is not None:
        return []
    return [f"parallelism.tp_plan={plan}: no module {package!r} is found; install it, or put it beside the recipe"]


def _model_problems(cfg: RecipeConfig) -> list[str]:
    if cfg.model.tokenizer not in (None, "bytes"):
        locate(cfg.model.tokenizer, "model.tokenizer")
    if cfg.model.path is not None and cfg.model.init == WeightInit.pretrained:
        return check_weights(cfg.model.path)
    return []


def _checkpoint_problems(cfg: RecipeConfig) -> list[str]:
    """Check that checkpoints exist before a job waits in a queue for them; ranks check their contents."""
    problems = []
    resume = cfg.run.resume
    if resume not in ("auto", "never") and not Path(os.path.expanduser(resume), _MANIFEST).is_file():
        problems.append(f"run.resume={resume}: no such checkpoint; give auto, never or RUN/checkpoints/step_N")
    evaluation = section(cfg, EvaluationConfig)
    checkpoint = evaluation.checkpoint if evaluation is not None else None
    if checkpoint is not None and not Path(os.path.expanduser(checkpoint), _MANIFEST).is_file():
        problems.append(f"evaluation.checkpoint={checkpoint}: no such checkpoint; give RUN/checkpoints/step_N")
    return problems


def _problems_of(check: Callable[[], list[str]]) -> list[str]:
    """Return the problems that a check returns or raises."""
    try:
        return check()
    except ConfigError as error:
        return error.problems
