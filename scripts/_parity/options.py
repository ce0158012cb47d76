"""Command line of scripts/parity.py: its options, the recipe's config, and the meshes to compare."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from components.config.compose.command_line import compose_from_command_line
from components.config.compose.explain import override_parts
from components.config.compose.sources import CONF, option_groups
from components.config.mesh_rules import RECOMPUTE, layout_of
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.parallelism import AXES, ParallelismConfig, Strategy
from components.config.schema.recipes import FinetuneConfig
from components.config.shape import read_shape
from components.launch.run_checks import problems_before_start
from components.planning.formulas.ranking import MeshPlan, plan_all, plan_mesh
from components.protocol.errors import ConfigError, raise_all
from components.terminal import HelpText

RECIPES = CONF.parent / "recipes"
MESH_KEYS = {f"parallelism.{axis}" for axis in AXES} | {"parallelism", "parallelism.strategy"}
"""Config keys that --meshes sets."""
DTYPES = {
    "float32": {"model.dtype": "float32", "model.compute_dtype": "float32"},
    "float64": {"model.dtype": "float64", "model.compute_dtype": "float64"},
    "bfloat16": {"model.dtype": "float32", "model.compute_dtype": "bfloat16"},
}
"""--dtype -> the overrides it sets. bfloat16 keeps parameters, gradients and optimizer in float32, like the recipes."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"scripts/parity.py: {message}; see --help")


def read_options(arguments: list[str], description: str | None) -> tuple[Namespace, list[str]]:
    """Split the command line into the options of the script and the overrides of the recipe. Raises ConfigError."""
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=HelpText,
    )
    parser.add_argument("--processes", type=int, help="ranks of each mesh (default: the visible GPUs; 4 on a CPU)")
    parser.add_argument("--meshes", default="all", help="all, or names separated by commas (default: all)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to train (default: 5)")
    parser.add_argument(
        "--recompute",
        help=f"all, or some of {','.join(RECOMPUTE)}: policies of activation checkpointing to combine with each mesh "
        "(default: parallelism.activation_checkpointing)",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="compute dtype (default: float32)")
    parser.add_argument("--no-gradients", action="store_true", help="do not compare the gradients of the first step")
    parser.add_argument("--out", type=Path, help="folder for the report (default: a new one in outputs/parity)")
    options, overrides = parser.parse_known_args(arguments)
    problems = [
        f"--{name} {value}: must be 1 or more"
        for name, value in (("processes", options.processes), ("steps", options.steps))
        if value is not None and value < 1
    ]
    problems += [
        f"{override}: this script sets the meshes by --meshes; leave it out"
        for override in overrides
        if override_parts(override)[0] in MESH_KEYS
    ]
    fixed = DTYPES[options.dtype]
    problems += [
        f"{override}: this script sets the dtype by --dtype; leave it out"
        for override in overrides
        if override_parts(override)[0] in fixed
    ]
    given = options.recompute.split(",") if options.recompute else []
    requested = list(RECOMPUTE) if given == ["all"] else given
    problems += [
        f"--recompute {name}: no such policy; give all, or some of {','.join(RECOMPUTE)}"
        for name in requested
        if name not in list(RECOMPUTE)
    ]
    options.recompute = [each for each in RECOMPUTE if each in requested] or None
    out: Path | None = options.out
    if out is not None and os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        problems.append(f"--out {out}: exists and is not an empty folder; choose a new one")
    raise_all(problems)
    return options, [*overrides, *(f"{key}={value}" for key, value in fixed.items())]


def compose(overrides: list[str], check: bool = True) -> FinetuneConfig | None:
    """Compose the recipe's config for one process; return None if it only prints a text (--cfg)."""
    single = ParallelismConfig(strategy=Strategy.single, dp_shard=1)

    def problems(cfg: FinetuneConfig, refused: Collection[str]) -> list[str]:
        if not check:
            return []
        return [*problems_before_start(replace(cfg, parallelism=single), 1, refused), *_reference_problems(cfg)]

    return compose_from_command_line("finetune", FinetuneConfig, RECIPES, problems, overrides)


def _reference_problems(cfg: FinetuneConfig) -> list[str]:
    """Return the problems of settings that the reference, a loop in plain PyTorch, does not have."""
    training, problems = cfg.training, []
    if not isinstance(cfg.optimizer, AdamWConfig):
        problems.append(f"optimizer={cfg.optimizer.kind}: the reference supports AdamW only; set optimizer=adamw")
    if training.neftune_alpha:
        problems.append(
            f"training.neftune_alpha={training.neftune_alpha:g}: the reference trains without this noise; set it to 0"
        )
    if training.skip_spikes is not None:
        problems.append(f"training.skip_spikes={training.skip_spikes:g}: the reference skips no update; set it to null")
    if training.max_steps is None:
        problems.append(
            f"training.epochs={training.epochs:g}: the comparison needs the length of the learning-rate schedule in "
            "steps; set training.max_steps and training.epochs=null"
        )
    return problems


def plan(options: Namespace, overrides: list[str], cfg: FinetuneConfig) -> list[MeshPlan]:
    """Return the meshes to compare. Raises ConfigError for a name in --meshes that is unknown or cannot run."""
    shape = read_shape(cfg.model)
    if options.meshes == "all":
        return plan_all(cfg, options.processes, shape, options.recompute)
    choices = option_groups([CONF, Path.cwd() / "conf"]).get("parallelism", [])
    plans = []
    for name in options.meshes.split(","):
        layout = layout_of(name, cfg.parallelism)
        if layout is None:
            if name not in choices:
                raise ConfigError(
                    f"--meshes {name}: no such mesh; give all, an option of conf/parallelism ({', '.join(choices)}) or "
                    "axes such as pp2_dp_shard2_tp2_sp"
                )
            composed = compose([*overrides, f"parallelism={name}"], check=False)
            layout = composed.parallelism if composed is not None else cfg.parallelism
        for policy in options.recompute or (None,):
            label = name if policy is None else f"{name}_{policy}"
            recomputed = layout if policy is None else replace(layout, activation_checkpointing=policy)
            plans.append(plan_mesh(label, recomputed, cfg, options.processes, shape))
    raise_all([f"--meshes {each.name}: {problem}" for each in plans for problem in each.problems])
    return plans
