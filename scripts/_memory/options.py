"""Command line of scripts/memory.py: its options, and the models to measure."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import NoReturn

from components.config.compose.command_line import compose_from_command_line
from components.config.compose.explain import override_parts
from components.config.compose.sources import CONF
from components.config.schema.model import ModelConfig
from components.config.schema.recipes import FinetuneConfig
from components.protocol.errors import ConfigError, raise_all
from components.protocol.processes import whole_number
from components.protocol.run_files import is_replaceable
from components.terminal import HelpText

MEASURED = ", MiB, maximum over the ranks (fraction of a single process):"
"""End of the title of each table."""
MODELS = {
    "Llama": (
        "model=tiny",
        "model.config.hidden_size=512",
        "model.config.intermediate_size=1536",
        "model.config.num_hidden_layers=8",
        "model.config.num_attention_heads=8",
        "model.config.num_key_value_heads=8",
        "model.config.vocab_size=4096",
    ),
    "Qwen3-MoE": (
        "model=tiny_moe",
        "model.config.hidden_size=256",
        "model.config.moe_intermediate_size=512",
        "model.config.num_experts=16",
        "model.config.num_hidden_layers=4",
        "model.config.num_attention_heads=8",
        "model.config.num_key_value_heads=8",
        "model.config.vocab_size=4096",
    ),
}
"""Default models, with about 100 MB of parameters each."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"scripts/memory.py: {message}; see --help")


def read_options(arguments: list[str], description: str | None = None) -> tuple[Namespace, list[str]]:
    """Split the command line into the options of the script and the overrides of the recipe. Raises ConfigError."""
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=HelpText,
    )
    parser.add_argument("--degrees", default="2,4", help="degrees of each axis, separated by commas (default: 2,4)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens per row for cp (default: 1024)")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    options, overrides = parser.parse_known_args(arguments)
    numbers = [whole_number(each) or 0 for each in options.degrees.split(",")]
    problems = []
    if options.out is not None and not is_replaceable(options.out, MEASURED):
        problems.append(f"--out {options.out}: exists and is not of this script; move it away, or choose another file")
    elif options.out is not None and not options.out.parent.is_dir():
        problems.append(f"--out {options.out}: no folder {options.out.parent}; create it, or choose another file")
    if min(numbers) < 2:
        problems.append(f"--degrees {options.degrees}: must be integers of 2 or more, such as 2,4")
    problems += [
        f"{override}: this script sets the meshes by --degrees; leave it out"
        for override in overrides
        if override_parts(override)[0].partition(".")[0] == "parallelism"
    ]
    raise_all(problems)
    options.degrees = numbers
    multiple = 2 * math.lcm(*options.degrees)
    if options.seq < multiple or options.seq % multiple:
        raise ConfigError(
            f"--seq {options.seq}: must be divisible by 2 * cp for each of --degrees; give a multiple of {multiple}"
        )
    return options, overrides


def models_to_measure(overrides: list[str]) -> dict[str, ModelConfig]:
    """Return the config of the model in `overrides`, or those of the default models, by name. Raises ConfigError."""
    named = [override for override in overrides if override_parts(override)[0] == "model"]
    if named:
        return {" ".join(named): _compose(overrides)}
    return {name: _compose([*values, *overrides]) for name, values in MODELS.items()}


def _compose(overrides: list[str]) -> ModelConfig:
    given = [*overrides, "parallelism=single", "model.dtype=float32"]
    cfg = compose_from_command_line("finetune", FinetuneConfig, CONF.parent / "recipes", arguments=given)
    if cfg is None:
        raise ConfigError("scripts/memory.py: --cfg only prints a config; use it with a recipe")
    return cfg.model
