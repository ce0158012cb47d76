"""What each mesh axis does to the memory of a rank, measured on gloo processes of this machine.

python scripts/memory.py                                    # a Llama and a Qwen3-MoE of 100 MB, made from scratch
python scripts/memory.py model=smollm2_135m --degrees 2     # a model of yours, two ranks of each axis
python scripts/memory.py model=tiny --seq 512 --out memory.md

Takes what recipes/finetune.py takes for its model. Trains two steps in float32 per mesh, in processes that only this
script starts, and prints a Markdown table per model. A figure is that of the rank that has most.
"""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from components.config.compose.command_line import compose_from_command_line
from components.config.compose.explain import override_parts
from components.config.compose.sources import CONF
from components.config.errors import EXIT_INVALID, ConfigError
from components.config.schema.checks import raise_all
from components.config.schema.model import ModelConfig
from components.config.schema.parallelism import ContextAttention, ParallelismConfig, Strategy
from components.config.schema.recipes import FinetuneConfig
from components.config.shape import read_shape
from components.protocol.failures import tell_problems
from components.terminal import print_text

if TYPE_CHECKING:
    from scripts._memory.ranks import Usage

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
"""What is measured where no model is named: some 100 MB of parameters each."""
STATE_SEQ, STATE_MICRO_BATCHES = 128, 4
"""Rows for every axis but cp, which is measured on rows of --seq tokens, one at a time."""
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """A mesh to measure."""

    name: str
    parallelism: ParallelismConfig
    world: int
    long: bool
    """Whether it computes rows of --seq tokens."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"scripts/memory.py: {message}; see --help")


def read_options(arguments: list[str]) -> tuple[Namespace, list[str]]:
    """Split a command line into this script's options and what the recipe takes. Raises ConfigError."""
    parser = _Parser(
        prog="scripts/memory.py", description=__doc__, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--degrees", default="2,4", help="ranks of each axis, separated by commas (default: 2,4)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a row for the rows of cp (default: 1024)")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    options, overrides = parser.parse_known_args(arguments)
    numbers = options.degrees.split(",")
    problems = [
        f"--degrees {options.degrees}: must be numbers of 2 or more, such as 2,4"
        for number in numbers
        if not (number.isdigit() and int(number) > 1)
    ]
    problems += [
        f"{override}: the meshes are made from --degrees here; leave it out"
        for override in overrides
        if override_parts(override)[0].partition(".")[0] == "parallelism"
    ]
    raise_all(problems)
    options.degrees = [int(number) for number in numbers]
    multiple = 2 * math.lcm(*options.degrees)
    if options.seq < multiple or options.seq % multiple:
        raise ConfigError(f"--seq {options.seq}: cp cuts a row into 2 x cp chunks; give a multiple of {multiple}")
    return options, overrides


def models_to_measure(overrides: list[str]) -> dict[str, ModelConfig]:
    """Return the named model, or the two made for this table. Raises ConfigError."""
    named = [override for override in overrides if override_parts(override)[0] == "model"]
    if named:
        return {" ".join(named): _compose(overrides)}
    return {name: _compose([*values, *overrides]) for name, values in MODELS.items()}


def _compose(overrides: list[str]) -> ModelConfig:
    argv, sys.argv = sys.argv, [sys.argv[0], *overrides, "parallelism=single", "model.dtype=float32"]
    try:
        cfg = compose_from_command_line("finetune", FinetuneConfig, CONF.parent / "recipes", lambda cfg, refused: [])
    finally:
        sys.argv = argv
    if cfg is None:
        raise ConfigError("scripts/memory.py: Hydra's own options show configs only; use them with a recipe")
    return cfg.model


def shapes_of(degrees: list[int], seq: int, experts: bool) -> list[Shape]:
    """Return the meshes: one process, then each axis alone, `ep` only for a mixture of experts."""
    single = ParallelismConfig(strategy=Strategy.single, dp_shard=1)
    short: dict[str, dict[str, Any]] = {"dp_shard": {}, "tp": {}, "tp with sequence_parallel": {}, "pp": {}}
    short["tp with sequence_parallel"] = {"sequence_parallel": True}
    if experts:
        short["ep"] = {}
    long = {f"cp by {way}": {"cp_attention": way} for way in (ContextAttention.ulysses, ContextAttention.all_gather)}
    found = []
    for name, axes, is_long in (("single", short, False), (f"single, rows of {seq}", long, True)):
        found.append(Shape(name, single, 1, is_long))
        for axis, options in axes.items():
            for degree in degrees:
                degrees_of = {"dp_shard": 1, axis.split()[0]: degree}
                found.append(Shape(f"{axis} {degree}", ParallelismConfig(**degrees_of, **options), degree, is_long))
    return found


def table(shapes: list[Shape], figures: dict[str, Usage | str]) -> list[str]:
    """Return the Markdown of a model: MiB, and in brackets the part of what one process has."""
    lines = [
        "| mesh | parameters | gradients | optimizer | saved for the backward | peak of a step |",
        "|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        usage = figures[shape.name]
        alone = figures[next(each.name for each in shapes if each.world == 1 and each.long == shape.long)]
        if isinstance(usage, str) or isinstance(alone, str):
            lines.append(f"| {shape.name} | refused: {usage} | | | | |")
            continue
        parts = [
            f"{value / MIB:.1f}" + (f" ({value / whole:.2f})" if shape.world > 1 else "")
            for value, whole in zip(astuple(usage), astuple(alone), strict=True)
        ]
        lines.append(f"| {shape.name} | {' | '.join(parts)} |")
    return lines


def main() -> int:
    """Compose, measure, tell. What a person got wrong is told before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the allocator warns of what was there before it was watched
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        options, overrides = read_options(sys.argv[1:])
        measured = models_to_measure(overrides)
        lines = []
        for name, cfg in measured.items():
            from scripts._memory.ranks import Load, measure_all

            shapes = shapes_of(options.degrees, options.seq, bool(read_shape(cfg).experts))
            loads = {True: Load(options.seq), False: Load(STATE_SEQ, STATE_MICRO_BATCHES)}
            figures = measure_all(cfg, {each.name: (each.parallelism, loads[each.long], each.world) for each in shapes})
            lines += [f"{name}, MiB of the rank that has most (part of one process):", "", *table(shapes, figures), ""]
            print_text("\n".join(lines[-len(shapes) - 5 :]), flush=True)
    except ConfigError as error:
        tell_problems(error.problems)
        return EXIT_INVALID
    if options.out is not None:
        options.out.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
