"""Command line of scripts/plan.py: its options, the recipe's config, the model and the device."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import environ
from typing import NoReturn

from components.config.compose.command_line import compose_from_command_line
from components.config.compose.explain import override_parts
from components.config.compose.sources import CONF
from components.config.schema.recipes import (
    ClassifyConfig,
    DistillConfig,
    DpoConfig,
    FinetuneConfig,
    GrpoConfig,
    PretrainConfig,
    TrainConfig,
)
from components.config.shape import ModelShape, read_shape
from components.launch.machine import processes_of, visible_gpus
from components.launch.overrides import device_of, fixed_keys
from components.package import INSTALLED, PROJECT
from components.planning.formulas.hardware import Hardware
from components.planning.formulas.ranking import Choice, LeftOut, Plan, legal_plans
from components.protocol.errors import ConfigError
from components.terminal import HelpText

RECIPES: dict[str, type[TrainConfig]] = {
    "finetune": FinetuneConfig,
    "pretrain": PretrainConfig,
    "dpo": DpoConfig,
    "grpo": GrpoConfig,
    "distill": DistillConfig,
    "classify": ClassifyConfig,
}


@dataclass(slots=True)
class PlanRequest:
    """What to plan: a recipe's config, the processes and the device."""

    options: Namespace
    overrides: list[str]
    cfg: TrainConfig
    shape: ModelShape
    choice: Choice
    hardware: Hardware
    left_out: LeftOut = field(default_factory=LeftOut)

    def plans(self) -> list[Plan]:
        """Return the fitting candidates, the fastest first; all that can be shown pass the recipe's own checks."""
        wanted = max(self.options.top, self.options.why or 0, self.options.dry_run)
        return legal_plans(self.cfg, self.shape, self.choice, self.hardware, self.left_out, wanted)

    def planned(self, plan: Plan) -> TrainConfig:
        """Return the config of a plan's run."""
        training = replace(self.cfg.training, micro_batch_size=plan.candidate.micro_batch_size)
        return replace(self.cfg, parallelism=plan.candidate.parallelism, training=training)

    def command(self, plan: Plan) -> str:
        """Return the command that starts a plan."""
        chosen = plan.candidate.overrides(self.cfg.parallelism)
        kept = [
            override
            for override in self.overrides
            if override_parts(override)[0] not in {one.partition("=")[0] for one in chosen}
        ]
        recipe = self.options.recipe
        start = ["meshbook", recipe] if PROJECT == INSTALLED else ["python", f"recipes/{recipe}.py"]
        return shlex.join([*start, *kept, *chosen])


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"scripts/plan.py: {message}; see --help")


def read_options(arguments: Sequence[str], description: str | None) -> tuple[Namespace, list[str]]:
    """Return the options of a command line, and the recipe's overrides. Raises ConfigError."""
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=HelpText,
    )
    parser.add_argument(
        "--recipe", choices=list(RECIPES), default="finetune", help="recipe to plan (default: finetune)"
    )
    parser.add_argument("--top", type=int, default=8, help="rows of the table (default: 8)")
    parser.add_argument("--why", type=int, metavar="ROW", help="print every term of a row with its formula and source")
    parser.add_argument("--left-out", action="store_true", help="print why other meshes are left out")
    parser.add_argument(
        "--dry-run",
        type=int,
        metavar="N",
        default=0,
        help="simulate the best N rows on fake tensors; imports torch",
    )
    parser.add_argument(
        "--draw", metavar="FILE.svg", help="draw row 1, or the row of --why, as an SVG picture in this file"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--measure", nargs="?", const="", metavar="NAME", help="measure the device: write its file")
    parser.add_argument("--force", action="store_true", help="with --measure: replace an existing file")
    options, overrides = parser.parse_known_args(arguments)
    if options.measure is None and options.force:
        parser.error("--force needs --measure")
    if options.measure is not None:
        names = [name for name, value in vars(options).items() if value != parser.get_default(name)]
        others = [f"--{name.replace('_', '-')}" for name in names if name not in ("measure", "force")]
        if others + overrides:
            parser.error(f"--measure plans nothing and prints YAML: leave out {' '.join(others + overrides)}")
    for name, value in (("top", options.top), ("why", options.why), ("dry-run", options.dry_run or None)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: must be 1 or more")
    return options, overrides


def read_request(options: Namespace, overrides: list[str]) -> PlanRequest | None:
    """Compose the recipe's config; None if the overrides only print a text (--cfg job).

    Raises ConfigError with all problems.
    """
    cfg = _compose(options.recipe, overrides)
    if cfg is None:
        return None
    hardware = device_of(cfg)
    gpus = visible_gpus(environ)
    world = processes_of(cfg, gpus)
    if cfg.cluster.procs_per_node == "auto" and not gpus and hardware.is_gpu:
        world = hardware.gpus_per_node * cfg.cluster.most_nodes
    return PlanRequest(
        options=options,
        overrides=overrides,
        cfg=cfg,
        shape=read_shape(cfg.model),
        choice=Choice(world, max(1, world // cfg.cluster.most_nodes), fixed_keys(overrides)),
        hardware=hardware,
    )


def _compose(recipe: str, overrides: list[str]) -> TrainConfig | None:
    return compose_from_command_line(recipe, RECIPES[recipe], CONF.parent / "recipes", arguments=overrides)
